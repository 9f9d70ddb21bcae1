"""Extended attributes: `user.` for who may read or write the file, `security.` for all to read and root to write,
`trusted.` for root alone. There are no others (`system.` would be ACLs).

As on Linux: `user.` only of files and directories; in a sticky directory's own attributes only its owner writes; who
may not see a `trusted.` one is told that there is none.

Names and values count in the quota trees of their inode.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

import msgspec

from fireflyer.fs.core.meta import quota_trees
from fireflyer.fs.core.meta.context import Context, Requester
from fireflyer.fs.core.meta.inodes.path_walk import find
from fireflyer.fs.core.meta.inodes.permissions import READ, STICKY, WRITE, owns, require
from fireflyer.fs.core.meta.tables import VALUES, number_key
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import Inode, Kind, SymlinkDetails
from fireflyer.fs.schema.meta import (
    MAX_VALUE_BYTES,
    Done,
    GetXattr,
    ListXattrs,
    RemoveXattr,
    SetXattr,
    XattrFlag,
    XattrNames,
    XattrValue,
)

__all__ = ["get_xattr", "list_xattrs", "remove_xattr", "set_xattr"]

_MAX_VALUE_NAME_BYTES: Final = 255
_MAX_ALL_BYTES: Final = 2 * MAX_VALUE_BYTES
"""Names and values of one inode."""
_MAX_VALUES: Final = 4096
_USER: Final = b"user."
_TRUSTED: Final = b"trusted."
_SECURITY: Final = b"security."


async def get_xattr(request: GetXattr, context: Context) -> XattrValue:
    _check_name(request.name)
    inode = await find(context, request.place, follow=request.follow)
    _check_right(context.requester, inode, request.name, READ)
    _check_namespace(request.name)
    value = await context.rows.get(_key(inode, request.name))
    if value is None:
        raise file_error(errno.ENODATA)
    return XattrValue(value)


async def list_xattrs(request: ListXattrs, context: Context) -> XattrNames:
    inode = await find(context, request.place, follow=request.follow)
    names = [name for name, _ in await _all(context, inode)]
    return XattrNames(tuple(name for name in names if context.requester.unrestricted or not name.startswith(_TRUSTED)))


async def set_xattr(request: SetXattr, context: Context) -> Done:
    name = request.name
    _check_name(name)
    inode = await find(context, request.place, follow=request.follow)
    _check_right(context.requester, inode, name, WRITE)
    _check_namespace(name)
    kept = dict(await _all(context, inode))
    if request.flag is XattrFlag.CREATE and name in kept:
        raise file_error(errno.EEXIST)
    if request.flag is XattrFlag.REPLACE and name not in kept:
        raise file_error(errno.ENODATA)
    kept[name] = len(request.value)
    if sum(len(each) + size for each, size in kept.items()) > _MAX_ALL_BYTES or len(kept) > _MAX_VALUES:
        raise file_error(
            errno.ENOSPC, f"more than {_MAX_ALL_BYTES} bytes or {_MAX_VALUES} extended attributes on one inode"
        )
    await _charge(context, inode, kept)
    context.rows.set(_key(inode, name), request.value)
    return Done()


async def remove_xattr(request: RemoveXattr, context: Context) -> Done:
    _check_name(request.name)
    inode = await find(context, request.place, follow=request.follow)
    _check_right(context.requester, inode, request.name, WRITE)
    _check_namespace(request.name)
    kept = dict(await _all(context, inode))
    if kept.pop(request.name, None) is None:
        raise file_error(errno.ENODATA)
    await _charge(context, inode, kept)
    context.rows.clear(_key(inode, request.name))
    return Done()


async def _charge(context: Context, inode: Inode, kept: Mapping[bytes, int]) -> None:
    """For what it has from now on: names and sizes. Raises EDQUOT, and then has written nothing."""
    target_bytes = len(inode.body.target) if isinstance(inode.body, SymlinkDetails) else 0
    xattr_bytes = target_bytes + sum(len(name) + size for name, size in kept.items())
    if xattr_bytes != inode.xattr_bytes:
        await quota_trees.charge(context, inode.quota_tree, xattr_bytes - inode.xattr_bytes, 0)
    context.put(msgspec.structs.replace(inode, ctime_ns=context.now_ns, xattr_bytes=xattr_bytes))


def _check_name(name: bytes) -> None:
    if not 0 < len(name) <= _MAX_VALUE_NAME_BYTES or b"\0" in name:
        raise file_error(errno.ERANGE, f"the name of an extended attribute has 1 to {_MAX_VALUE_NAME_BYTES} bytes")


def _check_namespace(name: bytes) -> None:
    for prefix in (_USER, _TRUSTED, _SECURITY):
        if name.startswith(prefix):
            if name == prefix:
                raise file_error(
                    errno.EINVAL, "the name of an extended attribute is missing after its namespace, as in user.NAME"
                )
            return
    raise file_error(
        errno.EOPNOTSUPP, "extended attributes must be in the namespace user, trusted or security, as user.NAME"
    )


def _check_right(requester: Requester, inode: Inode, name: bytes, mask: int) -> None:
    if name.startswith(_SECURITY):
        if mask & WRITE and not requester.unrestricted:
            raise file_error(errno.EPERM)
        return
    none_here = file_error(errno.EPERM if mask & WRITE else errno.ENODATA)
    if name.startswith(_TRUSTED):
        if not requester.unrestricted:
            raise none_here
        return
    is_directory = inode.kind is Kind.DIRECTORY
    if name.startswith(_USER) and inode.kind is not Kind.FILE and not is_directory:
        raise none_here
    if name.startswith(_USER) and mask & WRITE and is_directory and inode.mode & STICKY and not owns(requester, inode):
        raise none_here
    require(requester, inode, mask)


def _key(inode: Inode, name: bytes) -> bytes:
    return number_key(VALUES, inode.id) + name


async def _all(context: Context, inode: Inode) -> list[tuple[bytes, int]]:
    """Names and sizes."""
    begin, skipped = number_key(VALUES, inode.id), len(VALUES) + 8
    page = await context.rows.get_range(begin, number_key(VALUES, inode.id + 1), limit=_MAX_VALUES)
    return [(key[skipped:], len(value)) for key, value in page.items]
