"""The capabilities that count on one connection of a user: what its requests are compared with.

One of a single file is what the meta service gives at each `open`, and counts until it expires though the file was
closed long ago. So there is room for many, and when it is full the oldest goes: a client that still has that file open
is refused once, and presents a new one. Of ranges there are few, which administrators ask for; one more is refused.

The same files and rights again take the place of what was there: also for another session, since a connection is one
client's, or a few sessions in an hour would use up what counts here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from fireflyer.fs.core.capability import Capability, Rights
from fireflyer.fs.schema.ids import ClientId

__all__ = ["MAX_FILE_CAPABILITIES", "MAX_RANGE_CAPABILITIES", "ConnectionCapabilities"]

MAX_FILE_CAPABILITIES: Final = 4096
MAX_RANGE_CAPABILITIES: Final = 64


class ConnectionCapabilities:
    __slots__ = ("_files", "_ranges")

    def __init__(self) -> None:
        self._files: dict[int, tuple[Capability, ...]] = {}
        """Of single files, the latest last: at most one for each set of rights."""
        self._ranges: tuple[Capability, ...] = ()

    def __iter__(self) -> Iterator[Capability]:
        for of_file in self._files.values():
            yield from of_file
        yield from self._ranges

    def add(self, one: Capability, now_s: float) -> bool:
        """False: there are too many ranges."""
        if one.first_file != one.last_file:
            kept = _others(self._ranges, one, now_s)
            if len(kept) >= MAX_RANGE_CAPABILITIES:
                return False
            self._ranges = (*kept, one)
            return True
        of_file = _others(self._files.pop(one.first_file, ()), one, now_s)
        if len(self._files) >= MAX_FILE_CAPABILITIES:
            del self._files[next(iter(self._files))]
        self._files[one.first_file] = (*of_file, one)
        return True

    def drop(self, one: Capability) -> None:
        self._ranges = tuple(other for other in self._ranges if other != one)
        of_file = tuple(other for other in self._files.pop(one.first_file, ()) if other != one)
        if of_file:
            self._files[one.first_file] = of_file

    def allows(self, file: int, rights: Rights, client: ClientId | None, now_s: float) -> bool:
        """`client`: whose update it is; None: whoever's."""
        return any(
            one.allows(file, rights, now_s) and client in (None, one.client)
            for one in (*self._files.get(file, ()), *self._ranges)
        )

    def any_but_of(self, key_ids: Collection[int], now_s: float) -> bool:
        """Whether one counts that none of these keys has signed."""
        return any(one.key_id not in key_ids and now_s < one.expires_s for one in self)


def _others(those: tuple[Capability, ...], one: Capability, now_s: float) -> tuple[Capability, ...]:
    same = (one.first_file, one.last_file, one.rights)
    return tuple(
        other
        for other in those
        if now_s < other.expires_s and (other.first_file, other.last_file, other.rights) != same
    )
