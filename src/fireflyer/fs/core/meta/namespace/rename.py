"""rename(2), with NO_REPLACE and EXCHANGE.

Names that lead to the same inode stay as they are. A directory never comes to lie in itself: where the two directories
differ, everything from the target's to the root is read, so that a rename above it at the same time is a conflict.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import msgspec

from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.directories import changed_directory, depth_in, is_in
from fireflyer.fs.core.meta.inodes.path_walk import LastComponent, LastType, Walker, look_up
from fireflyer.fs.core.meta.inodes.permissions import EXECUTE, WRITE, require, require_removal
from fireflyer.fs.core.meta.namespace import dentries, trash
from fireflyer.fs.core.meta.tables import DentryRow, encode_entry, entry_key
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import DirectoryDetails, Inode, InodeId, Kind
from fireflyer.fs.schema.meta import Done, Rename, RenameFlag

__all__ = ["rename"]


@dataclass(slots=True)
class _Move:
    source: LastComponent
    target: LastComponent
    moved: Inode
    other: Inode | None
    """What is at the target."""
    exchange: bool

    @property
    def within(self) -> bool:
        """One directory."""
        return self.source.directory.id == self.target.directory.id


async def rename(request: Rename, context: Context) -> Done:
    move = await _find(request, context)
    if not move.within:
        await _check_loops(context, move)
    if move.other is not None and move.other.id == move.moved.id:
        return Done()
    _check_rights(context, move)
    if move.source.directory.quota_tree != move.target.directory.quota_tree:
        raise file_error(errno.EXDEV, "source and target are counted by different quotas; copy instead")
    if move.exchange and move.other is not None:
        _exchange(context, move, move.other)
    else:
        await _move(context, move)
    return Done()


async def _find(request: Rename, context: Context) -> _Move:
    no_replace, exchange = bool(request.flags & RenameFlag.NO_REPLACE), bool(request.flags & RenameFlag.EXCHANGE)
    if no_replace and exchange:
        raise file_error(errno.EINVAL)
    source = await Walker(context, request.source).parent()
    target = await Walker(context, request.target).parent()
    if source.last is not LastType.NAME:
        raise file_error(errno.EBUSY)
    if target.last is not LastType.NAME:
        raise file_error(errno.EEXIST if no_replace else errno.EBUSY)
    entry = await look_up(context, source.directory, source.name)
    if entry is None:
        raise file_error(errno.ENOENT)
    there = await look_up(context, target.directory, target.name)
    if there is not None and no_replace:
        raise file_error(errno.EEXIST)
    if there is None and exchange:
        raise file_error(errno.ENOENT)
    if exchange and there is not None and there.kind is not Kind.DIRECTORY and target.slash:
        raise file_error(errno.ENOTDIR)
    if entry.kind is not Kind.DIRECTORY and (source.slash or (target.slash and not exchange)):
        raise file_error(errno.ENOTDIR)
    moved = await context.known(entry.id)
    return _Move(source, target, moved, None if there is None else await context.known(there.id), exchange)


async def _check_loops(context: Context, move: _Move) -> None:
    if move.moved.kind is Kind.DIRECTORY and await is_in(context, move.target.directory, move.moved.id):
        raise file_error(errno.EINVAL, "a directory cannot be moved into itself")
    other = move.other
    if other is None or other.kind is not Kind.DIRECTORY:
        return
    if await is_in(context, move.source.directory, other.id):
        raise file_error(errno.EINVAL if move.exchange else errno.ENOTEMPTY)


def _check_rights(context: Context, move: _Move) -> None:
    requester, moved, other = context.requester, move.moved, move.other
    require_removal(requester, move.source.directory, moved)
    if other is None:
        if move.target.directory.links == 0:
            raise file_error(errno.ENOENT, "the directory was removed")
        require(requester, move.target.directory, WRITE | EXECUTE)
    else:
        require_removal(requester, move.target.directory, other)
        if not move.exchange and moved.kind is Kind.DIRECTORY and other.kind is not Kind.DIRECTORY:
            raise file_error(errno.ENOTDIR)
        if not move.exchange and moved.kind is not Kind.DIRECTORY and other.kind is Kind.DIRECTORY:
            raise file_error(errno.EISDIR)
    if not move.within:
        # Its ".." changes.
        if moved.kind is Kind.DIRECTORY:
            require(requester, moved, WRITE)
        if move.exchange and other is not None and other.kind is Kind.DIRECTORY:
            require(requester, other, WRITE)
    if not move.exchange and other is not None and isinstance(other.body, DirectoryDetails) and other.body.entries:
        raise file_error(errno.ENOTEMPTY)


def _exchange(context: Context, move: _Move, other: Inode) -> None:
    source, target = move.source.directory, move.target.directory
    _set(context, source.id, move.source.name, other)
    _set(context, target.id, move.target.name, move.moved)
    context.put(_moved(move.moved, target, context.now_ns))
    context.put(_moved(other, source, context.now_ns))
    more = _directories(move.moved) - _directories(other)
    context.put(changed_directory(source, context.now_ns, 0, 0 if move.within else -more))
    if not move.within:
        context.put(changed_directory(target, context.now_ns, 0, more))


async def _move(context: Context, move: _Move) -> None:
    source, target, other = move.source.directory, move.target.directory, move.other
    now_ns = context.now_ns
    context.rows.clear(entry_key(source.id, move.source.name))
    _set(context, target.id, move.target.name, move.moved)
    context.put(_moved(move.moved, target, now_ns))
    gone, gone_directories = (0, 0) if other is None else (1, _directories(other))
    moved_directories = _directories(move.moved)
    if move.within:
        context.put(changed_directory(source, now_ns, -gone, -gone_directories))
    else:
        context.put(changed_directory(source, now_ns, -1, -moved_directories))
        context.put(changed_directory(target, now_ns, 1 - gone, moved_directories - gone_directories))
    if other is not None and not await trash.keep(context, target, move.target.name, other):
        await dentries.drop_name(context, other)


def _set(context: Context, directory: InodeId, name: bytes, inode: Inode) -> None:
    context.rows.set(entry_key(directory, name), encode_entry(DentryRow(inode.id, inode.kind)))


def _moved(inode: Inode, directory: Inode, now_ns: int) -> Inode:
    """Raises ENAMETOOLONG."""
    body = inode.body
    if isinstance(body, DirectoryDetails):
        depth = body.depth if body.parent == directory.id else depth_in(directory)
        body = msgspec.structs.replace(body, parent=directory.id, depth=depth)
        return msgspec.structs.replace(inode, ctime_ns=now_ns, body=body)
    return msgspec.structs.replace(inode, ctime_ns=now_ns, home=directory.id)


def _directories(inode: Inode) -> int:
    return 1 if inode.kind is Kind.DIRECTORY else 0
