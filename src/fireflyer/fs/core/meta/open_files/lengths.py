"""How long files are: the writer half of `Open`, and what writers tell until they close.

A *writer row* says that a client has the file open for writing, so that chunks may lie behind the length that is known.
`Report` and `Close` let the length grow. A number that was found under the present `cut` is believed. After a
truncation it may count bytes that are gone, so under another `cut` the chains are asked, and the length becomes what is
there: never what was cut off, never less than what was written since. (`cut` grows when a truncation begins, and again
when its chunks are gone: a length that was found meanwhile is not believed either.)

A *lazy* close tells nothing, because its client has told everything before. It takes one handle out of the row, and may
come late: what the client has opened or truncated since is left alone.

While a truncation has not finished (`cutting`), nobody extends the file: whoever would raises `NotAtOnce`, and finishes
it first.

*Over the quota* a report is refused with EDQUOT, and the file stays as long as it was. What lies behind its end is cut
off when the last writer has closed; until then others may have written there what they are still to report.

Users with tokens are believed too, for a while: their files are noted (`write_grants`), and measured some time later.
"""

from __future__ import annotations

import errno
from typing import Final, NamedTuple

import msgspec

from fireflyer.fs.core.meta import quota_trees
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.attributes import set_attributes, without_privileges
from fireflyer.fs.core.meta.inodes.layout import max_bytes
from fireflyer.fs.core.meta.inodes.path_walk import find
from fireflyer.fs.core.meta.inodes.times import believed, times_of_write
from fireflyer.fs.core.meta.open_files.write_grants import put_grant
from fireflyer.fs.core.meta.open_rows import (
    CUT_ROWS,
    CUTS,
    WRITER_ROWS,
    TruncationKind,
    TruncationRow,
    WriterRow,
    truncation_of,
    writers_of,
)
from fireflyer.fs.core.meta.ports import NotAtOnce
from fireflyer.fs.core.meta.tables import WRITERS, number_key, pair_key
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import FileDetails, Inode, InodeId
from fireflyer.fs.schema.meta import Close, ErrorReply, Found, Open, OpenFlag, Report, Reserve, Reserved, SetAttributes

__all__ = ["MAX_HANDLES", "ChunkEnd", "close", "drop_writer", "file_of", "grown", "opened", "report"]
__all__ += [
    "found_excess",
    "reserve",
    "set_attributes_of_written",
    "start_truncation",
    "truncate_excess",
    "unprivileged",
    "writer_of",
    "writer_row",
]

MAX_HANDLES: Final = 65536
"""Of one file, open for writing at one client."""


class ChunkEnd(NamedTuple):
    """What the chains have, and the `cut` that the file had all the while."""

    cut: int
    end: int


def file_of(inode: Inode | None) -> tuple[Inode, FileDetails]:
    """Raises ESTALE where it is gone, EINVAL where it is no file."""
    if inode is None:
        raise file_error(errno.ESTALE)
    if not isinstance(inode.body, FileDetails):
        raise file_error(errno.EINVAL, "not a regular file")
    return inode, inode.body


async def writer_of(context: Context, inode: InodeId, handle: int) -> WriterRow:
    """The row of this client. Raises EBADF where the handle is not open."""
    row = await writer_row(context, inode, context.requester.client)
    if row is None or handle not in row.handles:
        raise file_error(errno.EBADF, f"handle {handle} of inode {inode} is not open for writing")
    return row


async def opened(request: Open, context: Context, inode: Inode, *, created: bool) -> Inode:
    """What an `Open` of a file that writes or truncates does besides finding it; the inode to be answered. Raises
    `NotAtOnce` before it writes anything."""
    inode, body = file_of(inode)
    if inode.links == 0 and body.cutting is not None and await truncation_of(context, inode.id) is None:
        raise file_error(errno.ESTALE, "the file was removed")  # it is being collected
    writers = [] if created else await writers_of(context, inode.id)
    truncates = bool(request.flags & OpenFlag.TRUNCATE) and not created
    cuts = truncates and (body.length > 0 or bool(writers))
    if body.cutting is not None:
        raise NotAtOnce(inode.id, "a truncation has not finished")
    if cuts and (not context.owner or await truncation_of(context, inode.id) is not None):
        raise NotAtOnce(inode.id, "chunks must be removed first")
    if request.flags & OpenFlag.WRITE:
        _add_handle(context, inode.id, request.handle, dict(writers).get(context.requester.client))
        _noted_writer(context, inode.id, body)
    if cuts:
        row = TruncationRow(
            TruncationKind.TRUNCATE, 0, 0, 0, context.owner, context.requester.client, context.number,
            opens=request.flags,
        )  # fmt: skip
        return start_truncation(context, unprivileged(context, inode), row)
    if truncates:
        inode = _written(context, inode)
        context.put(inode)
    return inode


