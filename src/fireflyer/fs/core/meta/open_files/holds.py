"""Files that are open although unlinked, or for long; and what waits to be collected.

Opening for reading writes nothing. A client says with its heartbeats which files it has had open since before its last
heartbeat: holds. What is unlinked is collected when nobody holds it and nobody has it open for writing, and when every
client that was there at the unlinking has since sent three heartbeats or is no more:

    heartbeat n, under way at the unlinking (prepared before)   n + 1 (prepared after)   n + 2
    names what was open before n - 1 │ before n │ before n + 1 was prepared: all that was open then

Heartbeat n may be on its way at the unlinking, and a file that was opened after it was prepared is named two
heartbeats later. So two are not enough; and a client prepares a heartbeat when the one before was answered.

The order of unlinking and of looking at the heartbeats is told by a *generation*: a number that the collector raises
before it looks, and under which whatever is unlinked is written down. Clocks could not tell it.

Numbers of inodes can be guessed, and what is held is not collected. So a user holds only what they may open or own, as
with `renew`, and so many; what is beyond that is passed over, since a heartbeat that is refused would stop collecting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.core.meta.context import Context, Rows
from fireflyer.fs.core.meta.inodes.directories import require_reach
from fireflyer.fs.core.meta.inodes.permissions import EXECUTE, READ, WRITE, owns, permits
from fireflyer.fs.core.meta.open_rows import CLIENT_ROWS, CLIENTS, GENERATION_KEY, UNLINKED_ROWS, ClientRow, UnlinkedRow
from fireflyer.fs.core.meta.tables import FORMAT, HOLDS, UNLINKED, decode_inode, inode_key, number_key, pair_key
from fireflyer.fs.core.rows import SESSIONS
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import FileDetails, Inode, InodeId
from fireflyer.fs.schema.meta import ClientHeartbeat, Done

__all__ = [
    "HEARTBEATS_AFTER",
    "MAX_HOLDS",
    "client_row",
    "enrol",
    "generation",
    "heartbeat",
    "put_client",
    "set_generation",
    "unlink",
]

MAX_HOLDS: Final = 1 << 16
"""Of a user's client. Those of trusted mounts are not bounded."""
HEARTBEATS_AFTER: Final = 3
"""Of a client, after which it has named what it had open."""


async def enrol(context: Context) -> None:
    """Before a client's first request, while its session lives: the collector waits for the heartbeats of those that
    are enrolled, and the reaper finds by it what is left of them."""
    client = context.requester.client
    if await client_row(context.rows, client) is None:
        key = SESSIONS.key(client)
        row = await context.rows.get(key)
        user = "" if row is None else SESSIONS.decode(key, row)[1].user
        put_client(context, client, ClientRow(user=user))


async def heartbeat(request: ClientHeartbeat, context: Context) -> Done:
    client, rows = context.requester.client, context.rows
    before = await client_row(rows, client) or ClientRow()
    holds = before.holds
    closed = tuple(dict.fromkeys(request.closed))
    for key, there in zip(*await _looked_up(context, closed), strict=True):
        if there is not None:
            rows.clear(key)
            holds = max(0, holds - 1)
    gone = dict.fromkeys(closed)
    held = [inode for inode in dict.fromkeys(request.held) if inode not in gone]
    values = await rows.get_many([inode_key(inode) for inode in held])
    for inode, value, key, there in zip(held, values, *await _looked_up(context, held), strict=True):
        if value is None or there is not None:
            continue
        if context.requester.by_path and (holds >= MAX_HOLDS or not await _may_hold(context, inode, value)):
            continue
        rows.set(key, FORMAT)
        holds += 1
    row = msgspec.structs.replace(before, heartbeats=before.heartbeats + (1 if request.whole else 0), holds=holds)
    if row != before:
        put_client(context, client, row)
    return Done()


async def _looked_up(context: Context, inodes: Sequence[InodeId]) -> tuple[list[bytes], list[bytes | None]]:
    """The holds of this client."""
    keys = [pair_key(HOLDS, inode, context.requester.client) for inode in inodes]
    return keys, await context.rows.get_many(keys)


async def _may_hold(context: Context, inode_id: InodeId, value: bytes) -> bool:
    """Whether the user might have opened it."""
    inode, requester = decode_inode(inode_key(inode_id), value), context.requester
    if owns(requester, inode):
        return True
    if not any(permits(requester, inode, mask) for mask in (READ, WRITE, EXECUTE)):
        return False
    try:
        await require_reach(context, inode)
    except FileError:
        return False
    return True


async def unlink(context: Context, inode: Inode) -> None:
    """Its last name has gone, and its row with no links is put: it is to be collected."""
    number = await generation(context.rows)
    length = inode.body.length if isinstance(inode.body, FileDetails) else 0
    context.rows.set(pair_key(UNLINKED, number, inode.id), UNLINKED_ROWS.encode(UnlinkedRow(length)))


async def client_row(rows: Rows, client: ClientId) -> ClientRow | None:
    key = number_key(CLIENTS, client)
    value = await rows.get(key)
    return None if value is None else CLIENT_ROWS.decode(key, value)


def put_client(context: Context, client: ClientId, row: ClientRow) -> None:
    context.rows.set(number_key(CLIENTS, client), CLIENT_ROWS.encode(row))


async def generation(rows: Rows) -> int:
    """In which is unlinked now."""
    value = await rows.get(GENERATION_KEY)
    if value is None:
        return 0
    if len(value) != 9 or value[:1] != FORMAT:
        raise DataCorruption(f"row {GENERATION_KEY.hex()} of the file system is damaged; restore the store")
    return int.from_bytes(value[1:], "big")


def set_generation(rows: Rows, number: int) -> None:
    rows.set(GENERATION_KEY, FORMAT + number.to_bytes(8, "big"))
