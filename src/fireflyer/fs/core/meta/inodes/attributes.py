"""chmod, chown and utimens, and which rights fall with them.

Set-user-id and set-group-id fall when the owner changes and when the file is written, or who may write a program could
take its owner's rights. Set-group-id of a file without group execution once meant a lock, and stays with who is in the
group.
"""

from __future__ import annotations

import errno
from typing import Final

import msgspec

from fireflyer.fs.core.meta.context import Context, Requester
from fireflyer.fs.core.meta.inodes.path_walk import find
from fireflyer.fs.core.meta.inodes.permissions import GROUP_EXECUTE, SET_GID, SET_UID, WRITE, owns, permits
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import Inode, Kind
from fireflyer.fs.schema.meta import Found, Now, SetAttributes

__all__ = ["set_attributes", "without_privileges"]

_NOBODY: Final = (1 << 32) - 1
"""-1 of chown(2): no id."""


async def set_attributes(request: SetAttributes, context: Context) -> Found:
    inode = await find(context, request.place, follow=request.follow)
    _check_owners(request, context.requester, inode)
    if request.mode is not None:
        if inode.kind is Kind.SYMLINK:
            raise file_error(errno.EOPNOTSUPP, "a symbolic link has no permissions of its own")
        if not owns(context.requester, inode):
            raise file_error(errno.EPERM)
    _check_times(request, context.requester, inode)
    now_ns = context.now_ns
    atime_ns = now_ns if request.now & Now.ATIME else request.atime_ns
    mtime_ns = now_ns if request.now & Now.MTIME else request.mtime_ns
    changed = msgspec.structs.replace(
        inode,
        mode=_mode(request, context.requester, inode),
        uid=inode.uid if request.uid is None else request.uid,
        gid=inode.gid if request.gid is None else request.gid,
        atime_ns=inode.atime_ns if atime_ns is None else atime_ns,
        mtime_ns=inode.mtime_ns if mtime_ns is None else mtime_ns,
        ctime_ns=now_ns,
    )
    context.put(changed)
    return Found(changed)


def without_privileges(inode: Inode, *, in_group: bool = True) -> int:
    """Its mode after a write or another owner."""
    mode = inode.mode & ~SET_UID
    return mode & ~SET_GID if mode & GROUP_EXECUTE or not in_group else mode


def _check_owners(request: SetAttributes, requester: Requester, inode: Inode) -> None:
    if _NOBODY in (request.uid, request.gid):
        raise file_error(errno.EINVAL, f"{_NOBODY} is not a valid uid or gid")
    if requester.unrestricted:
        return
    is_owner = requester.uid == inode.uid
    if request.uid is not None and not (is_owner and request.uid == inode.uid):
        raise file_error(errno.EPERM, "only root may change the owner")
    gid = request.gid
    if gid is not None and not (is_owner and (gid == inode.gid or requester.has_group(gid))):
        raise file_error(errno.EPERM, "the owner may only give a file to a group that they are in")


def _check_times(request: SetAttributes, requester: Requester, inode: Inode) -> None:
    if owns(requester, inode):
        return
    if request.atime_ns is not None or request.mtime_ns is not None or request.now in (Now.ATIME, Now.MTIME):
        raise file_error(errno.EPERM)
    if request.now and not permits(requester, inode, WRITE):
        raise file_error(errno.EACCES)


def _mode(request: SetAttributes, requester: Requester, inode: Inode) -> int:
    if request.mode is not None:
        gid = inode.gid if request.gid is None else request.gid
        in_group = requester.unrestricted or requester.has_group(gid)
        return request.mode if in_group else request.mode & ~SET_GID
    if (request.uid is None and request.gid is None) or inode.kind is Kind.DIRECTORY:
        return inode.mode
    return without_privileges(inode, in_group=requester.unrestricted or requester.has_group(inode.gid))
