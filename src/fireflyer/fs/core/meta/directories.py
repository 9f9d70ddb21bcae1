"""What a directory's inode says of it, and how it changes when a name comes or goes."""

from __future__ import annotations

import errno

from fireflyer.fs.core.meta.access import EXECUTE, require
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import ROOT, DirectoryBody, Inode, InodeId

__all__ = ["changed_directory", "directory_body", "is_in", "parent_of", "require_reach"]


def directory_body(inode: Inode) -> DirectoryBody:
    """Raises ENOTDIR."""
    if isinstance(inode.body, DirectoryBody):
        return inode.body
    raise file_error(errno.ENOTDIR)


async def parent_of(context: Context, directory: Inode) -> Inode:
    return directory if directory.id == ROOT else await context.known(directory_body(directory).parent)


async def require_reach(context: Context, inode: Inode) -> None:
    """That who asks may know of an inode whose number he gives: his own, or one above which he may search everything.
    Raises EACCES. What is above a removed directory is not looked at: he may have been there before."""
    asker = context.asker
    if not asker.by_path or asker.unrestricted or asker.uid == inode.uid or inode.id == ROOT:
        return
    above = inode.body.parent if isinstance(inode.body, DirectoryBody) else inode.home
    while above:
        directory = await context.inode(above)
        if directory is None or directory.links == 0:
            return
        require(asker, directory, EXECUTE)
        above = 0 if above == ROOT else directory_body(directory).parent


async def is_in(context: Context, directory: Inode, above: InodeId) -> bool:
    """Whether `above` is the directory itself or one that it is in. Reads them all, up to there or to the root."""
    while directory.id != above:
        if directory.id == ROOT:
            return False
        directory = await parent_of(context, directory)
    return True


def changed_directory(directory: Inode, now_ns: int, entries_more: int, subdirectories_more: int) -> Inode:
    """With its times, and so many more (or less)."""
    body = directory_body(directory)
    entries, subdirectories = body.entries + entries_more, body.subdirectories + subdirectories_more
    return Inode(
        directory.id,
        directory.kind,
        directory.mode,
        directory.uid,
        directory.gid,
        directory.links,
        directory.atime_ns,
        now_ns,
        now_ns,
        directory.area,
        DirectoryBody(body.parent, entries, subdirectories, body.defaults),
    )
