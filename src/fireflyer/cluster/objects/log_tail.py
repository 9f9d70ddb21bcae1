"""Sends the logs of a run from their files on a node while they are written: the real driver of `LogShipper`.

    await ship_logs(lambda: {"rank-0": "/run/logs/rank-0.log"}, send, ended)

`send` gives a request to the manager and raises a `FireflyerError` when that did not work; it is then sent again. Files
only grow, may appear at any time, and stay until they are finished. Ends when `ended` is set and the manager has all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fireflyer.base.errors import DataCorruption, FireflyerError
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
from fireflyer.cluster.core.objects.log_stream import LogAnswer, LogChunk, LogEnd
from fireflyer.runtime.clock import MonotonicClock

__all__ = ["Sender", "ship_logs"]

Sender = Callable[[LogChunk | LogEnd], Awaitable[LogAnswer]]
_TICK_S: Final = TICK_NS / SECOND


async def ship_logs(
    streams: Callable[[], Mapping[str, str]],
    send: Sender,
    ended: asyncio.Event,
    *,
    shipper: LogShipper | None = None,
    clock: Clock | None = None,
) -> None:
    """`streams`: the logs that there are now, by name, with their files. A log that was sent is not read again."""
    await _Tail(streams, send, shipper or LogShipper(), clock or MonotonicClock()).run(ended)


class _Tail:
    def __init__(
        self, streams: Callable[[], Mapping[str, str]], send: Sender, shipper: LogShipper, clock: Clock
    ) -> None:
        self._streams = streams
        self._send = send
        self._shipper = shipper
        self._clock = clock
        self._paths: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._unfinished: dict[str, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()

    async def run(self, ended: asyncio.Event) -> None:
        closing = False
        try:
            while not closing or self._unfinished:
                was_ended = ended.is_set()  # before the look: what was written until then is seen by it
                self._look()
                if was_ended and not closing:
                    closing = True
                    for stream in list(self._unfinished):
                        self._feed(Closed(stream))
                self._feed(Tick())
                await self._pause(ended, closing)
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

    def _look(self) -> None:
        for stream, path in self._streams().items():
            try:
                size_bytes = os.stat(path).st_size
            except OSError:
                continue  # not there yet
            if self._sizes.get(stream) != size_bytes:
                if stream not in self._sizes:
                    self._paths[stream] = path
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
        event: Event
        try:
            event = Answered(effect.stream, effect.number, await self._send(await self._message(effect)))
        except (FireflyerError, OSError):
            event = Failed(effect.stream, effect.number)
        self._feed(event)
        self._answered.set()

    async def _message(self, effect: Send | End) -> LogChunk | LogEnd:
        if isinstance(effect, End):
            return LogEnd(effect.stream, effect.end)
        data = b""
        if effect.length:
            data = await asyncio.to_thread(_read, self._paths[effect.stream], effect.offset, effect.length)
        return LogChunk(effect.stream, effect.offset, data, effect.lost_bytes)


def _read(path: str, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(fd, length, offset)
    finally:
        os.close(fd)
    if not data:
        raise DataCorruption(f"{path} is shorter than it was; logs must only grow")
    return data
