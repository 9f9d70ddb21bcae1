"""Time and chance on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from fireflyer.base.ports import Clock
from fireflyer.base.units import SECOND
from fireflyer.kvstore.core.timing import DeadlinePassed, Timing
from fireflyer.runtime.clock import MonotonicClock

__all__ = ["LoopTiming"]


class LoopTiming(Timing):
    """Time and chance for the event loop that runs."""

    def __init__(self, *, clock: Clock | None = None, rng: random.Random | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._rng = rng or random.Random()

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def below(self, bound: int) -> int:
        return self._rng.randrange(bound)

    async def sleep(self, delay_ns: int) -> None:
        await asyncio.sleep(delay_ns / SECOND)

    async def pause(self) -> None:
        return

    @contextlib.asynccontextmanager
    async def limit(self, deadline_ns: int) -> AsyncIterator[None]:
        scope = asyncio.timeout((deadline_ns - self.now_ns()) / SECOND)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if scope.expired() and type(error) is TimeoutError:  # and not one that was raised inside
                raise DeadlinePassed from error
            raise
