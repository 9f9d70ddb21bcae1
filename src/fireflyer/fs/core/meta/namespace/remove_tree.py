"""Removing whole trees, a bounded number of names in a transaction, deepest first.

A step goes down along the first names to the first directory without subdirectories, empties it, and goes on from
there; so what a step leaves, the next one finds at once. Each name needs the rights that removing it alone would
need, each directory the right to list it too. What may not be removed ends the step: with what was removed until
then, or, if that is nothing, with its error.

What lies in a directory with a trash goes there, as if it were removed by its name; but not where that trash is in the
tree itself.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.directories import changed_directory, directory_details
from fireflyer.fs.core.meta.inodes.permissions import EXECUTE, READ, WRITE, require, require_removal
from fireflyer.fs.core.meta.namespace import trash
from fireflyer.fs.core.meta.namespace.dentries import drop_name, spot_to_remove
from fireflyer.fs.core.meta.tables import decode_entry, decode_inode, entries_end, entry_key, inode_key
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.inodes import ROOT, Inode, Kind
from fireflyer.fs.schema.meta import Removed, RemoveTree

__all__ = ["empty_directory", "remove_tree"]

_PAGE_ROWS: Final = 256
_MAX_DEPTH: Final = 10_000
_MAX_READS: Final = 4096
"""Pages and levels of a step, after which it ends when it has removed something: each may be a round trip."""


async def remove_tree(request: RemoveTree, context: Context) -> Removed:
    spot, top = await spot_to_remove(context, request.place)
    directory = spot.directory
    if directory_details(directory).defaults.trash_s and directory_details(top).entries:
        require(context.requester, top, READ | WRITE | EXECUTE)
        if await trash.keep(context, directory, spot.name, top):
            context.rows.clear(entry_key(directory.id, spot.name))
            context.put(changed_directory(await context.known(directory.id), context.now_ns, -1, -1))
            return Removed(1, more=False)
    names, top = await empty_directory(context, top, request.limit, keep=True)
    if directory_details(top).entries or names == request.limit:
        return Removed(names, more=True)
    context.rows.clear(entry_key(directory.id, spot.name))
    directory = await context.known(directory.id)  # a trash may have been made in it
    context.put(changed_directory(directory, context.now_ns, -1, -1))
    await drop_name(context, top)
    return Removed(names + 1, more=False)


@dataclass(slots=True)
class _Level:
    directory: Inode
    name: bytes
    """In the level above."""
    after: bytes
    """The key to go on from: what was before it is removed."""
    keeps: bool
    """What is in it goes to the trash."""
    names: int = 0
    subdirectories: int = 0
    """Removed of it."""


async def empty_directory(context: Context, top: Inode, limit: int, *, keep: bool = False) -> tuple[int, Inode]:
    """Removes up to `limit` names below `top`; how many, and `top` as it is then. `keep`: into the trash where there is
    one. Raises `FileError` only when it has removed nothing."""
    if not directory_details(top).entries:
        return 0, top
    require(context.requester, top, READ | WRITE | EXECUTE)
    levels = [_Level(top, b"", entry_key(top.id, b""), keep and _has_trash(top, [top]))]
    names = 0
    while names < limit:
        context.steps += 1
        await context.yield_to_loop()
        if names and context.steps > _MAX_READS:
            break
        level = levels[-1]
        before = level.names
        try:
            removed, deeper = await _empty_level(context, level, limit - names)
            if deeper is not None and len(levels) == _MAX_DEPTH:
                raise file_error(
                    errno.ENAMETOOLONG,
                    f"more than {_MAX_DEPTH} levels of directories; remove a directory further down first",
                )
        except FileError:
            names += level.names - before
            if not names:
                raise
            break
        names += removed
        if deeper is not None:
            levels.append(deeper)
            deeper.keeps = keep and _has_trash(deeper.directory, [one.directory for one in levels])
        elif len(levels) > 1 and names < limit:
            await _drop_level(context, levels.pop(), levels[-1])
            names += 1
        else:
            break
    for level in levels:
        if level.names:
            context.put(_left(context, level))
    return names, _left(context, levels[0]) if levels[0].names else top


async def _empty_level(context: Context, level: _Level, limit: int) -> tuple[int, _Level | None]:
    """Removes names until there are `limit` or none left (None), or a directory comes that is not empty."""
    rows, directory, requester = context.rows, level.directory, context.requester
    end, skipped = entries_end(directory.id), len(entry_key(directory.id, b""))
    removed = 0
    while removed < limit:
        context.steps += 1
        await context.yield_to_loop()
        page = await rows.get_range(level.after, end, limit=min(_PAGE_ROWS, limit - removed))
        entries = [(key, decode_entry(key, value)) for key, value in page.items]
        found = await rows.get_many([inode_key(entry.id) for _, entry in entries])
        for (key, entry), row in zip(entries, found, strict=True):
            inode = await context.known(entry.id) if row is None else decode_inode(inode_key(entry.id), row)
            if inode.links > 1:  # one of its other names may have gone just now
                inode = await context.known(entry.id)
            require_removal(requester, directory, inode)
            full = entry.kind is Kind.DIRECTORY and directory_details(inode).entries > 0
            if full:
                require(requester, inode, READ | WRITE | EXECUTE)
            kept = level.keeps and await trash.keep(context, directory, key[skipped:], inode)
            if full and not kept:
                level.after = key
                return removed, _Level(inode, key[skipped:], entry_key(inode.id, b""), keeps=False)
            rows.clear(key)
            if not kept:
                await drop_name(context, inode)
            level.after = key + b"\0"
            level.names += 1
            level.subdirectories += entry.kind is Kind.DIRECTORY
            removed += 1
        if not page.more:
            break
    return removed, None


def _has_trash(directory: Inode, removed: list[Inode]) -> bool:
    """Outside of these."""
    head = directory.quota_tree or ROOT
    return directory_details(directory).defaults.trash_s > 0 and all(one.id != head for one in removed)


async def _drop_level(context: Context, level: _Level, above: _Level) -> None:
    """An empty one."""
    context.rows.clear(entry_key(above.directory.id, level.name))
    await drop_name(context, _left(context, level))
    above.names += 1
    above.subdirectories += 1
    above.after = entry_key(above.directory.id, level.name) + b"\0"


def _left(context: Context, level: _Level) -> Inode:
    return changed_directory(level.directory, context.now_ns, -level.names, -level.subdirectories)
