"""Drives on simulated nodes the same machines that the real driver drives.

A machine decides: `handle(now_ns, event) -> effects`. Performing an effect is a generator: it may yield between two
operations (other nodes run, the node may die there) and returns the event that tells the machine how it went, or None.
Effects of one machine are performed one after the other, in order; use `parallel` for those that must not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

from fireflyer.sim.world import SimNode

__all__ = ["Machine", "MachineDriver"]

E = TypeVar("E")
F = TypeVar("F")
EventIn = TypeVar("EventIn", contravariant=True)


class Machine(Protocol[EventIn, F]):
    """State machine without IO, whose effects `MachineDriver` performs."""

    def handle(self, now_ns: int, event: EventIn, /) -> list[F]: ...


class MachineDriver(Generic[E, F]):
    """One machine on one node. All of it dies with the node's incarnation."""

    def __init__(
        self,
        node: SimNode,
        machine: Machine[E, F],
        perform: Callable[[F], Generator[int | None, None, E | None]],
        *,
        parallel: Callable[[F], bool] = lambda _effect: False,
    ) -> None:
        self._node = node
        self._machine = machine
        self._perform = perform
        self._parallel = parallel
        self._queue: deque[F] = deque()
        self._busy = False

    @property
    def idle(self) -> bool:
        return not self._busy and not self._queue

    def submit(self, event: E) -> None:
        """Feeds an event at the present instant."""
        self._node.world.record("event", self._node.name, type(event).__name__)
        for effect in self._machine.handle(self._node.clock.now_ns(), event):
            if self._parallel(effect):
                self._node.spawn(self._run(effect))
            else:
                self._queue.append(effect)
        self._next()

    def _next(self) -> None:
        if not self._busy and self._queue:
            self._busy = True
            self._node.spawn(self._run(self._queue.popleft()), done=self._finished)

    def _finished(self) -> None:
        self._busy = False
        self._next()

    def _run(self, effect: F) -> Generator[int | None, None, None]:
        self._node.world.record("effect", self._node.name, type(effect).__name__)
        event = yield from self._perform(effect)
        if event is not None:
            self.submit(event)
