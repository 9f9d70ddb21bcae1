"""Coroutines on simulated nodes: they wait for delays, and for gates that something else opens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from fireflyer.base.units import MS
from fireflyer.sim import SimNode

__all__ = ["Gate", "drive", "sleep"]

T = TypeVar("T")


class _Sleep:
    def __init__(self, delay_ns: int) -> None:
        self._delay_ns = delay_ns

    def __await__(self) -> Generator[int, None, None]:
        yield self._delay_ns


async def sleep(delay_ns: int) -> None:
    await _Sleep(delay_ns)


class Gate(Generic[T]):
    """Opens once, with a value. One coroutine at a time waits for it."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.wake: Callable[[], None] | None = None

    def open(self, value: T) -> None:
        if self.value is None:
            self.value = value
            wake, self.wake = self.wake, None
            if wake is not None:
                wake()

    async def wait(self, limit_ns: int) -> T | None:
        """None: it has not opened in this time."""
        if self.value is None:
            await _Wait(self, limit_ns)
            self.wake = None
        return self.value


class _Wait:
    def __init__(self, gate: Gate[Any], limit_ns: int) -> None:
        self.gate, self.limit_ns = gate, limit_ns

    def __await__(self) -> Generator[_Wait, None, None]:
        yield self


def drive(node: SimNode, work: Callable[[], Awaitable[None]], *, before_step: Callable[[], None] | None = None) -> None:
    """Runs `work()` on this incarnation of the node, a step per event. `before_step` may raise `SimCrash`. An error out
    of it ends the simulation."""
    running: list[Generator[Any, None, None]] = []
    incarnation = node.incarnation

    def advance() -> None:
        if before_step is not None:
            before_step()
        if not running:
            running.append(work().__await__())
        try:
            waits_for = next(running[0])
        except StopIteration:
            return
        if isinstance(waits_for, _Wait):
            timer = node.after(waits_for.limit_ns, advance)

            def wake() -> None:
                if timer.pending and node.incarnation == incarnation:
                    timer.cancel()
                    node.after(0, advance)

            waits_for.gate.wake = wake
        else:
            node.after(node.world.random.randrange(MS // 4) if waits_for is None else waits_for, advance)

    node.after(node.world.random.randrange(MS), advance)
