"""Ranks as threads of one process, with a communicator that sums tensors from rank 0 upwards.

For tests of what is built on a communicator. Operations complete when the last rank has arrived. Ranks that do not
start the same operations in the same order get an error instead of wrong numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import torch

from fireflyer.base.errors import Aborted, FireflyerError, InvariantViolation, PeerFailed, Timeout

__all__ = ["ThreadCommunicator", "ThreadWork", "ThreadWorld", "run_ranks"]

T = TypeVar("T")
TIMEOUT_S = 20.0


class ThreadWork:
    def __init__(self, kind: str, world_size: int, first: int = 0) -> None:
        self.kind = kind
        self._first = first
        self.error: FireflyerError | None = None
        self._arrays: list[torch.Tensor | None] = [None] * world_size
        self._done = threading.Event()

    def wait(self, timeout_ns: int | None = None) -> None:
        seconds = TIMEOUT_S if timeout_ns is None else timeout_ns / 1e9
        if not self._done.wait(seconds):
            absent = [rank for rank, array in enumerate(self._arrays) if array is None]
            raise Timeout(f"ranks {absent} did not join {self.kind} within {seconds} s")
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self._done.is_set()

    def join(self, rank: int, kind: str, array: torch.Tensor) -> None:
        self._arrays[rank] = array
        if kind != self.kind:
            self.fail(InvariantViolation(f"rank {rank} started {kind}, another rank {self.kind}"))
        present = [array for array in self._arrays if array is not None]
        if len(present) == len(self._arrays) and not self.done():
            self._compute(present)
            self._done.set()

    def fail(self, error: FireflyerError) -> None:
        self.error = error
        self._done.set()

    def _compute(self, arrays: list[torch.Tensor]) -> None:
        ordered = arrays[self._first :] + arrays[: self._first] if self.kind.startswith("allreduce") else arrays
        result = ordered[0].clone()
        if self.kind.startswith("allreduce"):
            result = (
                result.to(torch.promote_types(result.dtype, torch.float32)) if result.is_floating_point() else result
            )
            for array in ordered[1:]:
                result += array
            if self.kind.endswith(" mean"):
                result /= len(arrays)
        for array in arrays:
            array.copy_(result)


class ThreadWorld:
    """`fail_at` breaks the operation of that number, and all later ones, on every rank with `PeerFailed`. Sums begin
    with rank `first`: as between ranks on other nodes, worlds may differ in the order of additions."""

    def __init__(self, size: int, *, fail_at: int | None = None, first: int = 0) -> None:
        self.size = size
        self._first = first
        self._fail_at = fail_at
        self._lock = threading.Lock()
        self._works: list[ThreadWork] = []
        self._aborted: Aborted | None = None

    def abort(self, reason: str) -> None:
        with self._lock:
            self._aborted = self._aborted or Aborted(reason)
            for work in self._works:
                if not work.done():
                    work.fail(self._aborted)

    def start(self, rank: int, number: int, kind: str, array: torch.Tensor) -> ThreadWork:
        with self._lock:
            if number == len(self._works):
                self._works.append(ThreadWork(kind, self.size, self._first))
            work = self._works[number]
            if self._fail_at is not None and number >= self._fail_at:
                work.fail(PeerFailed(f"rank {self.size - 1} is gone", rank=self.size - 1))
            if self._aborted is not None:
                work.fail(self._aborted)
            work.join(rank, kind, array.detach())
            return work


class ThreadCommunicator:
    """`started` lists the operations of this rank, e.g. `allreduce float32 120`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.size
        self.started: list[str] = []
        self.on_start: Callable[[str], None] = lambda kind: None
        self._world = world

    def allreduce(self, array: torch.Tensor, *, op: str = "sum", async_op: Literal[True]) -> ThreadWork:
        return self._start("allreduce", array, op)

    def broadcast(self, array: torch.Tensor, *, root: int = 0) -> None:
        assert root == 0
        self._start("broadcast", array).wait()

    def abort(self, reason: str) -> None:
        self._world.abort(f"rank {self.rank} aborted the group: {reason}")

    def _start(self, name: str, array: torch.Tensor, op: str = "") -> ThreadWork:
        assert array.is_contiguous()
        kind = f"{name} {str(array.dtype).removeprefix('torch.')} {array.numel()}"
        self.on_start(kind)
        work = self._world.start(self.rank, len(self.started), f"{kind} {op}", array)
        self.started.append(kind)
        return work


class _Rank(threading.Thread, Generic[T]):
    def __init__(self, comm: ThreadCommunicator, body: Callable[[ThreadCommunicator], T]) -> None:
        super().__init__(name=f"rank-{comm.rank}", daemon=True)
        self.outcome: T | None = None
        self.error: BaseException | None = None
        self._comm = comm
        self._body = body

    def run(self) -> None:
        try:
            self.outcome = self._body(self._comm)
        except BaseException as error:
            self.error = error


def run_ranks(
    size: int, body: Callable[[ThreadCommunicator], T], *, fail_at: int | None = None
) -> list[T | BaseException]:
    """`body(comm)` on each of `size` ranks; what it returned or raised, by rank."""
    world = ThreadWorld(size, fail_at=fail_at)
    ranks = [_Rank(ThreadCommunicator(world, rank), body) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(4 * TIMEOUT_S)
        assert not rank.is_alive(), f"{rank.name} hangs"
    return [rank.outcome if rank.error is None else rank.error for rank in ranks]  # type: ignore[misc]
