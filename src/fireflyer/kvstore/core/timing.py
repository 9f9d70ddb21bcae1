"""Time and chance of the engines, as arguments.

Real engines are given `fireflyer.kvstore.timing.LoopTiming`. In the simulation `SteppedTiming` hands every pause and
every sleep to whoever drives the coroutine, so the same bodies run there without asyncio:

    engine = MemoryEngine(store, waits=SteppedTiming(node.clock.now_ns, random.randrange))
    node.spawn(steps(work))        work() is a coroutine; a step yields a delay in nanoseconds, or None for a short one
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, Protocol, TypeVar

from fireflyer.base.units import MS

__all__ = ["MAX_CONFLICTS", "DeadlinePassed", "SteppedTiming", "Timing", "backoff_ns", "steps"]

T = TypeVar("T")

MAX_CONFLICTS: Final = 64
FIRST_BACKOFF_NS: Final = 2 * MS
MAX_BACKOFF_NS: Final = 500 * MS


class DeadlinePassed(Exception):
    """Out of `Timing.limit`: what stood inside has been cancelled."""


class Timing(Protocol):
    """Clock, chance and pauses of an engine."""

    def now_ns(self) -> int: ...

    def below(self, bound: int) -> int:
        """A random integer, 0 <= n < bound."""

    async def sleep(self, delay_ns: int) -> None: ...

    async def pause(self) -> None:
        """Pause before an operation of an engine that does not wait by itself: others may run."""

    def limit(self, deadline_ns: int) -> AbstractAsyncContextManager[None]:
        """Cancels what stands inside when the time has come, and raises `DeadlinePassed`."""


def backoff_ns(attempt: int, below: Callable[[int], int]) -> int:
    """How long to wait after attempt 1, 2, ... has failed: anything up to a bound that doubles, so that those who
    collided once do not collide again."""
    return below(min(FIRST_BACKOFF_NS << min(attempt - 1, 16), MAX_BACKOFF_NS)) + 1


class _Step:
    def __init__(self, delay_ns: int | None) -> None:
        self._delay_ns = delay_ns

    def __await__(self) -> Generator[int | None, None, None]:
        yield self._delay_ns


class SteppedTiming(Timing):
    """Deadlines are found by the transaction itself, at its next operation."""

    def __init__(self, now_ns: Callable[[], int], below: Callable[[int], int]) -> None:
        self._now_ns = now_ns
        self._below = below

    def now_ns(self) -> int:
        return self._now_ns()

    def below(self, bound: int) -> int:
        return self._below(bound)

    async def sleep(self, delay_ns: int) -> None:
        await _Step(delay_ns)

    async def pause(self) -> None:
        await _Step(None)

    def limit(self, deadline_ns: int) -> AbstractAsyncContextManager[None]:  # noqa: ARG002
        return nullcontext()


def steps(work: Callable[[], Awaitable[T]]) -> Generator[int | None, None, T]:
    """Runs the coroutine `work()`, which waits for nothing but `SteppedTiming`. It begins with the first step, so
    that a
    generator that is dropped before it leaves no coroutine behind."""
    waiting: Generator[Any, None, T] = work().__await__()
    return (yield from waiting)
