"""The reducer on a clock set by hand: the reported overlap is the one that was, and memory in use is left alone."""

from typing import Any, Literal

import pytest
import torch
from torch import nn

from fireflyer.training import DistributedDataParallel


class HandWork:
    """An allreduce that takes until `ends_ns`, or until it is waited for, which moves the clock there."""

    def __init__(self, world: "HandWorld", ends_ns: int) -> None:
        self.world = world
        self.ends_ns = ends_ns

    def done(self) -> bool:
        return self.world.now_ns >= self.ends_ns

    def wait(self, timeout_ns: int | None = None) -> None:
        if self.world.interrupts_left > 0:
            self.world.interrupts_left -= 1
            raise KeyboardInterrupt
        self.world.waited_for.append(self)
        self.world.now_ns = max(self.world.now_ns, self.ends_ns)


class HandWorld:
    """One rank. An allreduce takes 100 ns and starts when the one before has ended; a layer's backward takes 60 ns.

    Time starts with the broadcast that ends the construction.
    """

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.now_ns = 0
        self.free_at_ns = 0
        self.interrupts_left = 0
        self.waited_for: list[HandWork] = []
        self.started: list[HandWork] = []

    def allreduce(self, array: Any, *, op: str = "sum", async_op: Literal[True]) -> HandWork:
        self.free_at_ns = max(self.now_ns, self.free_at_ns) + 100
        self.started.append(HandWork(self, self.free_at_ns))
        return self.started[-1]

    def broadcast(self, array: Any, *, root: int = 0) -> None:
        self.now_ns = self.free_at_ns = 0

    def abort(self, reason: str) -> None:
        raise AssertionError(f"nothing fails here: {reason}")

    def layer(self) -> nn.Linear:
        layer = nn.Linear(2, 2, bias=False)

        def computes(gradient: torch.Tensor) -> None:
            self.now_ns += 60

        layer.weight.register_hook(computes)  # type: ignore[no-untyped-call]
        return layer


def test_overlap_with_backward_is_told_from_waiting_at_its_end() -> None:
    world = HandWorld()
    module = nn.Sequential(world.layer(), world.layer(), world.layer())
    model = DistributedDataParallel(module, world, bucket_bytes=1, now_ns=lambda: world.now_ns)
    model(torch.ones(1, 2)).sum().backward()
    # Gradients at 60, 120 and 180; allreduces from 60 to 160, to 260 and to 360.
    stats = model.stats()
    assert world.now_ns == 360
    assert stats.in_flight_ns == 300
    assert stats.blocked_ns == 180
    assert stats.overlapped_ns == 120
    assert (stats.allreduces, stats.allreduces_during_backward) == (3, 3)
    assert stats.reduced_bytes == 3 * 16 + 4

    world.now_ns = world.free_at_ns = 1000
    model(torch.ones(1, 2)).sum().backward()
    assert (model.stats().passes, model.stats().in_flight_ns, model.stats().blocked_ns) == (2, 600, 360)


def test_with_one_bucket_nothing_overlaps() -> None:
    world = HandWorld()
    module = nn.Sequential(world.layer(), world.layer())
    model = DistributedDataParallel(module, world, now_ns=lambda: world.now_ns)
    model(torch.ones(1, 2)).sum().backward()
    assert model.stats().overlapped_ns == 0
    assert model.stats().in_flight_ns == 100


def test_what_an_interrupted_wait_left_behind_is_waited_for_before_its_memory_is_used_again() -> None:
    world = HandWorld()
    model = DistributedDataParallel(nn.Sequential(world.layer(), world.layer()), world, bucket_bytes=1)
    world.started.clear()
    world.waited_for.clear()
    world.interrupts_left = 1
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 2)).sum().backward()
    first, second = world.started
    assert world.waited_for == []
    model(torch.ones(1, 2)).sum().backward()
    assert world.waited_for == [first, second, *world.started[2:]]
