"""Runs coroutines of the product's shells in a seeded world: they wait for what happens there, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from fireflyer.sim import SimNode, World

__all__ = ["Later", "drive"]

T = TypeVar("T")


class Later(Generic[T]):
    """What one coroutine waits for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._go_on: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        return bool(self._value) or self._error is not None

    def give(self, value: T) -> None:
        if not self.done:
            self._value.append(value)
            self._wake()

    def fail(self, error: Exception) -> None:
        if not self.done:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._go_on is not None:
            self._world.call_after(0, self._go_on)

    def then(self, go_on: Callable[[], None]) -> None:
        """Never at once."""
        self._go_on = go_on
        if self.done:
            self._wake()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value[0]


def drive(node: SimNode, coroutine: Coroutine[Any, None, None], ended: Callable[[], None]) -> None:
    """On this incarnation of the node: when that is dead, the coroutine does not go on."""
    incarnation = node.incarnation

    def step() -> None:
        if not node.alive or node.incarnation != incarnation:
            coroutine.close()
            return
        try:
            later: Later[Any] = coroutine.send(None)
        except StopIteration:
            ended()
            return
        later.then(step)

    step()
