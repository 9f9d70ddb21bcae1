"""What data parallelism needs of a communicator; `fireflyer.collectives.Communicator` has it."""

from __future__ import annotations

from typing import Any, Literal, Protocol

__all__ = ["Communicator", "Work"]


class Work(Protocol):
    """A collective that was started. It keeps its array alive."""

    def wait(self, timeout_ns: int | None = None) -> None:
        """Blocks until the array holds the result. Raises what went wrong, e.g. `PeerFailed` or `Timeout`."""

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""


class Communicator(Protocol):
    """Collectives over all ranks. Every rank starts the same ones in the same order.

    Arrays are contiguous CPU tensors, of a floating type or int64, changed in place; while a
    `Work` is not done its array must be left alone. One that has a method `empty` as that of
    `fireflyer.collectives.Communicator` is asked for the memory of gradients.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def allreduce(self, array: Any, *, op: str = ..., async_op: Literal[True]) -> Work:
        """`op` is `sum`, or for floating types `mean`: the sum divided by the number of ranks, in at least float32,
        and rounded once. The same bits on every rank."""

    def broadcast(self, array: Any, *, root: int = 0) -> object:
        """Replaces the array by that of rank `root`; blocks."""

    def abort(self, reason: str) -> None:
        """Makes every pending and later operation fail with `Aborted` on every rank; nothing where it has failed."""
