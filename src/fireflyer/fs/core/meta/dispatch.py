"""The door: every request of `schema.meta` as a body over one transaction.

`carry_out` raises `FileError` for what it refuses, `ports.NotAtOnce` for what is more than one transaction, and
`DataCorruption` for rows that cannot be. Then whoever runs it drops what was written. Names are this package's
`namespace.dentries`, `namespace.rename`, `trees`, `trash`; open files `lengths`, `open_files.truncate`, `holds`,
`locks`.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from fireflyer.fs.core.meta import quota_trees
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.path_walk import find
from fireflyer.fs.core.meta.inodes.permissions import WRITE, granted, require
from fireflyer.fs.core.meta.namespace import dentries, listing, remove_tree, rename, xattrs
from fireflyer.fs.core.meta.namespace.dentries import make_root
from fireflyer.fs.core.meta.open_files import holds, lengths, locks, truncate
from fireflyer.fs.schema import meta as messages
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import Kind
from fireflyer.fs.schema.meta import Answer, Found, Open, Opened, OpenFlag, Request, Truncate

__all__ = ["carry_out", "make_root"]

_Body: TypeAlias = Callable[[Any, Context], Awaitable[Answer]]
_CHANGES: Final = int(OpenFlag.WRITE | OpenFlag.TRUNCATE)


async def carry_out(request: Request, context: Context) -> Answer:
    """See the module's text."""
    body = _BODIES.get(type(request))
    if body is None:
        raise file_error(
            errno.ENOSYS,
            f"{type(request).__name__} is not supported by this meta service; install the same release everywhere",
        )
    return await body(request, context)


async def _open(request: Open, context: Context) -> Opened:
    """The capability is added by whoever has the key."""
    inode, created = await dentries.open_place(request, context)
    if inode.kind is Kind.FILE and request.flags & _CHANGES:
        inode = await lengths.opened(request, context, inode, created=created)
    return granted(inode, request.flags, context.now_ns, created=created)


async def _truncate(request: Truncate, context: Context) -> Found:
    inode = await find(context, request.place)
    if inode.kind is Kind.DIRECTORY:
        raise file_error(errno.EISDIR)
    if inode.kind is not Kind.FILE:
        raise file_error(errno.EINVAL, "only regular files have a length")
    if not request.handle:
        require(context.requester, inode, WRITE)
    return await truncate.truncate(request, context, inode)


_BODIES: Final[dict[type, _Body]] = {
    messages.Stat: listing.stat,
    messages.StatMany: listing.stat_many,
    messages.ListDirectory: listing.list_directory,
    messages.ReadLink: listing.read_link,
    messages.Access: listing.check_access,
    messages.GetXattr: xattrs.get_xattr,
    messages.ListXattrs: xattrs.list_xattrs,
    messages.GetSpace: quota_trees.get_space,
    messages.GetLock: locks.get_lock,
    messages.GetQuota: quota_trees.get_quota,
    messages.Open: _open,
    messages.Report: lengths.report,
    messages.Close: lengths.close,
    messages.Reserve: lengths.reserve,
    messages.Truncate: _truncate,
    messages.Allocate: truncate.allocate,
    messages.MakeDirectory: dentries.make_directory,
    messages.MakeNode: dentries.make_node,
    messages.Symlink: dentries.symlink,
    messages.Link: dentries.link,
    messages.Remove: dentries.remove,
    messages.RemoveDirectory: dentries.remove_directory,
    messages.RemoveTree: remove_tree.remove_tree,
    messages.Rename: rename.rename,
    messages.SetAttributes: lengths.set_attributes_of_written,
    messages.SetXattr: xattrs.set_xattr,
    messages.RemoveXattr: xattrs.remove_xattr,
    messages.Lock: locks.lock,
    messages.ClientHeartbeat: holds.heartbeat,
    messages.SetQuota: quota_trees.set_quota,
    messages.SetDefaults: quota_trees.set_defaults,
}
