"""Names: making, linking, removing and renaming what has them.

Every operation finds its *spot* (`inodes.path_walk`), checks in the order in which Linux does, and then writes: the
name, the inode, and the directory with its times and its numbers of entries and of subdirectories. The inode whose last
name goes keeps its row with no links until it is collected (`holds.unlink`).
"""

from __future__ import annotations

import errno
from typing import Final

import msgspec

from fireflyer.fs.core.meta import quota_trees
from fireflyer.fs.core.meta.context import Context, Rows
from fireflyer.fs.core.meta.inodes.directories import changed_directory, depth_in, directory_details, parent_of
from fireflyer.fs.core.meta.inodes.layout import new_layout
from fireflyer.fs.core.meta.inodes.path_walk import LastComponent, LastType, Walker, find, look_up
from fireflyer.fs.core.meta.inodes.permissions import (
    EXECUTE,
    GROUP_EXECUTE,
    READ,
    SET_GID,
    STICKY,
    WRITE,
    permits,
    require,
    require_removal,
)
from fireflyer.fs.core.meta.namespace import trash
from fireflyer.fs.core.meta.open_files import holds
from fireflyer.fs.core.meta.tables import DentryRow, encode_entry, encode_inode, entry_key, inode_key
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import (
    MAX_LINKS,
    MAX_PATH_BYTES,
    ROOT,
    DeviceDetails,
    DirectoryDetails,
    FileDetails,
    Inode,
    InodeId,
    Kind,
    SymlinkDetails,
)
from fireflyer.fs.schema.meta import (
    Done,
    Found,
    Link,
    MakeDirectory,
    MakeNode,
    Open,
    OpenFlag,
    PathRef,
    Remove,
    RemoveDirectory,
    Symlink,
)

__all__ = ["drop_name", "link", "make_directory", "make_node", "make_root", "open_place", "remove"]
__all__ += ["remove_directory", "spot_to_remove", "symlink"]

_PERMISSIONS: Final = 0o777
# Plain numbers: arithmetic of enum flags takes longer than all else of an open.
_CREATE: Final = int(OpenFlag.CREATE)
_EXCLUSIVE: Final = int(OpenFlag.EXCLUSIVE)
_FOLLOW: Final = int(OpenFlag.FOLLOW)
_READS: Final = int(OpenFlag.READ)
_EXECUTES: Final = int(OpenFlag.EXECUTE)
_DIRECTORY: Final = int(OpenFlag.DIRECTORY)
_WRITES: Final = int(OpenFlag.WRITE | OpenFlag.TRUNCATE)


async def make_root(rows: Rows, *, now_ns: int, uid: int = 0, gid: int = 0, mode: int = 0o755) -> bool:
    """False: it is there already."""
    if await rows.get(inode_key(ROOT)) is not None:
        return False
    body = DirectoryDetails(ROOT)
    root = Inode(ROOT, Kind.DIRECTORY, mode, uid, gid, 1, now_ns, now_ns, now_ns, 0, body)
    rows.set(inode_key(ROOT), encode_inode(root))
    return True


async def open_place(request: Open, context: Context) -> tuple[Inode, bool]:
    """The inode, and whether it was made for this. Raises what open(2) does; ENXIO for what only a kernel opens."""
    flags = request.flags
    walker = Walker(context, request.place)
    while True:
        spot = await walker.parent()
        if flags & _CREATE and spot.last is LastType.NAME and spot.slash:
            raise file_error(errno.EISDIR)
        inode = await _at(context, spot)
        if inode is None:
            if not flags & _CREATE:
                raise file_error(errno.ENOENT)
            return await _create_file(context, spot, request.mode), True
        if flags & _CREATE and flags & _EXCLUSIVE:
            raise file_error(errno.EEXIST)
        if isinstance(inode.body, SymlinkDetails) and spot.last is LastType.NAME and (flags & _FOLLOW or spot.slash):
            await walker.enter(inode.body)
            continue
        if spot.slash and inode.kind is not Kind.DIRECTORY:
            raise file_error(errno.ENOTDIR)
        _check_opening(context, inode, flags)
        return inode, False


async def _at(context: Context, spot: LastComponent) -> Inode | None:
    if spot.last is LastType.DOT_DOT:
        return await parent_of(context, spot.directory)
    if spot.last is not LastType.NAME:
        return spot.directory
    entry = await look_up(context, spot.directory, spot.name)
    return None if entry is None else await context.known(entry.id)


