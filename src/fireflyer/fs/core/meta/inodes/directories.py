"""What a directory's inode says of it, and how it changes when a name comes or goes."""

from __future__ import annotations

import errno
from typing import Final

from fireflyer.fs.core.meta.context import REST_MASK, Context
from fireflyer.fs.core.meta.inodes.permissions import EXECUTE, require
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import MAX_DEPTH, ROOT, DirectoryDetails, Inode, InodeId

__all__ = ["MAX_CLIMB", "changed_directory", "depth_in", "directory_details", "is_in", "parent_of", "require_reach"]

MAX_CLIMB: Final = 2 * MAX_DEPTH
"""Directories above one, as far as anybody looks: moving a tree may bring what is in it below `MAX_DEPTH`."""


def directory_details(inode: Inode) -> DirectoryDetails:
    """Raises ENOTDIR."""
    if isinstance(inode.body, DirectoryDetails):
        return inode.body
    raise file_error(errno.ENOTDIR)


async def parent_of(context: Context, directory: Inode) -> Inode:
    return directory if directory.id == ROOT else await context.known(directory_details(directory).parent)


def depth_in(directory: Inode) -> int:
    """Of a directory that comes to lie in this one. Raises ENAMETOOLONG."""
    depth = directory_details(directory).depth + 1
    if depth > MAX_DEPTH:
        raise file_error(errno.ENAMETOOLONG, f"directories can be nested at most {MAX_DEPTH} deep")
    return depth


async def require_reach(context: Context, inode: Inode) -> None:
    """That users may know of an inode whose number they give: their own, or one above which they may search everything.
    Raises EACCES, ENAMETOOLONG. What is above a removed directory is not looked at: they may have been there before."""
    requester = context.requester
    if not requester.by_path or requester.unrestricted or requester.uid == inode.uid or inode.id == ROOT:
        return
    above = inode.body.parent if isinstance(inode.body, DirectoryDetails) else inode.home
    climbed = 0
    while above:
        climbed = await _step(context, climbed)
        directory = await context.inode(above)
        if directory is None or directory.links == 0:
            return
        require(requester, directory, EXECUTE)
        above = 0 if above == ROOT else directory_details(directory).parent


async def is_in(context: Context, directory: Inode, above: InodeId) -> bool:
    """Whether `above` is the directory itself or one that it is in. Reads them all, up to there or to the root. Raises
    ENAMETOOLONG where they are too many."""
    climbed = 0
    while directory.id != above:
        climbed = await _step(context, climbed)
        if directory.id == ROOT:
            return False
        directory = await parent_of(context, directory)
    return True


async def _step(context: Context, climbed: int) -> int:
    if climbed == MAX_CLIMB:
        raise file_error(errno.ENAMETOOLONG, f"more than {MAX_CLIMB} directories are above it; move one of them up")
    context.steps += 1
    if not context.steps & REST_MASK:
        await context.rest()
    return climbed + 1


def changed_directory(directory: Inode, now_ns: int, entries_more: int, subdirectories_more: int) -> Inode:
    """With its times, and so many more (or less)."""
    body = directory_details(directory)
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
        directory.quota_tree,
        DirectoryDetails(body.parent, entries, subdirectories, body.defaults, body.depth),
        directory.home,
        directory.xattr_bytes,
    )
