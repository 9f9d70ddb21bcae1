"""Mends what `rows` has found, in a store that stands still. Each repair reads its row again; check again after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.fsck.rows import ClearRow, Problem, ReconnectOrphan, Repair, SetInode, SetUse, Unlink
from fireflyer.fs.core.meta.inodes.directories import changed_directory
from fireflyer.fs.core.meta.inodes.path_walk import look_up
from fireflyer.fs.core.meta.open_files import holds
from fireflyer.fs.core.meta.tables import AREA_ROWS, AREAS, DentryRow, encode_entry, entry_key, number_key
from fireflyer.fs.schema.inodes import ROOT, DirectoryDetails, Inode, Kind

__all__ = ["LOST_AND_FOUND", "repair"]

LOST_AND_FOUND: Final = b"lost+found"
_MODE: Final = 0o700


async def repair(problems: Sequence[Problem], context: Context) -> int:
    """Mends those that can be mended; how many."""
    repairs = [problem.repair for problem in problems if problem.repair is not None]
    for each in repairs:
        await _repair_one(each, context)
    return len(repairs)


async def _repair_one(each: Repair, context: Context) -> None:
    if isinstance(each, ClearRow):
        context.rows.clear(each.key)
    elif isinstance(each, SetUse):
        await _set_use(each, context)
    else:
        inode = await context.inode(each.id)
        if inode is None:
            return
        if isinstance(each, SetInode):
            context.put(_changed(inode, each))
        elif isinstance(each, Unlink):
            context.put(msgspec.structs.replace(inode, links=0))
            await holds.unlink(context, inode)
        else:
            await _adopt(each, inode, context)


async def _set_use(use: SetUse, context: Context) -> None:
    key = number_key(AREAS, use.head)
    value = await context.rows.get(key)
    if value is not None:
        row = AREA_ROWS.decode(key, value)
        changed = msgspec.structs.replace(row, outer=use.outer, bytes=use.bytes, inodes=use.inodes)
        context.rows.set(key, AREA_ROWS.encode(changed))


def _changed(inode: Inode, to: SetInode) -> Inode:
    body = inode.body
    if isinstance(body, DirectoryDetails):
        body = DirectoryDetails(
            body.parent if to.parent is None else to.parent,
            body.entries if to.entries is None else to.entries,
            body.subdirectories if to.subdirectories is None else to.subdirectories,
            body.defaults,
            body.depth,
        )
    links, quota_tree = (
        (inode.links if to.links is None else to.links),
        (inode.quota_tree if to.quota_tree is None else to.quota_tree),
    )
    home = inode.home if to.parent is None else to.parent
    xattr_bytes = inode.xattr_bytes if to.xattr_bytes is None else to.xattr_bytes
    return msgspec.structs.replace(
        inode, links=links, quota_tree=quota_tree, body=body, home=home, xattr_bytes=xattr_bytes
    )


async def _adopt(each: ReconnectOrphan, inode: Inode, context: Context) -> None:
    """What counts its old and its new directory have then is for the next check."""
    if each.key:
        context.rows.clear(each.key)
    home = await _lost_and_found(context)
    context.rows.set(entry_key(home.id, b"%d" % inode.id), encode_entry(DentryRow(inode.id, inode.kind)))
    context.put(changed_directory(home, context.now_ns, 1, 1 if inode.kind is Kind.DIRECTORY else 0))
    context.put(_changed(inode, SetInode(inode.id, links=1, parent=home.id)))


async def _lost_and_found(context: Context) -> Inode:
    root = await context.known(ROOT)
    name, number = LOST_AND_FOUND, 1
    while (entry := await look_up(context, root, name)) is not None:
        found = await context.inode(entry.id)
        if found is not None and found.kind is Kind.DIRECTORY and found.uid == 0 and not found.mode & 0o077:
            return found
        name, number = b"%s.%d" % (LOST_AND_FOUND, number), number + 1
    now_ns = context.now_ns
    body = DirectoryDetails(ROOT, depth=1)
    made = Inode(context.new_id(), Kind.DIRECTORY, _MODE, 0, 0, 1, now_ns, now_ns, now_ns, root.quota_tree, body)
    context.put(made)
    context.rows.set(entry_key(ROOT, name), encode_entry(DentryRow(made.id, Kind.DIRECTORY)))
    context.put(changed_directory(root, now_ns, 1, 1))
    return made
