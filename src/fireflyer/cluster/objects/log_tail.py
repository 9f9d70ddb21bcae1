"""Sends the logs of a run from their files on a node while they are written: the real driver of `LogShipper`.

`send` gives a request to the manager and raises a `FireflyerError` when that did not work; it is then sent again. With
`NotFound` the manager says that it takes nothing of this run any more: that ends the sending. Files only grow, may
appear at any time, and stay until they are finished; bytes of a file that was cut are said to be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from fireflyer.base.errors import FireflyerError, NotFound
from fireflyer.base.ports import Clock
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.log_shipper import (
    TICK_NS,
    Answered,
    Closed,
    Effect,
    End,
    Event,
    Failed,
    Finished,
    Grew,
    LogShipper,
    Send,
    Tick,
)
from fireflyer.cluster.schema.logs import LogAnswer, LogChunk, LogEnd
from fireflyer.runtime.clock import MonotonicClock

__all__ = ["LogSources", "Sender", "ship_logs"]

Sender = Callable[[LogChunk | LogEnd], Awaitable[LogAnswer]]
_TICK_S: Final = TICK_NS / SECOND


class LogSources(Protocol):
    """The files. Both methods are called in threads."""

    def sizes(self) -> Mapping[str, int]:
        """The logs that there are now, with the bytes that each has. A log that was sent is not asked for again."""

    def read(self, stream: str, offset: int, length: int) -> bytes:
        """`length` bytes, fewer where the file was cut. Raises `OSError`, `FireflyerError`: it is tried again."""


async def ship_logs(
    sources: LogSources,
    send: Sender,
    ended: asyncio.Event,
    *,
    shipper: LogShipper | None = None,
    clock: Clock | None = None,
) -> None:
    """Ship logs until `ended` is set and the manager has all, durably. Raises `NotFound` when it takes no more."""
    await _Tail(sources, send, shipper or LogShipper(), clock or MonotonicClock()).run(ended)


class _Tail:
    def __init__(self, sources: LogSources, send: Sender, shipper: LogShipper, clock: Clock) -> None:
        self._sources = sources
        self._send = send
        self._shipper = shipper
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self._unfinished: dict[str, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()
        self._refused: NotFound | None = None

    async def run(self, ended: asyncio.Event) -> None:
        closing = False
        try:
            while not closing or self._unfinished:
                if not closing:
                    closing = ended.is_set()  # before the look: what was written until then is seen by it
                    self._take(await asyncio.to_thread(self._sources.sizes))
                    for stream in list(self._unfinished) if closing else ():
                        self._feed(Closed(stream))
                self._feed(Tick())
                await self._pause(ended, closing)
                if self._refused is not None:
                    raise self._refused
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pause(self, ended: asyncio.Event, closing: bool) -> None:
        """Until an answer came, the run ended, or a tick."""
        self._answered.clear()
        waits = [asyncio.ensure_future(self._answered.wait())]
        if not closing:
            waits.append(asyncio.ensure_future(ended.wait()))
        await asyncio.wait(waits, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _take(self, sizes: Mapping[str, int]) -> None:
        for stream, size_bytes in sizes.items():
            known_bytes = self._sizes.get(stream, -1)
            if size_bytes > known_bytes:
                if known_bytes < 0:
                    self._unfinished[stream] = None
                self._sizes[stream] = size_bytes
                self._feed(Grew(stream, size_bytes))

    def _feed(self, event: Event) -> None:
        for effect in self._shipper.handle(self._clock.now_ns(), event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send | End):
            task = asyncio.get_running_loop().create_task(self._request(effect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(effect, Finished):
            self._unfinished.pop(effect.stream, None)

    async def _request(self, effect: Send | End) -> None:
        event: Event = Failed(effect.stream, effect.number)
        try:
            message = await self._message(effect)
            if message is not None:
                event = Answered(effect.stream, effect.number, await self._send(message))
        except NotFound as error:
            self._refused = error
        except (FireflyerError, OSError):
            pass  # it is sent again
        self._feed(event)
        self._answered.set()

    async def _message(self, effect: Send | End) -> LogChunk | LogEnd | None:
        """None where the file was cut since it had so many bytes: those are lost."""
        if isinstance(effect, End):
            return LogEnd(effect.stream, effect.end)
        data = b""
        if effect.length:
            data = await asyncio.to_thread(self._sources.read, effect.stream, effect.offset, effect.length)
            if not data:
                size_bytes = self._sizes[effect.stream]
                self._feed(Grew(effect.stream, size_bytes, begin=size_bytes))
                return None
        return LogChunk(effect.stream, effect.offset, data, effect.lost_bytes)
