"""Looking: attributes of one place or of many, the names of a directory, the target of a link, rights."""

from __future__ import annotations

import errno

from fireflyer.fs.core.meta.context import REST_MASK, Context
from fireflyer.fs.core.meta.inodes.directories import directory_details, require_reach
from fireflyer.fs.core.meta.inodes.path_walk import find
from fireflyer.fs.core.meta.inodes.permissions import EXECUTE, READ, permits, require
from fireflyer.fs.core.meta.open_rows import is_being_collected
from fireflyer.fs.core.meta.tables import (
    ENTRY_PREFIX_BYTES,
    decode_entry,
    decode_inode,
    entries_end,
    entry_key,
    inode_key,
)
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.inodes import MAX_NAME_BYTES, ROOT, Inode, InodeId, Kind, SymlinkDetails
from fireflyer.fs.schema.meta import (
    Access,
    Done,
    Entry,
    Found,
    FoundMany,
    ListDirectory,
    Listing,
    PathRef,
    ReadLink,
    Stat,
    StatMany,
    Target,
)

__all__ = ["check_access", "list_directory", "read_link", "stat", "stat_many"]

_DOTS = (b".", b"..")


async def stat(request: Stat, context: Context) -> Found:
    inode = await find(context, request.place, follow=request.follow)
    if not inode.links and await is_being_collected(context, inode):
        raise file_error(errno.ESTALE, "the file was removed, and is no longer open")
    return Found(inode)


async def stat_many(request: StatMany, context: Context) -> FoundMany:
    """Names in directories that were searched before are looked up at once."""
    searched: dict[InodeId, bool] = {}
    found: list[Inode | int] = []
    get = context.rows.get
    for at, place in enumerate(request.places, 1):
        if not at & REST_MASK:
            await context.yield_to_loop()
        base, name = place.base, place.path
        if name and b"/" not in name and b"\0" not in name and len(name) <= MAX_NAME_BYTES and name not in _DOTS:
            may_search = searched.get(base)
            if may_search is None:
                may_search = searched[base] = await _may_search(context, base)
            if may_search:
                key = entry_key(base, name)
                value = await get(key)
                if value is None:
                    found.append(errno.ENOENT)
                    continue
                entry = decode_entry(key, value)
                if entry.kind is not Kind.SYMLINK:
                    found.append(await context.known(entry.id))
                    continue
        found.append(await _errno_or_inode(context, place, follow=request.follow))
    return FoundMany(tuple(found))


async def _may_search(context: Context, directory: InodeId) -> bool:
    inode = await context.inode(directory)
    if inode is None or inode.kind is not Kind.DIRECTORY or (context.requester.by_path and directory != ROOT):
        return False  # the slow way says why, or finds it
    return permits(context.requester, inode, EXECUTE)


async def _errno_or_inode(context: Context, place: PathRef, *, follow: bool) -> Inode | int:
    try:
        return await find(context, place, follow=follow)
    except FileError as error:
        return error.errno or errno.EIO


async def list_directory(request: ListDirectory, context: Context) -> Listing:
    directory = await context.inode(request.directory)
    if directory is None:
        raise file_error(errno.ESTALE)
    body = directory_details(directory)
    await require_reach(context, directory)
    if not request.opened or context.requester.by_path:
        require(context.requester, directory, READ)
    if directory.links == 0:
        raise file_error(errno.ENOENT, "the directory was removed")
    begin = entry_key(directory.id, request.after) + (b"\0" if request.after else b"")
    rows = context.rows
    page = await rows.get_range(begin, entries_end(directory.id), limit=request.limit)
    with_inodes = request.inodes and permits(context.requester, directory, EXECUTE)
    found = [(key[ENTRY_PREFIX_BYTES:], decode_entry(key, value)) for key, value in page.items]
    inodes: list[Inode | None] = [None] * len(found)
    if with_inodes:
        keys = [inode_key(entry.id) for _, entry in found]
        for at, (key, row) in enumerate(zip(keys, await rows.get_many(keys), strict=True)):
            inodes[at] = await context.known(found[at][1].id) if row is None else decode_inode(key, row)
    entries = [Entry(name, entry.id, entry.kind, inode) for (name, entry), inode in zip(found, inodes, strict=True)]
    return Listing(tuple(entries), page.more, body.parent)


async def read_link(request: ReadLink, context: Context) -> Target:
    inode = await find(context, request.place, follow=False)
    if not isinstance(inode.body, SymlinkDetails):
        raise file_error(errno.EINVAL, "not a symbolic link")
    return Target(inode.body.target)


async def check_access(request: Access, context: Context) -> Done:
    inode = await find(context, request.place, follow=request.follow)
    require(context.requester, inode, request.mask)
    return Done()
