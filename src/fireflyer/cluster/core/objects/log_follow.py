"""What is read next by somebody who follows the output of a task's ranks, run after run. Pure.

    streams of the run ──> next ──> (log, offset) ──a page of it──> taken ──> LogText, its position
                            │ None: all was read
                            └──> rest ──> wait, next run, end

A position says how far one log was read. Who was cut off and comes back gives the newest position of each log, and
goes on there: runs before the newest, and attempts before the last two of it, were read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.base.units import KIB
from fireflyer.cluster.schema.logs import LogPiece, LogText, RankLog, StreamView, rank_log_of

__all__ = [
    "MAX_POSITIONS",
    "MAX_TEXT_BYTES",
    "Heard",
    "LogFollower",
    "LogPosition",
    "NextRead",
    "parse_positions",
    "rest",
]

MAX_TEXT_BYTES: Final = 64 * KIB
"""Of one event."""
MAX_POSITIONS: Final = 8192
_MAX_NUMBER: Final = 1 << 53


class LogPosition(NamedTuple):
    run: int
    attempt: int
    rank: int
    offset: int
    """Bytes before it were read."""

    def __str__(self) -> str:
        return ".".join(map(str, self))


def parse_positions(text: str) -> tuple[LogPosition, ...]:
    """Of texts with commas between them. Raises `UsageError`."""
    return tuple(_position(one) for one in text.split(",")[: MAX_POSITIONS + 1]) if text else ()


def _position(text: str) -> LogPosition:
    numbers = text.split(".")
    if len(numbers) == 4 and all(one.isascii() and one.isdecimal() and len(one) <= 16 for one in numbers):
        found = LogPosition(*map(int, numbers))
        if max(found) <= _MAX_NUMBER:
            return found
    raise UsageError(f"{text[:80]!r} is no position in logs; give the ids of events, RUN.ATTEMPT.RANK.OFFSET")


class Heard:
    """What a client has heard of the newest run, in its last two attempts: from there it goes on."""

    def __init__(self) -> None:
        self._newest: dict[RankLog, LogPosition] = {}

    def add(self, text: str) -> None:
        """Raises `UsageError`."""
        position = _position(text)
        if any(one.run != position.run for one in self._newest.values()):
            self._newest.clear()
        log = RankLog(position.attempt, position.rank)
        if log not in self._newest:
            kept = [one for one in self._newest if one.attempt >= log.attempt - 1]
            self._newest = {one: self._newest[one] for one in kept}
        self._newest[log] = position

    @property
    def text(self) -> str:
        return ",".join(map(str, self._newest.values()))


class NextRead(NamedTuple):
    stream: str
    offset: int


class LogFollower:
    """`run` and `rank`: of these alone. `follow` False: what is there is read, half a line at its end too."""

    def __init__(
        self,
        *,
        run: int | None = None,
        rank: int | None = None,
        follow: bool = True,
        after: tuple[LogPosition, ...] = (),
    ) -> None:
        """Raises `UsageError`."""
        if len(after) > MAX_POSITIONS:
            raise UsageError(f"at most {MAX_POSITIONS} positions can be given; give those of the newest attempt")
        self.only_run = run
        self._rank = rank
        self._follow = follow
        newest = max((one.run for one in after), default=0)
        self.run = newest if run is None else run
        here = [one for one in after if one.run == self.run]
        self._least_attempt = max([0, *(one.attempt - 1 for one in here)])
        self._offsets = {RankLog(one.attempt, one.rank): one.offset for one in here}
        self._held: dict[RankLog, int] = {}
        """Logs that end with half a line, with that end."""
        self._flushed = False
        self._last = RankLog(-1, -1)

    def go_on(self) -> None:
        """All of this run was read."""
        self.run += 1
        self._least_attempt, self._last, self._flushed = 0, RankLog(-1, -1), False
        self._offsets.clear()
        self._held.clear()

    def flush(self) -> bool:
        """Half lines of this run are told from now on, since the other half will not come. Whether there are some."""
        self._flushed = True
        held = bool(self._held)
        self._held.clear()
        return held

    def next(self, streams: Iterable[StreamView]) -> NextRead | None:
        """Attempt by attempt, and in an attempt a piece of each rank in turn."""
        waiting = [log for one in streams if (log := rank_log_of(one.name)) is not None and self._has_news(log, one)]
        if not waiting:
            return None
        attempt = min(log.attempt for log in waiting)
        ranks = sorted(log.rank for log in waiting if log.attempt == attempt)
        after = self._last.rank if self._last.attempt == attempt else -1
        log = RankLog(attempt, next((rank for rank in ranks if rank > after), ranks[0]))
        stream = next(one.name for one in streams if rank_log_of(one.name) == log)
        return NextRead(stream, self._offsets.get(log, 0))

    def _has_news(self, log: RankLog, stream: StreamView) -> bool:
        if log.attempt < self._least_attempt or (self._rank is not None and log.rank != self._rank):
            return False
        if stream.end <= self._offsets.get(log, 0):
            return False
        return stream.closed or stream.cut or self._held.get(log) != stream.end

    def taken(self, stream: StreamView, piece: LogPiece) -> tuple[LogText, LogPosition] | None:
        """The whole lines of a piece that was read at `next` with at most `MAX_TEXT_BYTES`; None where it has none
        yet."""
        log = rank_log_of(stream.name)
        assert log is not None  # noqa: S101
        offset = self._offsets.get(log, 0)
        self._last = log
        flushing = self._flushed or not self._follow
        before_gap = len(piece.data) < MAX_TEXT_BYTES and piece.next_offset < stream.end
        last = before_gap or piece.closed or piece.cut or (flushing and piece.next_offset >= stream.end)
        data = piece.data if last else _whole_lines(piece.data)
        if not data and piece.offset == offset and not last:
            self._held[log] = stream.end
            return None
        end = piece.offset + len(data)
        self._offsets[log] = end
        text = LogText(
            run=self.run,
            attempt=log.attempt,
            rank=log.rank,
            offset=piece.offset,
            text=data.decode(errors="replace"),
            lost_bytes=piece.offset - offset,
            cut=piece.cut,
        )
        return text, LogPosition(self.run, log.attempt, log.rank, end)


def _whole_lines(data: bytes) -> bytes:
    """A carriage return ends a line too: progress bars write those. One at the very end may be half of CR LF."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, max(0, len(data) - 1))) + 1
    if end or len(data) < MAX_TEXT_BYTES:
        return data[:end]
    end = len(data)
    while end > len(data) - 4 and data[end - 1] & 0xC0 == 0x80:
        end -= 1  # bytes that continue a character
    return data[: end - 1] if data[end - 1] >= 0xC0 else data


def rest(
    *, follow: bool, only: bool, complete: bool, more_runs: bool, finished: bool
) -> Literal["wait", "next", "end"]:
    """When nothing is left to read of a run. `only`: this run alone was asked for. `complete`: its logs get no longer.
    `more_runs`: the task has had later ones. `finished`: the task."""
    if follow and not complete:
        return "wait"
    if only:
        return "end"
    if more_runs:
        return "next"
    return "end" if finished or not follow else "wait"
