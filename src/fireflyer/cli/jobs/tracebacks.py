"""Shows a traceback once, though every rank prints it. Pure: lines and the time in, lines out.

When one rank fails, or all run into the same error, each of them prints a traceback. That of the first is shown, equal
ones of other ranks are counted, and a line says how many there were; the log files of the ranks have all of them.
Equal: the same frames, and the same message but for numbers. A traceback that says KeyboardInterrupt is not shown at
all: every rank prints one when the job is stopped by Ctrl-C, each from another place.

A traceback is held back until it is whole: until no line of the rank's stderr follows for `QUIET_NS`, or `MAX_AFTER`
lines have (a message may have several lines), or the job or attempt ends (`flush`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from fireflyer.base.units import MS
from fireflyer.cluster.schema.job import RankLine

__all__ = ["MAX_AFTER", "MAX_HELD", "QUIET_NS", "TracebackFolder"]

QUIET_NS = 300 * MS
COUNT_NS = 1000 * MS
"""So long after the last equal traceback it is said how many there were."""
MAX_AFTER = 20
MAX_LINES = 1000
"""A longer traceback is shown as it comes."""
MAX_HELD = 20_000
"""Lines held of all ranks; more are shown as they come."""
MAX_REMEMBERED = 256

_PREFIX = re.compile(r"\[rank[0-9]+\]: ?")
"""What torch puts before each line of a traceback of a process that is in a process group."""
_HEADERS = ("Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+")


@dataclass(slots=True)
class _Held:
    lines: list[RankLine]
    last_ns: int
    said: list[str] = field(default_factory=list)
    """Text of the lines without torch's prefix."""
    message_at: int = -1
    """Where the message of the last traceback begins; -1: not yet."""


@dataclass(slots=True)
class _Shown:
    line: RankLine
    last_ns: int
    ranks: set[int] = field(default_factory=set)


class TracebackFolder:
    def __init__(self) -> None:
        self._held: dict[tuple[int, int], _Held] = {}
        self._shown: dict[tuple[int, str], _Shown] = {}

    def feed(self, line: RankLine, now_ns: int) -> list[RankLine]:
        """What is to be shown now, in order."""
        if line.stream != "stderr":
            return [line]
        key = (line.attempt, line.rank)
        held = self._held.get(key)
        text = _PREFIX.sub("", line.text, count=1) if line.text.startswith("[rank") else line.text
        if held is None:
            if text not in _HEADERS:
                return [line]
            self._held[key] = _Held([line], now_ns, [text])
            return []
        held.lines.append(line)
        held.said.append(text)
        held.last_ns = now_ns
        if text in _HEADERS:
            held.message_at = -1
        elif held.message_at < 0 and text and not text.startswith(" "):
            held.message_at = len(held.said) - 1
        after = len(held.said) - held.message_at if held.message_at >= 0 else 0
        if after > MAX_AFTER or len(held.said) > MAX_LINES:
            return self._resolve(key, now_ns)
        too_many = sum(len(one.lines) for one in self._held.values()) > MAX_HELD if len(self._held) > 10 else False
        return [shown for one in list(self._held) for shown in self._resolve(one, now_ns)] if too_many else []

    def due(self, now_ns: int) -> list[RankLine]:
        """What was held back for long enough, and how many ranks raised what was shown before."""
        out: list[RankLine] = []
        for key, held in list(self._held.items()):
            if now_ns - held.last_ns >= QUIET_NS:
                out += self._resolve(key, now_ns)
        for shown in self._shown.values():
            if now_ns - shown.last_ns >= COUNT_NS:
                out += _count(shown)
        return out

    def flush(self) -> list[RankLine]:
        """Everything: the attempt or the job has ended."""
        out = [line for key in list(self._held) for line in self._resolve(key, 0)]
        for shown in self._shown.values():
            out += _count(shown)
        self._shown.clear()
        return out

    def _resolve(self, key: tuple[int, int], now_ns: int) -> list[RankLine]:
        held = self._held.pop(key)
        if held.message_at < 0:
            return held.lines
        message = held.said[held.message_at :]
        if message[0].startswith("KeyboardInterrupt"):
            return []
        text = "\n".join([*held.said[: held.message_at], *(_NUMBERS.sub("0", line) for line in message)])
        same = self._shown.get((held.lines[0].attempt, text))
        if same is not None:
            same.ranks.add(key[1])
            same.last_ns = now_ns
            return []
        if len(self._shown) >= MAX_REMEMBERED:
            self._shown.clear()
        self._shown[held.lines[0].attempt, text] = _Shown(held.lines[-1], now_ns)
        return held.lines


def _count(shown: _Shown) -> list[RankLine]:
    """`(and 7 more ranks)`, behind the rank whose traceback was shown."""
    shown.ranks.discard(shown.line.rank)
    count = len(shown.ranks)
    shown.ranks.clear()
    if not count:
        return []
    more = f"(and {count} more rank{'' if count == 1 else 's'})"
    return [msgspec.structs.replace(shown.line, text=more, cut=False)]
