"""Who may do what with an inode: the permission bits of POSIX, the rules of the superuser, sticky directories.

Of owner, group and others exactly one class counts: the first that fits, even where a later one would allow more. The
superuser reads, writes and searches everything, but executes only what anybody may execute.
"""

from __future__ import annotations

import errno
from typing import Final

from fireflyer.base.units import SECOND
from fireflyer.fs.core.capability import LIFETIME_S, Rights
from fireflyer.fs.core.meta.context import Requester
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import Inode, Kind
from fireflyer.fs.schema.meta import Opened, OpenFlag

__all__ = ["EXECUTE", "GROUP_EXECUTE", "READ", "SET_GID", "SET_UID", "STICKY", "WRITE", "may_remove", "owns", "permits"]
__all__ += ["granted", "require", "require_removal"]

READ: Final = 4
WRITE: Final = 2
EXECUTE: Final = 1
"""Of a directory: search."""
SET_UID: Final = 0o4000
SET_GID: Final = 0o2000
STICKY: Final = 0o1000
GROUP_EXECUTE: Final = 0o010
_ANY_EXECUTE: Final = 0o111


def permits(requester: Requester, inode: Inode, mask: int) -> bool:
    mode = inode.mode
    if requester.unrestricted:
        return not mask & EXECUTE or inode.kind is Kind.DIRECTORY or bool(mode & _ANY_EXECUTE)
    if requester.uid == inode.uid:
        mode >>= 6
    elif requester.has_group(inode.gid):
        mode >>= 3
    return mode & mask == mask


def require(requester: Requester, inode: Inode, mask: int) -> None:
    """Raises EACCES."""
    if not permits(requester, inode, mask):
        raise file_error(errno.EACCES)


def granted(inode: Inode, flags: int, now_ns: int, *, created: bool = False) -> Opened:
    """The answer to an `Open` with these flags. It is stored with the rights that were looked at, and for how long they
    count: whoever signs the capability goes by that, whatever is asked under the same number later."""
    rights = Rights.READ if flags & (OpenFlag.READ | OpenFlag.EXECUTE) else Rights(0)
    rights |= Rights.WRITE if flags & OpenFlag.WRITE else Rights(0)
    return Opened(inode, created, expires_unix_s=now_ns // SECOND + LIFETIME_S, rights=int(rights))


def owns(requester: Requester, inode: Inode) -> bool:
    """Or is the superuser."""
    return requester.unrestricted or requester.uid == inode.uid


def may_remove(requester: Requester, directory: Inode, inode: Inode) -> bool:
    """As far as the sticky bit goes."""
    return not directory.mode & STICKY or owns(requester, inode) or requester.uid == directory.uid


def require_removal(requester: Requester, directory: Inode, inode: Inode) -> None:
    """That the name of `inode` may be taken out of `directory`. Raises EACCES, EPERM."""
    require(requester, directory, WRITE | EXECUTE)
    if not may_remove(requester, directory, inode):
        raise file_error(
            errno.EPERM,
            "the directory is sticky: only the owner of the file, of the directory, or root may remove or rename",
        )