def _check_opening(context: Context, inode: Inode, flags: int) -> None:
    kind = inode.kind
    if kind is Kind.DIRECTORY and flags & (_WRITES | _CREATE):
        raise file_error(errno.EISDIR)
    if kind is not Kind.DIRECTORY and flags & _DIRECTORY:
        raise file_error(errno.ENOTDIR)
    if kind is Kind.SYMLINK:
        raise file_error(errno.ELOOP)
    if kind is Kind.DIRECTORY and flags & _EXECUTES:
        raise file_error(errno.EACCES)
    mask = (READ if flags & _READS else 0) | (EXECUTE if flags & _EXECUTES else 0)
    require(context.requester, inode, mask | (WRITE if flags & _WRITES else 0))
    if kind not in (Kind.FILE, Kind.DIRECTORY):
        raise file_error(errno.ENXIO, "fifos, sockets and devices can only be opened through a mount")


async def _create_file(context: Context, spot: LastComponent, mode: int) -> Inode:
    directory = spot.directory
    _require_addition(context, directory)
    inode_id = context.new_id()
    layout = new_layout(context, directory_details(directory).defaults, inode_id)
    return await _make(context, spot, inode_id, Kind.FILE, mode, FileDetails(layout))


async def make_directory(request: MakeDirectory, context: Context) -> Found:
    spot = await _vacancy(context, request.place, directory=True)
    _require_addition(context, spot.directory)
    depth = depth_in(spot.directory)
    inode_id = context.new_id()
    body = DirectoryDetails(spot.directory.id, 0, 0, directory_details(spot.directory).defaults, depth)
    mode = request.mode & (_PERMISSIONS | STICKY)
    return Found(await _make(context, spot, inode_id, Kind.DIRECTORY, mode, body))


async def make_node(request: MakeNode, context: Context) -> Found:
    if request.kind is Kind.DIRECTORY:
        raise file_error(errno.EPERM)
    if request.kind is Kind.SYMLINK:
        raise file_error(errno.EINVAL)
    spot = await _vacancy(context, request.place)
    if request.kind is Kind.FILE:
        return Found(await _create_file(context, spot, request.mode))
    _require_addition(context, spot.directory)
    device = request.device if request.kind in (Kind.CHARACTER, Kind.BLOCK) else 0
    if request.kind in (Kind.CHARACTER, Kind.BLOCK) and not context.requester.unrestricted:
        raise file_error(errno.EPERM, "only root may make device nodes")
    return Found(await _make(context, spot, context.new_id(), request.kind, request.mode, DeviceDetails(device)))


async def symlink(request: Symlink, context: Context) -> Found:
    target = request.target
    if not target:
        raise file_error(errno.ENOENT, "the target of the symbolic link is empty")
    if len(target) > MAX_PATH_BYTES:
        raise file_error(errno.ENAMETOOLONG)
    if b"\0" in target:
        raise file_error(errno.EINVAL, "the target of the symbolic link contains a zero byte")
    spot = await _vacancy(context, request.place)
    _require_addition(context, spot.directory)
    return Found(await _make(context, spot, context.new_id(), Kind.SYMLINK, _PERMISSIONS, SymlinkDetails(target)))


async def link(request: Link, context: Context) -> Found:
    inode = await find(context, request.existing, follow=request.follow)
    spot = await _vacancy(context, request.place)
    directory = spot.directory
    _require_addition(context, directory)
    if inode.kind is Kind.DIRECTORY:
        raise file_error(errno.EPERM, "a directory cannot have hard links")
    if inode.links == 0:
        raise file_error(errno.ENOENT)
    if inode.links >= MAX_LINKS:
        raise file_error(errno.EMLINK)
    if inode.quota_tree != directory.quota_tree:
        raise file_error(errno.EXDEV, "the file and the new link are counted by different quotas; copy instead")
    inode = msgspec.structs.replace(inode, links=inode.links + 1, ctime_ns=context.now_ns, home=directory.id)
    context.put(inode)
    context.rows.set(entry_key(directory.id, spot.name), encode_entry(DentryRow(inode.id, inode.kind)))
    context.put(changed_directory(directory, context.now_ns, 1, 0))
    return Found(inode)


