"""`Renew`: whether a client that has a file open may go on with its chunks.

POSIX looks at rights when a file is opened, and a capability is good for some minutes only. For writing, the writer row
is the proof that the file was opened so. Of files that are open for reading nothing is known, so the right is looked at
again: who has lost it meanwhile cannot go on for long, but the owner can, as owners can give it to themselves again.
"""

from __future__ import annotations

import errno

from fireflyer.base.units import SECOND
from fireflyer.fs.core.capability import LIFETIME_S, Rights
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.directories import require_reach
from fireflyer.fs.core.meta.inodes.permissions import READ, owns, require
from fireflyer.fs.core.meta.open_rows import WRITER_ROWS, is_being_collected
from fireflyer.fs.core.meta.tables import WRITERS, pair_key
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import Kind
from fireflyer.fs.schema.meta import Opened, Renew

__all__ = ["renew"]


async def renew(request: Renew, context: Context) -> Opened:
    """The capability is added by whoever has the key. Raises `FileError`: ESTALE, EINVAL, EBADF, EACCES."""
    inode = await context.inode(request.inode)
    if inode is None:
        raise file_error(errno.ESTALE)
    if inode.kind is not Kind.FILE:
        raise file_error(errno.EINVAL, "only regular files have chunks")
    if await is_being_collected(context, inode):
        raise file_error(errno.ESTALE, "the file was removed, and is no longer open")
    if request.rights & Rights.WRITE:
        key = pair_key(WRITERS, inode.id, context.requester.client)
        row = await context.rows.get(key)
        if row is None or request.handle not in WRITER_ROWS.decode(key, row).handles:
            raise file_error(errno.EBADF, "this handle does not have the file open for writing")
    if request.rights & Rights.READ and not owns(context.requester, inode):
        await require_reach(context, inode)
        require(context.requester, inode, READ)
    return Opened(inode, expires_unix_s=context.now_ns // SECOND + LIFETIME_S, rights=request.rights)