def start_truncation(context: Context, inode: Inode, row: TruncationRow) -> Inode:
    """Writes down what is to be done with the chunks; nothing of it is seen before it is through."""
    inode, body = file_of(inode)
    if row.kind is TruncationKind.TRUNCATE:
        inode = msgspec.structs.replace(
            inode, body=msgspec.structs.replace(body, cut=body.cut + 1, cutting=row.start)
        )  # fmt: skip
        context.put(inode)
    context.rows.set(number_key(CUTS, inode.id), CUT_ROWS.encode(row))
    return inode


async def report(request: Report, context: Context, measured: ChunkEnd | None = None) -> Found | ErrorReply:
    inode, row = await _reported(request, context, measured)
    inode, refused = await grown(context, inode, _end_of(request, inode, measured))
    if refused is not None:
        _put_row(context, inode.id, context.requester.client, msgspec.structs.replace(row, excess=True))
        return refused
    return Found(_noted(context, inode, request))


async def set_attributes_of_written(
    request: SetAttributes, context: Context, measured: ChunkEnd | None = None
) -> Found | ErrorReply:
    """And before that its report. Raises `FileError`: then neither is done."""
    told = request.report
    if told is not None:
        inode = await find(context, request.place, follow=request.follow)
        if inode.id != told.inode:
            raise file_error(errno.EINVAL, f"the report is for inode {told.inode}, not {inode.id}")
        answer = await report(told, context, measured)
        if isinstance(answer, ErrorReply):
            return answer
    return await set_attributes(request, context)


async def close(request: Close, context: Context, measured: ChunkEnd | None = None) -> Found | ErrorReply:
    refused: ErrorReply | None = None
    if request.lazy:
        inode, _ = file_of(await context.inode(request.inode))
        row = await writer_of(context, inode.id, request.handle)
    else:
        inode, row = await _reported(request, context, measured)
        inode, refused = await grown(context, inode, _end_of(request, inode, measured))
        if refused is None:
            inode = _noted(context, inode, request)
    handles = tuple(one for one in row.handles if one != request.handle)
    row = WriterRow(handles, row.excess or refused is not None)
    _noted_writer(context, inode.id, file_of(inode)[1])
    if handles:
        _put_row(context, inode.id, context.requester.client, row)
    else:
        inode = await drop_writer(context, inode, context.requester.client, excess=row.excess)
    return refused or Found(inode)


async def drop_writer(context: Context, inode: Inode, client: ClientId, *, excess: bool) -> Inode:
    """The client does not write the file any more. With the last one goes what was written over the quota."""
    if excess:
        _put_row(context, inode.id, client, WriterRow((), excess=True))
    else:
        context.rows.clear(pair_key(WRITERS, inode.id, client))
    return await truncate_excess(context, inode)


async def truncate_excess(context: Context, inode: Inode) -> Inode:
    """Where nobody writes the file any more: begins to cut off what was written over the quota. While another cut is
    under way that is still to be done, and the rows that say so stay until its end."""
    rows = await writers_of(context, inode.id)
    excess = any(row.excess for _, row in rows)
    if any(row.handles for _, row in rows) or (excess and await truncation_of(context, inode.id) is not None):
        return inode
    for one, _ in rows:
        context.rows.clear(pair_key(WRITERS, inode.id, one))
    inode, body = file_of(inode)
    if excess and inode.links and body.cutting is None:
        return start_truncation(context, inode, TruncationRow(TruncationKind.TRUNCATE, body.length, 0, 0, 0, 0, 0))
    return inode


async def found_excess(context: Context, inode: Inode) -> None:
    """Something lies behind the end that is over the quota: it is cut off when nobody writes the file."""
    rows = await writers_of(context, inode.id)
    if rows:
        client, row = rows[0]
        _put_row(context, inode.id, client, msgspec.structs.replace(row, excess=True))
        await truncate_excess(context, inode)
    elif inode.links:
        start_truncation(
            context, inode, TruncationRow(TruncationKind.TRUNCATE, file_of(inode)[1].length, 0, 0, 0, 0, 0)
        )