async def remove(request: Remove, context: Context) -> Done:
    spot = await Walker(context, request.place).parent()
    if spot.last is not LastType.NAME:
        raise file_error(errno.EISDIR)
    inode = await _at(context, spot)
    if inode is None:
        raise file_error(errno.ENOENT)
    if spot.slash:
        raise file_error(errno.EISDIR if inode.kind is Kind.DIRECTORY else errno.ENOTDIR)
    directory = spot.directory
    require_removal(context.requester, directory, inode)
    if inode.kind is Kind.DIRECTORY:
        raise file_error(errno.EISDIR)
    context.rows.clear(entry_key(directory.id, spot.name))
    context.put(changed_directory(directory, context.now_ns, -1, 0))
    if not await trash.keep(context, directory, spot.name, inode):
        await drop_name(context, inode)
    return Done()


async def remove_directory(request: RemoveDirectory, context: Context) -> Done:
    spot, inode = await spot_to_remove(context, request.place)
    if directory_details(inode).entries:
        raise file_error(errno.ENOTEMPTY)
    context.rows.clear(entry_key(spot.directory.id, spot.name))
    context.put(changed_directory(spot.directory, context.now_ns, -1, -1))
    await drop_name(context, inode)
    return Done()


async def spot_to_remove(context: Context, place: PathRef) -> tuple[LastComponent, Inode]:
    """Of a directory that may be removed, as far as it is empty."""
    spot = await Walker(context, place).parent()
    if spot.last is LastType.DOT:
        raise file_error(errno.EINVAL)
    if spot.last is LastType.DOT_DOT:
        raise file_error(errno.ENOTEMPTY)
    if spot.last is LastType.NOTHING:
        raise file_error(errno.EBUSY if spot.directory.id == ROOT else errno.EINVAL)
    inode = await _at(context, spot)
    if inode is None:
        raise file_error(errno.ENOENT)
    require_removal(context.requester, spot.directory, inode)
    directory_details(inode)
    return spot, inode


async def drop_name(context: Context, inode: Inode) -> None:
    """After its entry is gone. Of a directory: its only one."""
    left = inode.links - 1
    inode = msgspec.structs.replace(inode, links=left, ctime_ns=context.now_ns)
    context.put(inode)
    if not left:
        await holds.unlink(context, inode)


async def _vacancy(context: Context, place: PathRef, *, directory: bool = False) -> LastComponent:
    """Where nothing is yet. `directory`: a slash may be behind the name."""
    spot = await Walker(context, place).parent()
    if spot.last is not LastType.NAME:
        raise file_error(errno.EEXIST)
    if await look_up(context, spot.directory, spot.name) is not None:
        raise file_error(errno.EEXIST)
    if spot.slash and not directory:
        raise file_error(errno.ENOENT)
    return spot


def _require_addition(context: Context, directory: Inode) -> None:
    if directory.links == 0:
        raise file_error(errno.ENOENT, "the directory was removed")
    if not permits(context.requester, directory, WRITE | EXECUTE):
        raise file_error(errno.EACCES)


async def _make(
    context: Context,
    spot: LastComponent,
    inode_id: InodeId,
    kind: Kind,
    mode: int,
    body: FileDetails | DirectoryDetails | SymlinkDetails | DeviceDetails,
) -> Inode:
    directory, requester, now_ns = spot.directory, context.requester, context.now_ns
    gid = requester.gid
    if directory.mode & SET_GID:
        gid = directory.gid
        if kind is Kind.DIRECTORY:
            mode |= SET_GID
        elif mode & SET_GID and mode & GROUP_EXECUTE and not (requester.unrestricted or requester.has_group(gid)):
            mode &= ~SET_GID
    quota_tree = directory.quota_tree
    target_bytes = len(body.target) if isinstance(body, SymlinkDetails) else 0
    if quota_tree:
        await quota_trees.charge(context, quota_tree, target_bytes, 1)
    home = 0 if kind is Kind.DIRECTORY else directory.id
    inode = Inode(
        inode_id, kind, mode, requester.uid, gid, 1, now_ns, now_ns, now_ns, quota_tree, body, home, target_bytes
    )
    rows = context.rows
    rows.set(inode_key(inode_id), encode_inode(inode))
    rows.set(entry_key(directory.id, spot.name), encode_entry(DentryRow(inode_id, kind)))
    context.put(changed_directory(directory, now_ns, 1, 1 if kind is Kind.DIRECTORY else 0))
    return inode
