"""Applies what changes in `[health]` of the file of a running `ff up`; the rest of it counts at the next start.

    FILE ── look ──> changed? ──> `changes` ──> [health]: `apply` writes manager.toml, which the manager follows
                                           └──> the rest: one line that says how it comes to count

The file is looked at, and no signal asks for it: SIGHUP comes to `ff up` when its terminal is closed. It is read when
two looks in a row find the same: an editor that empties a file before it writes it would else end all checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.cluster.local.config import HealthWish, UpConfig
from fireflyer.runtime.file_mark import file_mark

__all__ = ["Changes", "UpFile", "changes"]


class Changes(NamedTuple):
    health: HealthWish | None
    """None: as it is in force."""
    others: tuple[str, ...]
    """What else differs, as the file writes it: `agents`, `[storage]`, `[[nodes]]`."""


def changes(running: UpConfig, found: UpConfig) -> Changes:
    """`running`: the file as it is in force. `found`: as it is now."""
    differing = [key for key in UpConfig.__struct_fields__ if getattr(running, key) != getattr(found, key)]
    others = tuple(_written(key, getattr(running, key)) for key in differing if key != "health")
    return Changes(found.health if "health" in differing else None, others)


def _written(key: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"[[{key}]]"
    return f"[{key}]" if isinstance(value, msgspec.Struct) else key


class UpFile:
    def __init__(
        self,
        path: str,
        read: Callable[[str], UpConfig],
        running: UpConfig,
        *,
        say: Callable[[str], None],
        again: str,
    ) -> None:
        """`read`: raises `UsageError`, one line. `running`: what it gave for this start. `again`: the commands after
        which all of the file counts."""
        self._path, self._read, self._running, self._say, self._again = path, read, running, say, again
        self._found = running
        self._seen: tuple[int, ...] | None = None
        self._done: tuple[int, ...] | None = None
        """None: the first look reads the file, which may have changed since this start has read it."""
        self._failure = ""

    def look(self, apply: Callable[[HealthWish], None]) -> None:
        """`apply`: raises `FireflyerError` where it could not be done; it is called again at the next look."""
        mark = file_mark(self._path)
        settled, self._seen = mark == self._seen, mark
        if mark == self._done or not settled:
            return
        try:
            found = self._read(self._path)
        except UsageError as error:
            self._say(f"the file is not used, [health] stays as it was: {error}")
            self._done = mark
            return
        change = changes(self._running, found)
        try:
            if change.health is not None:
                apply(change.health)
        except FireflyerError as error:
            self._fail(f"[health] of {self._path} cannot be applied yet: {error}")
            return
        self._done, self._failure = mark, ""
        self._running = msgspec.structs.replace(self._running, health=found.health)
        if change.health is not None:
            self._say(f"[health] of {self._path} is applied")
        if change.others and not self._found_before(found):
            self._say(f"{', '.join(change.others)} of {self._path} changed; that counts after: {self._again}")
        self._found = found

    def _fail(self, text: str) -> None:
        if text != self._failure:
            self._say(text)
        self._failure = text

    def _found_before(self, found: UpConfig) -> bool:
        """Whether all but [health] is as it was when it was read last, and so was said."""
        return msgspec.structs.replace(self._found, health=found.health) == found