async def reserve(request: Reserve, context: Context) -> Reserved:
    """Raises EFBIG, EDQUOT."""
    inode, body = file_of(await context.inode(request.inode))
    await writer_of(context, inode.id, request.handle)
    if body.cutting is not None:
        raise NotAtOnce(inode.id, "a truncation has not finished")
    end = body.length + request.size
    if end > max_bytes(body.layout):
        raise file_error(errno.EFBIG)
    inode, refused = await grown(context, inode, end)
    if refused is not None:
        raise file_error(refused.errno, refused.message)
    inode = _written(context, inode, request.written_ns)
    context.put(inode)
    return Reserved(body.length, inode)


async def grown(context: Context, inode: Inode, end: int) -> tuple[Inode, ErrorReply | None]:
    """The inode with at least this length, charged but not put; or as it was, with EDQUOT as the answer."""
    inode, body = file_of(inode)
    if end <= body.length:
        return inode, None
    try:
        await quota_trees.charge(context, inode.quota_tree, end - body.length, 0)
    except FileError as error:
        if error.errno != errno.EDQUOT:
            raise
        return inode, ErrorReply(errno.EDQUOT, error.message)
    return msgspec.structs.replace(inode, body=msgspec.structs.replace(body, length=end)), None


async def _reported(request: Report | Close, context: Context, measured: ChunkEnd | None) -> tuple[Inode, WriterRow]:
    """Raises `NotAtOnce` where the chains have to be asked, or asked again."""
    inode, body = file_of(await context.inode(request.inode))
    row = await writer_of(context, inode.id, request.handle)
    if body.cutting is not None:
        raise NotAtOnce(inode.id, "a truncation has not finished")
    if request.cut != body.cut and (measured is None or measured.cut != body.cut):
        raise NotAtOnce(inode.id, "it was truncated since, so its length must be read from its chunks")
    if request.cut == body.cut and request.end > max_bytes(body.layout):
        raise file_error(errno.EFBIG)
    return inode, row


def _end_of(request: Report | Close, inode: Inode, measured: ChunkEnd | None) -> int:
    _, body = file_of(inode)
    if request.cut == body.cut:
        return request.end
    return measured.end if measured is not None else 0


def _noted(context: Context, inode: Inode, request: Report | Close) -> Inode:
    """Puts what has changed."""
    if request.wrote:
        inode = _written(context, inode, request.written_ns)
    context.put(inode)
    return inode


def _written(context: Context, inode: Inode, written_ns: int = 0) -> Inode:
    inode = unprivileged(context, inode)
    mtime_ns = ctime_ns = context.now_ns
    if written_ns:
        mtime_ns, ctime_ns = times_of_write(inode, believed(written_ns, context.now_ns))
    return msgspec.structs.replace(inode, mtime_ns=mtime_ns, ctime_ns=ctime_ns)


def unprivileged(context: Context, inode: Inode) -> Inode:
    """What a write leaves of the mode."""
    if context.requester.unrestricted:
        return inode
    return msgspec.structs.replace(inode, mode=without_privileges(inode))


def _add_handle(context: Context, inode: InodeId, handle: int, row: WriterRow | None) -> None:
    handles = row.handles if row is not None else ()
    if handle == 0 or handle in handles:
        raise file_error(errno.EINVAL, f"handle {handle} of inode {inode} is 0, or open already")
    if len(handles) == MAX_HANDLES:
        raise file_error(
            errno.EMFILE,
            f"inode {inode} is open {MAX_HANDLES} times for writing at this client, the maximum; close some of them",
        )
    excess = row is not None and row.excess
    _put_row(context, inode, context.requester.client, WriterRow(tuple(sorted((*handles, handle))), excess))


def _noted_writer(context: Context, inode: InodeId, body: FileDetails) -> None:
    if context.requester.by_path:
        put_grant(context, inode, body.layout)


async def writer_row(context: Context, inode: InodeId, client: ClientId) -> WriterRow | None:
    """None: this client does not write the file."""
    key = pair_key(WRITERS, inode, client)
    value = await context.rows.get(key)
    return None if value is None else WRITER_ROWS.decode(key, value)


def _put_row(context: Context, inode: InodeId, client: ClientId, row: WriterRow) -> None:
    context.rows.set(pair_key(WRITERS, inode, client), WRITER_ROWS.encode(row))
