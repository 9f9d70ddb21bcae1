"""A small language model as layers, its stages, and what one process computes for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from fireflyer.codesign.schedule import Schedule, build_schedule
from fireflyer.training.pipeline import Pipeline, PipelineCommunicator, stages_of_layers

__all__ = [
    "BATCH",
    "EXECUTED",
    "alone",
    "batch_of",
    "gradients_of",
    "layer",
    "layers_for",
    "loss_of",
    "pipeline_of",
    "schedule_of",
    "sizes_for",
    "worst_error",
]

_SEED: Final = threading.Lock()
VOCABULARY, WIDTH, LENGTH, BATCH = 11, 8, 5, 16
EXECUTED = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zbv", "dualpipev", "dualpipe")


class Block(nn.Module):
    """Attention over the positions before, and a network of two layers, each beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        wide: torch.Tensor = self.up(self.norm(x))
        return x + nn.functional.linear(torch.tanh(wide), self.down.weight, self.down.bias) * self.scale


def layer(index: int, layers: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same values in every process: embedding, blocks, head."""
    with _SEED:  # ranks may be threads, and the generator is one for all
        torch.manual_seed(1000 + index)
        made: nn.Module = Block()
        if index == 0:
            made = nn.Embedding(VOCABULARY, WIDTH)
        elif index == layers - 1:
            made = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return made.to(dtype)


def schedule_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    return build_schedule(name, ranks, micro_batches)


def layers_for(schedule: Schedule) -> int:
    return schedule.placement.stages + 2


def sizes_for(schedule: Schedule) -> list[int]:
    """Unequal stages: the first holds three layers."""
    return [3] + [1] * (schedule.placement.stages - 1)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(step: int, micro_batches: int, *, unequal: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = [], []
    for index in range(micro_batches):
        shape = (2, LENGTH + (index % 3 if unequal else 0))
        inputs.append(torch.randint(VOCABULARY, shape, generator=generator))
        targets.append(torch.randint(VOCABULARY, shape, generator=generator))
    return inputs, targets


def pipeline_of(
    schedule: Schedule, comm: PipelineCommunicator, *, dtype: torch.dtype = torch.float64, **options: object
) -> Pipeline:
    layers = layers_for(schedule)
    stages = stages_of_layers(
        schedule.placement,
        comm.rank,
        sizes_for(schedule),
        lambda span: nn.Sequential(*(layer(index, layers, dtype) for index in span)),
    )
    return Pipeline(schedule, stages, comm, loss=loss_of, **options)  # type: ignore[arg-type]


def gradients_of(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """By the name in the whole model; those of both directions, if there are two, one after the other."""
    sizes = sizes_for(pipeline.schedule)
    found: dict[str, torch.Tensor] = {}
    for (direction, stage), module in pipeline.modules.items():
        for name, parameter in module.named_parameters():
            index, rest = name.split(".", 1)
            assert parameter.grad is not None, (stage, name)
            found[f"{sum(sizes[:stage]) + int(index)}.{rest}/{direction}"] = parameter.grad.clone()
    return found


def alone(
    schedule: Schedule,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    tied: bool = False,
    shares: Sequence[float] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of one process that accumulates micro-batches in their order, with one thread as ranks have:
    bits of products depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _accumulated(schedule, inputs, targets, dtype, tied=tied, shares=shares)
    finally:
        torch.set_num_threads(threads)


def _accumulated(
    schedule: Schedule,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    tied: bool,
    shares: Sequence[float] | None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    layers = layers_for(schedule)
    model = nn.Sequential(*(layer(index, layers, dtype) for index in range(layers)))
    if tied:
        head, embedding = model[-1], model[0]
        assert isinstance(head, nn.Linear)
        assert isinstance(embedding, nn.Embedding)
        head.weight = embedding.weight
    losses = []
    for index, (one, target) in enumerate(zip(inputs, targets, strict=True)):
        loss = loss_of(model(one), target)
        (loss / len(inputs) if shares is None else loss * shares[index]).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    named = model.named_parameters(remove_duplicate=False)
    return losses, {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def worst_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of a gradient, over its norm. All of `found` are compared."""
    errors: list[float] = [
        ((gradient - expected[name.split("/")[0]]).norm() / expected[name.split("/")[0]].norm()).item()
        for name, gradient in found.items()
    ]
    return max(errors)
