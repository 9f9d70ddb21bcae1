"""Quota areas: limits and exact use of everything below a directory.

Bytes are the lengths of files, extended attributes with their names, and targets of symbolic links; what an inode has
of the last two, it says itself (`Inode.xattr_bytes`), and what it says is what was charged.

Areas lie in each other: a row names the area outside it, and what is charged to one is charged to all outside it, in
the transaction that makes the use. An inode says which area it is in; names never lead from one area into another
(rename and link over the border are EXDEV), so a directory belongs to its area with everything below it, down to the
heads of inner areas. What was unlinked counts until it is collected, where it was when it was unlinked.

A directory becomes an area by being counted, and an area is *closed* by giving what is in it to the one outside: both
in one transaction, so they need a small directory. Unlinked inodes are not found by counting: they stay with the
closed row, which goes when the last of them does.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fireflyer.fs.core.meta import tables
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.directories import directory_details, require_reach
from fireflyer.fs.core.meta.inodes.path_walk import find
from fireflyer.fs.core.meta.tables import AREA_ROWS, AREAS, QuotaTreeRow, number_key
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from fireflyer.fs.schema.inodes import MAX_STRIPE, Defaults, Inode, InodeId, Kind
from fireflyer.fs.schema.meta import Found, GetQuota, GetSpace, QuotaTree, SetDefaults, SetQuota, Space

__all__ = ["MAX_COUNTED", "charge", "get_quota", "get_space", "set_defaults", "set_quota"]

MAX_COUNTED: Final = 4096
"""Names in a directory that becomes an area or ceases to be one."""
_PAGE_ROWS: Final = 1024
_ENDLESS: Final = (1 << 63) - 1


async def charge(
    context: Context, quota_tree: InodeId | int, bytes_more: int, inodes_more: int, *, checked: bool = True
) -> None:
    """Changes the use of `quota_tree` (0: none) and of all outside it. Raises EDQUOT where it grows over a limit,
    unless not
    `checked`; then it has written nothing."""
    rows = context.rows
    writes: list[tuple[bytes, bytes | None]] = []
    while quota_tree:
        key = number_key(AREAS, quota_tree)
        row = await _read(context, quota_tree)
        if row is None:
            raise tables.corrupt(key, "is missing though inodes are in that area")
        used_bytes, used_inodes = row.bytes + bytes_more, row.inodes + inodes_more
        if used_bytes < 0 or used_inodes < 0 or (used_bytes and not used_inodes):
            raise tables.corrupt(key, f"would count {used_bytes} bytes in {used_inodes} inodes")
        if checked and bytes_more > 0 and row.limit_bytes is not None and used_bytes > row.limit_bytes:
            raise _over(quota_tree, row.limit_bytes, row.bytes, bytes_more, "bytes")
        if checked and inodes_more > 0 and row.limit_inodes is not None and used_inodes > row.limit_inodes:
            raise _over(quota_tree, row.limit_inodes, row.inodes, inodes_more, "inodes")
        changed = QuotaTreeRow(
            row.head, row.outer, used_bytes, used_inodes, row.limit_bytes, row.limit_inodes, row.closed
        )
        writes.append((key, AREA_ROWS.encode(changed) if used_inodes else None))
        quota_tree = row.outer
    for key, value in writes:
        if value is None:
            rows.clear(key)
        else:
            rows.set(key, value)


def _over(directory: InodeId, limit: int, used: int, more: int, unit: str) -> FileError:
    """By the number of the directory: only a client knows the path by which it came there."""
    return file_error(
        errno.EDQUOT,
        f"disk quota exceeded: the directory with inode {directory} is limited to {limit} {unit}, {used} are used, "
        f"{more} more were requested",
    )


async def get_quota(request: GetQuota, context: Context) -> QuotaTree:
    inode = await find(context, request.place)
    row = await _read(context, inode.id)
    if row is None or row.closed:
        raise file_error(errno.ENODATA, "this directory has no quota; a quota of a directory above it may apply")
    return _shown(row)


async def get_space(request: GetSpace, context: Context) -> Space:
    inode = await context.inode(request.inode)
    if inode is None:
        raise file_error(errno.ESTALE)
    await require_reach(context, inode)
    cluster = context.cluster
    capacity, free = cluster.capacity_bytes, cluster.free_bytes
    inodes, free_inodes = cluster.inodes, _ENDLESS - cluster.inodes
    quota_tree: int = inode.quota_tree
    while quota_tree:
        row = await _read(context, quota_tree)
        if row is None:
            raise tables.corrupt(number_key(AREAS, quota_tree), "is missing though inodes are in that area")
        if row.limit_bytes is not None:
            capacity = min(capacity, row.limit_bytes)
            free = min(free, max(0, row.limit_bytes - row.bytes))
        if row.limit_inodes is not None and row.limit_inodes - row.inodes < free_inodes:
            inodes, free_inodes = row.inodes, max(0, row.limit_inodes - row.inodes)
        quota_tree = row.outer
    return Space(capacity, free, inodes, free_inodes)


async def set_defaults(request: SetDefaults, context: Context) -> Found:
    inode = await find(context, request.place)
    body = directory_details(inode)
    if not (context.requester.unrestricted or context.requester.uid == inode.uid):
        raise file_error(errno.EPERM)
    _check_defaults(request.defaults)
    changed = msgspec.structs.replace(
        inode, ctime_ns=context.now_ns, body=msgspec.structs.replace(body, defaults=request.defaults)
    )
    context.put(changed)
    return Found(changed)


def _check_defaults(defaults: Defaults) -> None:
    size = defaults.chunk_bytes
    if size and (size & (size - 1) or not MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES):
        raise file_error(errno.EINVAL, f"chunk size {size} bytes; give a power of two, 64 KiB to 64 MiB")
    if defaults.stripe > MAX_STRIPE:
        raise file_error(errno.EINVAL, f"stripe of {defaults.stripe} chains; at most {MAX_STRIPE} are allowed")


async def set_quota(request: SetQuota, context: Context) -> QuotaTree:
    if not context.requester.unrestricted:
        raise file_error(errno.EPERM, "only administrators may set quotas")
    inode = await find(context, request.place)
    directory_details(inode)
    if inode.links == 0:
        raise file_error(errno.ENOENT)
    row = await _read(context, inode.id)
    is_head = row is not None and not row.closed
    if request.bytes is None and request.inodes is None:
        if row is None or row.closed:
            raise file_error(errno.ENODATA, "this directory has no quota; a quota of a directory above it may apply")
        return await _close(context, inode, row)
    if row is None or not is_head:
        row = await _open(context, inode, row)
    row = msgspec.structs.replace(row, limit_bytes=request.bytes, limit_inodes=request.inodes)
    _write(context, row)
    return _shown(row)


async def _open(context: Context, head: Inode, left: QuotaTreeRow | None) -> QuotaTreeRow:
    """`left`: what is still unlinked from when it was an area before; it is charged as where the directory is now."""
    outer = head.quota_tree
    counted = await _count(context, head)
    counted_bytes, counted_inodes = counted.bytes, counted.inodes
    if left is not None:
        await charge(context, left.outer, -left.bytes, -left.inodes, checked=False)
        await charge(context, outer, left.bytes, left.inodes, checked=False)
        counted_bytes, counted_inodes = counted_bytes + left.bytes, counted_inodes + left.inodes
    for inode in counted.found:
        context.put(msgspec.structs.replace(inode, quota_tree=head.id))
    for inner in counted.inner:
        _write(context, msgspec.structs.replace(inner, outer=head.id))
    return QuotaTreeRow(head.id, outer, counted_bytes, counted_inodes)


async def _close(context: Context, head: Inode, row: QuotaTreeRow) -> QuotaTree:
    counted = await _count(context, head)
    for inode in counted.found:
        context.put(msgspec.structs.replace(inode, quota_tree=row.outer))
    for inner in counted.inner:
        _write(context, msgspec.structs.replace(inner, outer=row.outer))
    left = QuotaTreeRow(row.head, row.outer, row.bytes - counted.bytes, row.inodes - counted.inodes, closed=True)
    if left.bytes < 0 or left.inodes < 0:
        raise tables.corrupt(number_key(AREAS, head.id), f"counts less than the {counted.inodes} inodes that exist")
    if left.inodes:
        _write(context, left)
    else:
        context.rows.clear(number_key(AREAS, head.id))
    return QuotaTree(head.id, counted.bytes, counted.inodes, None, None)


@dataclass(slots=True)
class _Counted:
    bytes: int = 0
    inodes: int = 0
    """With those of inner areas."""
    found: list[Inode] = field(default_factory=list)
    """Without them."""
    inner: list[QuotaTreeRow] = field(default_factory=list)


async def _count(context: Context, head: Inode) -> _Counted:
    """Raises EFBIG where there are too many; EXDEV where something has a name outside too."""
    counted = _Counted()
    names: Counter[InodeId] = Counter()
    several: dict[InodeId, Inode] = {}
    _add(counted, head)
    below = [head.id]
    seen = 0
    while below:
        names_here = await _names(context, below.pop(), MAX_COUNTED - seen)
        await context.rows.get_many([tables.inode_key(one) for one, _ in names_here])  # known then, in one question
        await context.yield_to_loop()
        for name_id, kind in names_here:
            seen += 1
            names[name_id] += 1
            if names[name_id] > 1:
                continue
            inode = await context.known(name_id)
            if kind is Kind.DIRECTORY and inode.quota_tree == inode.id and inode.id != head.id:
                inner = await _read(context, inode.id)
                if inner is None:
                    raise tables.corrupt(number_key(AREAS, inode.id), "is missing though inodes are in that area")
                counted.inner.append(inner)
                counted.bytes, counted.inodes = counted.bytes + inner.bytes, counted.inodes + inner.inodes
                continue
            _add(counted, inode)
            if kind is Kind.DIRECTORY:
                below.append(inode.id)
            elif inode.links > 1:
                several[inode.id] = inode
    for inode in several.values():
        if names[inode.id] != inode.links:
            raise file_error(
                errno.EXDEV, f"inode {inode.id} has a hard link outside of the directory; remove that first"
            )
    return counted


def _add(counted: _Counted, inode: Inode) -> None:
    counted.found.append(inode)
    counted.inodes += 1
    counted.bytes += inode.charged_bytes


async def _names(context: Context, directory: InodeId, most: int) -> list[tuple[InodeId, Kind]]:
    result: list[tuple[InodeId, Kind]] = []
    begin, end = tables.entry_key(directory, b""), tables.entries_end(directory)
    while True:
        page = await context.rows.get_range(begin, end, limit=_PAGE_ROWS)
        for key, value in page.items:
            entry = tables.decode_entry(key, value)
            result.append((entry.id, entry.kind))
        if len(result) > most:
            message = (
                f"more than {MAX_COUNTED} names below the directory; set the quota on a new directory and move them "
                "there"
            )
            raise file_error(errno.EFBIG, message)
        if not page.more:
            return result
        begin = page.items[-1][0] + b"\0"


async def _read(context: Context, quota_tree: InodeId) -> QuotaTreeRow | None:
    key = number_key(AREAS, quota_tree)
    value = await context.rows.get(key)
    if value is None:
        return None
    row = AREA_ROWS.decode(key, value)
    if row.head != quota_tree:
        raise tables.corrupt(key, f"is the row of area {row.head}")
    return row


def _write(context: Context, row: QuotaTreeRow) -> None:
    context.rows.set(number_key(AREAS, row.head), AREA_ROWS.encode(row))


def _shown(row: QuotaTreeRow) -> QuotaTree:
    return QuotaTree(row.head, row.bytes, row.inodes, row.limit_bytes, row.limit_inodes)
