"""Rows of the store for what clients have open, and for work on chunks that has begun.

    FW + id (8) + client (8)                    a writer: `WriterRow`
    FO + id (8) + client (8)                    a hold: open at a client for long, or although unlinked
    FL + id (8)                                 all locks of an inode: `LocksRow`
    FQ + client (8) + owner (8) + number (8)    who waits for a lock: `WaitRow`
    FC + client (8)                             a client that has asked for anything: `ClientRow`
    FK + id (8)                                 a cut that has begun: `TruncationRow`
    FG                                          the generation of unlinking: see `open_files.garbage_collection`
    FU + generation (8) + id (8)                unlinked, to be collected: `UnlinkedRow`
    FXcollector                                 who collects: `LeaseRow`

Keys have the form of `tables`; FW, FO, FL and FU are named there.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

from fireflyer.fs.core.meta.context import Context, Rows
from fireflyer.fs.core.meta.tables import HOLDS, LOCKS, WRITERS, Coder, corrupt, number_key, pair_key
from fireflyer.fs.core.rows import SESSIONS
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import FileDetails, Inode, InodeId
from fireflyer.fs.schema.meta import LockKind, Window

__all__ = ["CLIENTS", "CLIENT_ROWS", "CUTS", "CUT_ROWS", "GENERATION_KEY", "LEASE_KEY", "LEASE_ROWS", "LOCKS_ROWS"]
__all__ += [
    "PAGE_ROWS",
    "UNLINKED_ROWS",
    "WAITS",
    "WAIT_ROWS",
    "WRITER_ROWS",
    "ClientRow",
    "HeldLock",
    "TruncationKind",
    "TruncationRow",
]
__all__ += [
    "LeaseRow",
    "LocksRow",
    "UnlinkedRow",
    "WaitRow",
    "WriterRow",
    "any_in",
    "holds_of",
    "is_being_collected",
    "lives",
    "truncation_of",
]
__all__ += ["locks_of", "next_key", "pair_of", "waits_of", "writers_of"]

CLIENTS: Final = b"FC"
CUTS: Final = b"FK"
WAITS: Final = b"FQ"
GENERATION_KEY: Final = b"FG"
LEASE_KEY: Final = b"FXcollector"
PAGE_ROWS: Final = 1000

_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class WriterRow(msgspec.Struct, frozen=True, array_like=True):
    handles: tuple[int, ...]
    """Ascending. None: it has closed the file, and `excess` is to be known until all others have, and until a cut that
    is under way has ended."""
    excess: bool = False
    """It has written behind the end what the quota did not allow: to be cut off when nobody writes any more."""


class HeldLock(msgspec.Struct, frozen=True, array_like=True):
    """A lock."""

    window: Window
    kind: LockKind
    start: _U63
    end: _U63
    client: ClientId
    owner: _U63
    process: int = 0


class LocksRow(msgspec.Struct, frozen=True, array_like=True):
    held: tuple[HeldLock, ...]
    """By window and start."""


class WaitRow(msgspec.Struct, frozen=True, array_like=True):
    inode: InodeId
    wanted: HeldLock
    until_ns: int
    """Unix time. It counts no longer, should nobody have cleared it."""


class ClientRow(msgspec.Struct, frozen=True, array_like=True):
    heartbeats: _U63 = 0
    """Complete ones."""
    user: str = ""
    """Whose session it was, which this row outlives. Empty: a service's."""
    holds: _U63 = 0
    """Of it there are so many rows."""
    evicted: bool = False
    """It has sent no heartbeat for long, and is waited for no more: nothing is done for it until it has another
    session."""


class TruncationKind(enum.IntEnum):
    TRUNCATE = 1
    """The file is to end at `start`."""
    ZERO = 2
    """[start, end) is to be a hole."""


class TruncationRow(msgspec.Struct, frozen=True, array_like=True):
    """Chunks are being changed. There is at most one of a file."""

    kind: TruncationKind
    start: _U63
    end: _U63
    least_length: _U63
    """Of the file in the end."""
    owner: ClientId
    """The session that changes them: nobody else may while it lives, since what it has sent may come late. 0: anybody
    may begin."""
    client: ClientId
    """Who asked, and the number of the request; 0: nobody waits for it."""
    number: _U63
    opens: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    """It was an `Open`: its flags. 0: it was not."""


class UnlinkedRow(msgspec.Struct, frozen=True, array_like=True):
    bytes: _U63
    """When it was unlinked."""


class LeaseRow(msgspec.Struct, frozen=True, array_like=True):
    holder: str
    renewals: _U63


WRITER_ROWS: Final = Coder(WriterRow)
LOCKS_ROWS: Final = Coder(LocksRow)
WAIT_ROWS: Final = Coder(WaitRow)
CLIENT_ROWS: Final = Coder(ClientRow)
CUT_ROWS: Final = Coder(TruncationRow)
UNLINKED_ROWS: Final = Coder(UnlinkedRow)
LEASE_ROWS: Final = Coder(LeaseRow)


async def lives(rows: Rows, client: ClientId) -> bool:
    """Whether its session does."""
    return await rows.get(SESSIONS.key(client)) is not None


async def writers_of(context: Context, inode: InodeId) -> list[tuple[ClientId, WriterRow]]:
    return [
        (pair_of(key)[1], WRITER_ROWS.decode(key, value))
        for key, value in await _all(context.rows, number_key(WRITERS, inode), number_key(WRITERS, inode + 1))
    ]


async def holds_of(context: Context, inode: InodeId) -> bool:
    """Whether there are any."""
    return await any_in(context.rows, number_key(HOLDS, inode), number_key(HOLDS, inode + 1))


async def locks_of(context: Context, inode: InodeId) -> tuple[HeldLock, ...]:
    key = number_key(LOCKS, inode)
    value = await context.rows.get(key)
    return () if value is None else LOCKS_ROWS.decode(key, value).held


async def waits_of(context: Context, client: ClientId, owner: int) -> list[WaitRow]:
    begin = pair_key(WAITS, client, owner)
    found = await _all(context.rows, begin, begin + b"\xff" * 9)
    return [WAIT_ROWS.decode(key, value) for key, value in found]


async def truncation_of(context: Context, inode: InodeId) -> TruncationRow | None:
    key = number_key(CUTS, inode)
    value = await context.rows.get(key)
    return None if value is None else CUT_ROWS.decode(key, value)


async def any_in(rows: Rows, begin: bytes, end: bytes) -> bool:
    return bool((await rows.get_range(begin, end, limit=1)).items)


async def is_being_collected(context: Context, inode: Inode) -> bool:
    """Whether its chunks are being removed: who had it open has lost it."""
    if inode.links or not isinstance(inode.body, FileDetails) or inode.body.cutting is None:
        return False
    return await truncation_of(context, inode.id) is None


def pair_of(key: bytes) -> tuple[int, int]:
    """The two numbers of a key."""
    if len(key) != 18:
        raise corrupt(key, "has a key of another length")
    return int.from_bytes(key[2:10], "big"), int.from_bytes(key[10:], "big")


def next_key(key: bytes) -> bytes:
    return key + b"\0"


async def _all(rows: Rows, begin: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
    items: list[tuple[bytes, bytes]] = []
    while True:
        page = await rows.get_range(begin, end, limit=PAGE_ROWS)
        items.extend(page.items)
        if not page.more:
            return items
        begin = next_key(items[-1][0])
