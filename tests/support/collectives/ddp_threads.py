"""Ranks as threads that share a small network and one batch of data."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from tests.support.collectives.thread_world import ThreadCommunicator, run_ranks
from torch import nn

__all__ = [
    "Gradients",
    "TwoHeads",
    "assert_close",
    "batch",
    "errors",
    "gradients",
    "meta_buffer",
    "network",
    "run",
    "same_bits",
    "seeded",
    "share",
    "single_process",
]


T = TypeVar("T")
Gradients = dict[str, torch.Tensor]
ONE_AT_A_TIME = threading.Lock()


def seeded(build: Callable[[], T], seed: int = 0) -> T:
    """Ranks are threads here, and share one generator of random numbers."""
    with ONE_AT_A_TIME:
        torch.manual_seed(seed)
        return build()


def network(seed: int = 0) -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)), seed
    )


def batch(size: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))


def meta_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.empty(1, device="meta"))
    return module


def share(whole: torch.Tensor, comm: ThreadCommunicator) -> torch.Tensor:
    return whole.chunk(comm.world_size)[comm.rank]


def gradients(module: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def run(size: int, body: Callable[[ThreadCommunicator], T], *, fail_at: int | None = None) -> list[T]:
    outcomes: list[T] = []
    for outcome in run_ranks(size, body, fail_at=fail_at):
        if isinstance(outcome, BaseException):
            raise outcome
        outcomes.append(outcome)
    return outcomes


def errors(size: int, body: Callable[[ThreadCommunicator], object], *, fail_at: int | None = None) -> list[str]:
    """`Class: message` of each rank."""
    outcomes = run_ranks(size, body, fail_at=fail_at)
    return [f"{type(o).__name__}: {o}" if isinstance(o, BaseException) else f"returned {o}" for o in outcomes]


def same_bits(a: Gradients, b: Gradients) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_close(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def single_process(module: nn.Module, whole: torch.Tensor) -> Gradients:
    module(whole).square().mean().backward()
    return gradients(module)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, heads: str) -> Any:
        x = self.body(x).tanh()
        return sum(getattr(self, head)(x).square().mean() for head in heads.split())
