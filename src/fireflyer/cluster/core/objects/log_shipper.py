"""Logs on their way from a node to their store. Pure.

Of each log one request is on its way at a time; it is a chunk, or at the end the word that nothing comes after it. The
bytes are in a file of the node until the store has them durably: this machine only knows offsets.

    Grew, Closed ──> (ready) ──Send, End──> (waiting) ──Answered──> (ready), until Finished
                        ^──────after a pause──────┴──Failed

The store's answer says what it has, and sending goes on there, forwards or back; so answers that are lost, requests
that come twice, and a store that has forgotten its last bytes need nothing of their own. After a start the first
request is empty: it asks for the end. Bytes that are not in the file any more (`Grew.begin`) are said to be lost.

Bytes per second and requests at a time are bounded; the logs take turns. The driver calls `handle` at least each
`TICK_NS`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.cluster.schema.logs import MAX_CHUNK_BYTES, LogAnswer

__all__ = [
    "MAX_STREAMS",
    "TICK_NS",
    "Answered",
    "Closed",
    "Durable",
    "Effect",
    "End",
    "Event",
    "Failed",
    "Finished",
    "Grew",
    "LogShipper",
    "Send",
    "Tick",
]

MAX_STREAMS: Final = 4096
TICK_NS: Final = 100 * MS
FIRST_PAUSE_NS: Final = 100 * MS
MOST_PAUSE_NS: Final = 5 * SECOND


class Grew(msgspec.Struct, frozen=True):
    """The file of `stream`, known or new, has the bytes `begin` to `end` of the log."""

    stream: str
    end: int
    begin: int = 0


class Closed(msgspec.Struct, frozen=True):
    """Nothing is written to it any more. Comes after the last `Grew`."""

    stream: str


class Answered(msgspec.Struct, frozen=True):
    stream: str
    number: int
    answer: LogAnswer


class Failed(msgspec.Struct, frozen=True):
    """The request may or may not have been received."""

    stream: str
    number: int


class Tick(msgspec.Struct, frozen=True):
    pass


Event = Grew | Closed | Answered | Failed | Tick


class Send(msgspec.Struct, frozen=True):
    """Read so many bytes of the file and send them as a `LogChunk`."""

    stream: str
    number: int
    offset: int
    length: int
    lost_bytes: int = 0


class End(msgspec.Struct, frozen=True):
    """Send a `LogEnd`."""

    stream: str
    number: int
    end: int


class Durable(msgspec.Struct, frozen=True):
    """The store has the bytes before `end` for good: the file may lose them."""

    stream: str
    end: int


class Finished(msgspec.Struct, frozen=True):
    """The store has all that it will take: the file may be removed."""

    stream: str
    cut: bool


Effect = Send | End | Durable | Finished


@dataclass(slots=True)
class _Log:
    begin: int = 0
    end: int = 0
    closed: bool = False
    next_offset: int | None = None
    """None: the store has not said yet what it has."""
    durable: int = 0
    waiting: int = 0
    """The number of the request that is on its way; 0: none."""
    pause_ns: int = 0
    not_before_ns: int = 0
    queued: bool = False


class LogShipper:
    def __init__(
        self, *, rate_bytes_per_s: int = 32 * MIB, requests: int = 8, chunk_bytes: int = MAX_CHUNK_BYTES
    ) -> None:
        """`requests`: on their way at a time."""
        if rate_bytes_per_s < chunk_bytes or not 0 < chunk_bytes <= MAX_CHUNK_BYTES or requests < 1:
            raise UsageError(
                f"rate {rate_bytes_per_s}, chunk {chunk_bytes} and requests {requests} must be above 0, the chunk at "
                f"most {MAX_CHUNK_BYTES}, and the rate at least a chunk"
            )
        self._rate = rate_bytes_per_s
        self._most_requests = requests
        self._chunk_bytes = chunk_bytes
        self._logs: dict[str, _Log] = {}
        self._finished: dict[str, None] = {}
        self._ready: deque[str] = deque()
        self._requests = 0
        self._number = 0
        self._credit_bytes = float(rate_bytes_per_s)
        self._credit_at_ns: int | None = None

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(event, Grew):
            self._grew(event)
        elif isinstance(event, Closed):
            if event.stream in self._logs:
                self._logs[event.stream].closed = True
                self._queue(event.stream)
        elif isinstance(event, Answered):
            self._answered(event, effects)
        elif isinstance(event, Failed):
            self._failed(now_ns, event)
        self._send(now_ns, effects)
        return effects

    def _grew(self, event: Grew) -> None:
        if event.stream in self._finished:
            return
        log = self._logs.get(event.stream)
        if log is None:
            if len(self._logs) + len(self._finished) >= MAX_STREAMS:
                raise UsageError(f"a run has more than {MAX_STREAMS} logs on this node; write into fewer files")
            log = self._logs[event.stream] = _Log()
        log.begin, log.end = max(log.begin, event.begin), max(log.end, event.end)
        self._queue(event.stream)

    def _answered(self, event: Answered, effects: list[Effect]) -> None:
        log = self._logs.get(event.stream)
        if log is None or event.number != log.waiting:
            return  # of a request that was given up
        self._end_request(log)
        log.pause_ns = 0
        answer = event.answer
        if answer.cut or answer.closed:
            del self._logs[event.stream]
            self._finished[event.stream] = None
            effects.append(Finished(event.stream, answer.cut))
            return
        log.next_offset = min(answer.end, log.end)
        if min(answer.durable, log.end) > log.durable:
            log.durable = min(answer.durable, log.end)
            effects.append(Durable(event.stream, log.durable))
        self._queue(event.stream)

    def _failed(self, now_ns: int, event: Failed) -> None:
        log = self._logs.get(event.stream)
        if log is None or event.number != log.waiting:
            return
        self._end_request(log)
        log.pause_ns = min(MOST_PAUSE_NS, max(FIRST_PAUSE_NS, 2 * log.pause_ns))
        log.not_before_ns = now_ns + log.pause_ns
        self._queue(event.stream)

    def _end_request(self, log: _Log) -> None:
        log.waiting = 0
        self._requests -= 1

    def _queue(self, stream: str) -> None:
        log = self._logs[stream]
        if not log.queued and not log.waiting and self._has_work(log):
            log.queued = True
            self._ready.append(stream)

    @staticmethod
    def _has_work(log: _Log) -> bool:
        return log.next_offset is None or log.next_offset < log.end or log.closed

    def _send(self, now_ns: int, effects: list[Effect]) -> None:
        if self._credit_at_ns is not None:
            earned = (now_ns - self._credit_at_ns) * self._rate / SECOND
            self._credit_bytes = min(float(self._rate), self._credit_bytes + earned)
        self._credit_at_ns = now_ns
        for _ in range(len(self._ready)):
            if self._requests >= self._most_requests or self._credit_bytes < self._chunk_bytes:
                return
            stream = self._ready.popleft()
            log = self._logs[stream]
            if now_ns < log.not_before_ns:
                self._ready.append(stream)
                continue
            log.queued = False
            effects.append(self._request(stream, log))

    def _request(self, stream: str, log: _Log) -> Effect:
        self._number += 1
        self._requests += 1
        log.waiting = self._number
        if log.next_offset is None:
            return Send(stream, self._number, 0, 0)
        if log.next_offset >= log.end:
            return End(stream, self._number, log.end)
        offset = max(log.next_offset, log.begin)
        length = min(self._chunk_bytes, log.end - offset)
        self._credit_bytes -= length
        return Send(stream, self._number, offset, length, offset - log.next_offset)
