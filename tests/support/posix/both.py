"""Two places that must agree after every call: `model` says what is right, `subject` is looked at.

What is compared: that both succeed, or fail with the same errno; what they return; of `stat` everything but the numbers
of inodes and devices and the times by themselves. Inode numbers must correspond one to one for as long as they are in
use; times must be equal where they were set (`is_set`), and with `times` each must have changed since it was last seen
exactly where the other one's has. Access times are compared only where they were set.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from typing import Final

from tests.support.posix.places import Identity, Place, Stat

__all__ = ["Both", "Difference", "is_set"]

HISTORY: Final = 25
DAY_NS: Final = 86_400 * 10**9
_STATS: Final = ("stat", "lstat", "fstat")


class Difference(AssertionError):
    """The subject does something else than the model."""


def is_set(time_ns: int) -> bool:
    """Not the time at which something happened in this test: tests set times that are far from now."""
    return abs(time_ns - time.time_ns()) > DAY_NS


class Both:
    def __init__(self, model: Place, subject: Place, *, times: bool = False) -> None:
        """Both with the same `top`. `times`: calls are `tick`s apart, so that all changes of times can be seen."""
        self._model = model
        self._subject = subject
        self._times = times
        self._history: deque[str] = deque(maxlen=HISTORY)
        self._inodes: dict[int, int] = {}
        """Of the subject, by the model's."""
        self._seen: dict[int, tuple[Stat, Stat]] = {}

    @property
    def top(self) -> str:
        return self._subject.top

    def renew(self, top: str) -> None:
        self._model.renew(top)
        self._subject.renew(top)

    def tick(self) -> None:
        self._model.tick()
        self._subject.tick()

    def call(self, who: Identity, name: str, arguments: tuple[object, ...]) -> object:
        if self._times and name not in _STATS:
            self.tick()
        theirs = [_outcome(place, who, name, arguments) for place in (self._model, self._subject)]
        self._history.append(f"{who.uid}: {name}{_short(arguments)} -> {_said(theirs[0])}")
        model, subject = theirs
        if isinstance(model, OSError) or isinstance(subject, OSError):
            if not (isinstance(model, OSError) and isinstance(subject, OSError) and model.errno == subject.errno):
                raise self._difference(who, name, arguments, f"{_said(subject)}, and should {_said(model)}")
            raise subject
        if name in _STATS:
            self._compare_stats(Stat(*model), Stat(*subject), (who, name, arguments))  # type: ignore[misc]
        elif model != subject:
            raise self._difference(who, name, arguments, f"{_said(subject)}, and should {_said(model)}")
        return subject

    def _compare_stats(self, model: Stat, subject: Stat, call: tuple[Identity, str, tuple[object, ...]]) -> None:
        def fail(text: str) -> Difference:
            return self._difference(*call, f"{text}\n  should be {model}\n  but is    {subject}")

        other = self._inodes.setdefault(model.inode, subject.inode)
        seen = self._seen.get(model.inode)
        if other != subject.inode:
            # The model may give a number again after the last name has gone; the subject never does.
            if subject.inode in self._inodes.values():
                raise fail("is another inode")
            self._inodes[model.inode] = subject.inode
            seen = None
        for field in ("mode", "links", "uid", "gid", "size", "device"):
            if getattr(model, field) != getattr(subject, field):
                raise fail(f"differs in {field}")
        if is_set(model.atime_ns) and model.atime_ns != subject.atime_ns:  # reading may have changed it since
            raise fail("differs in atime_ns")
        if (is_set(model.mtime_ns) or is_set(subject.mtime_ns)) and model.mtime_ns != subject.mtime_ns:
            raise fail("differs in mtime_ns")
        if self._times and seen is not None:
            for field in ("mtime_ns", "ctime_ns"):
                changed = [getattr(a, field) != getattr(b, field) for a, b in zip(seen, (model, subject), strict=True)]
                if changed[0] != changed[1]:
                    raise fail(f"{field} {'has not' if changed[0] else 'has'} changed since it was last looked at")
        self._seen[model.inode] = (model, subject)

    def _difference(self, who: Identity, name: str, arguments: tuple[object, ...], text: str) -> Difference:
        lines = "\n  ".join(self._history)
        return Difference(f"{who.uid}: {name}{_short(arguments)} {text}\nwhat was called:\n  {lines}")


def _outcome(place: Place, who: Identity, name: str, arguments: tuple[object, ...]) -> object:
    try:
        return place.call(who, name, arguments)
    except OSError as error:
        return error


def _said(outcome: object) -> str:
    if isinstance(outcome, OSError):
        return f"fail with {errno.errorcode.get(outcome.errno or 0, outcome.errno)}"
    return f"give {outcome!r}"[:300]


def _short(arguments: tuple[object, ...]) -> str:
    return repr(arguments)[:300]
