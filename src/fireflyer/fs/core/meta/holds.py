"""Files that are open although unlinked, or for long; and what waits to be collected.

Opening for reading writes nothing. A client says with its beats which files it has had open since before its last beat:
holds. What is unlinked is collected when nobody holds it and nobody has it open for writing, and when every client that
was there at the unlinking has since beaten three times or is no more:

    unlinking   beat n under way (prepared before)   beat n + 1 (prepared after)   beat n + 2
    names what was open before beat n - 1 │ before beat n │ before beat n + 1 was prepared: all that was open then

Beat n may be on its way at the unlinking, and a file that was opened after it was prepared is named two beats later. So
two are not enough; and a client prepares a beat when the one before was answered.

The order of unlinking and of looking at the beats is told by a *generation*: a number that the collector raises before
it looks, and under which whatever is unlinked is written down. Clocks could not tell it.
"""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.core.meta.context import Context, Rows
from fireflyer.fs.core.meta.open_rows import CLIENT_ROWS, CLIENTS, GENERATION_KEY, UNLINKED_ROWS, ClientRow, UnlinkedRow
from fireflyer.fs.core.meta.tables import FORMAT, HOLDS, UNLINKED, inode_key, number_key, pair_key
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import FileBody, Inode
from fireflyer.fs.schema.meta import Beat, Done

__all__ = ["BEATS_AFTER", "beat", "client_row", "enrol", "generation", "set_generation", "unlink"]

BEATS_AFTER: Final = 3
"""Of a client, after which it has named what it had open."""


async def enrol(context: Context) -> None:
    """Before a client's first request: the collector waits for the beats of those that are enrolled, and the reaper
    finds by it what is left of them."""
    if await client_row(context.rows, context.asker.client) is None:
        _put_client(context, ClientRow())


async def beat(request: Beat, context: Context) -> Done:
    client = context.asker.client
    for inode in request.held:
        if await context.rows.get(inode_key(inode)) is not None:
            context.rows.set(pair_key(HOLDS, inode, client), FORMAT)
    for inode in request.closed:
        context.rows.clear(pair_key(HOLDS, inode, client))
    row = await client_row(context.rows, client) or ClientRow()
    _put_client(context, ClientRow(row.beats + (1 if request.whole else 0)))
    return Done()


async def unlink(context: Context, inode: Inode) -> None:
    """Its last name has gone, and its row with no links is put: it is to be collected."""
    number = await generation(context.rows)
    length = inode.body.length if isinstance(inode.body, FileBody) else 0
    context.rows.set(pair_key(UNLINKED, number, inode.id), UNLINKED_ROWS.encode(UnlinkedRow(length)))


async def client_row(rows: Rows, client: ClientId) -> ClientRow | None:
    key = number_key(CLIENTS, client)
    value = await rows.get(key)
    return None if value is None else CLIENT_ROWS.decode(key, value)


def _put_client(context: Context, row: ClientRow) -> None:
    context.rows.set(number_key(CLIENTS, context.asker.client), CLIENT_ROWS.encode(row))


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
