"""Removing from the trash what has been there for long enough.

It is removed with the rights of who removed it, so that moving a tree to the trash does not remove what is others' in
it: that, and what the user has moved away from there, is left alone.

*The clock* is a row. Who leads moves it on by the time for which it has seen it unchanged, by a monotonic clock of its
own, and by no more than `MOST_STEP_NS` at once. So it never goes faster than time does, whoever's wall clock is
wrong and however many believe that they lead; while nobody leads it stands still, and everything stays for so much
longer. Wall clocks begin it, where nothing in the trash says when it is.
"""

from __future__ import annotations

from collections.abc import Callable

from fireflyer.fs.core.meta.context import Context, Requester
from fireflyer.fs.core.meta.inodes.directories import changed_directory, directory_details
from fireflyer.fs.core.meta.namespace.dentries import drop_name
from fireflyer.fs.core.meta.namespace.remove_tree import empty_directory
from fireflyer.fs.core.meta.namespace.trash import MOST_STEP_NS
from fireflyer.fs.core.meta.ports import Ports
from fireflyer.fs.core.meta.tables import (
    TRASH,
    TRASH_CLOCK_KEY,
    TRASH_CLOCK_ROWS,
    TRASH_ROWS,
    TrashClockRow,
    TrashRow,
    decode_entry,
    entry_key,
    number_key,
    pair_key,
    prefix_end,
)
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import Inode, Kind

__all__ = ["TrashClock", "expire"]


class TrashClock:
    """What one process has seen of it."""

    def __init__(self) -> None:
        self._row: TrashClockRow | None = None
        self._seen_ns = 0

    async def step(self, ports: Ports, limit: int) -> bool:
        """Moves it on, and removes what leaves the trash by then. True: call it again at once."""

        async def body(context: Context) -> tuple[TrashClockRow, int, bool]:
            row, seen_ns = await self._moved(context, ports.now_ns)
            return row, seen_ns, await expire(context, row.now_ns, limit)

        self._row, self._seen_ns, more = await ports.transact(body)
        return more

    async def _moved(self, context: Context, clock: Callable[[], int]) -> tuple[TrashClockRow, int]:
        value = await context.rows.get(TRASH_CLOCK_KEY)
        seen_ns = clock()  # behind it: who has moved it did so for the time before
        if value is None:
            row = TrashClockRow(await _first_ns(context))
        else:
            row = TRASH_CLOCK_ROWS.decode(TRASH_CLOCK_KEY, value)
            if row == self._row:
                row = TrashClockRow(row.now_ns + min(seen_ns - self._seen_ns, MOST_STEP_NS))
        context.rows.set(TRASH_CLOCK_KEY, TRASH_CLOCK_ROWS.encode(row))
        return row, seen_ns


async def _first_ns(context: Context) -> int:
    page = await context.rows.get_range(TRASH, prefix_end(TRASH), limit=1)
    first = [int.from_bytes(key[len(TRASH) :][:8], "big") for key, _ in page.items]
    return min([max(0, context.now_ns), *first])


async def expire(context: Context, now_ns: int, limit: int) -> bool:
    """Removes up to about `limit` names whose time has come by the clock of the trash; True: call it again at once. The
    requester does not count."""
    page = await context.rows.get_range(pair_key(TRASH, 0, 0), number_key(TRASH, now_ns + 1), limit=max(1, limit))
    for key, value in page.items:
        if limit <= 0:
            return True
        names, done = await _remove(_as_user(context, TRASH_ROWS.decode(key, value)), key, value, limit)
        limit -= max(1, names)
        if not done:
            return True
        context.rows.clear(key)
    return page.more


def _as_user(context: Context, row: TrashRow) -> Context:
    requester = Requester(0, row.uid, row.gid, row.groups, unrestricted=row.uid == 0)
    return Context(
        rows=context.rows, requester=requester, now_ns=context.now_ns, new_id=context.new_id, cluster=context.cluster
    )


async def _remove(context: Context, key: bytes, value: bytes, limit: int) -> tuple[int, bool]:
    """Names removed, and whether that was all."""
    row = TRASH_ROWS.decode(key, value)
    there = entry_key(row.directory, row.name)
    entry_value = await context.rows.get(there)
    if entry_value is None or decode_entry(there, entry_value).id != row.id:
        return 0, True
    inode = await context.known(row.id)
    names, is_directory = 0, inode.kind is Kind.DIRECTORY
    if is_directory:
        try:
            names, inode = await empty_directory(context, inode, limit)
        except FileError:
            return 0, True
        if directory_details(inode).entries:
            return names, False
    context.rows.clear(there)
    own: Inode = await context.known(row.directory)
    context.put(changed_directory(own, context.now_ns, -1, -1 if is_directory else 0))
    await drop_name(context, inode)
    return names + 1, True
