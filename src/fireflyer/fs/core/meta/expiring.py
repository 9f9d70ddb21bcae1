"""Removing from the trash what has been there for long enough.

It is removed with the rights of who removed it, so that moving a tree to the trash does not remove what is others' in
it: that, and what the user has moved away from there, is left alone.
"""

from __future__ import annotations

from fireflyer.fs.core.meta.context import Asker, Context
from fireflyer.fs.core.meta.directories import changed_directory, directory_body
from fireflyer.fs.core.meta.entries import drop_name
from fireflyer.fs.core.meta.tables import TRASH, TRASH_ROWS, TrashRow, decode_entry, entry_key, number_key, pair_key
from fireflyer.fs.core.meta.trees import empty_directory
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import Inode, Kind

__all__ = ["expire"]


async def expire(context: Context, limit: int) -> bool:
    """Removes up to about `limit` names whose time has come by `context.now_ns`; True: call it again at once. The asker
    does not count."""
    end = number_key(TRASH, max(0, context.now_ns) + 1)
    page = await context.rows.get_range(pair_key(TRASH, 0, 0), end, limit=max(1, limit))
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
    asker = Asker(0, row.uid, row.gid, row.groups, unrestricted=row.uid == 0)
    return Context(
        rows=context.rows, asker=asker, now_ns=context.now_ns, new_id=context.new_id, cluster=context.cluster
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
        if directory_body(inode).entries:
            return names, False
    context.rows.clear(there)
    own: Inode = await context.known(row.directory)
    context.put(changed_directory(own, context.now_ns, -1, -1 if is_directory else 0))
    await drop_name(context, inode)
    return names + 1, True
