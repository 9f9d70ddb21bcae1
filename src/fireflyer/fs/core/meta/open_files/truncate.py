"""Truncation, holes and ranges of zeros: what changes chunks for a file.

    carry_out ──nothing to cut──> done in one transaction
        └── NotAtOnce ──> begin: TruncationRow with its owner ──> chunks ──> end: length, answer; row cleared

*Between begin and end* the file is as long as before, and nobody extends it, or old bytes would come back. What is read
behind the cut may be zeros already; the truncation happens at its end.

*Who changes the chunks* is the service whose session the row names as owner, one task of it at a time (`Ports.claim`).
Its removals may come late, after a connection broke: so nobody else may end the cut while that session lives, or a
removal would hit what is written afterwards. When the session is over, and has been for `settle_ns`, whoever meets the
cut takes it over. It changes all chunks again, which is harmless before the end. The owner may live and
have another session by then: its updates are for the session of the row alone, so it drops out with `StaleVersion`.

*No update is left under way at the end.* One that was given up may be done later, and the one after it too; that the
chunk is not there, or is short, says nothing. So each update is a *doubt* from before it is sent until it was answered,
and who goes on with the cut in the same process does what is in doubt again before all else.

*Again is once*: the end keeps the answer for the client that asked, whoever ends it. A repeated request then finds its
answer and does not cut what was written since.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from fireflyer.fs.core.meta import quota_trees, replies
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.layout import MAX_CHUNKS, chain_of, max_bytes, order_of, pieces
from fireflyer.fs.core.meta.inodes.permissions import granted
from fireflyer.fs.core.meta.open_files.lengths import (
    ChunkEnd,
    file_of,
    grown,
    start_truncation,
    truncate_excess,
    unprivileged,
    writer_of,
)
from fireflyer.fs.core.meta.open_rows import (
    CUT_ROWS,
    CUTS,
    TruncationKind,
    TruncationRow,
    is_being_collected,
    lives,
    truncation_of,
    writers_of,
)
from fireflyer.fs.core.meta.ports import NotAtOnce, Ports
from fireflyer.fs.core.meta.tables import number_key
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.ids import ChainId, ClientId
from fireflyer.fs.schema.inodes import FileDetails, Inode, InodeId, Kind
from fireflyer.fs.schema.meta import Allocate, AllocateMode, Answer, ErrorReply, Found, Truncate

__all__ = ["CUT_PAUSE_NS", "REMOVED_AT_ONCE", "allocate", "forget_in_doubt", "go_on", "measure", "remove_all"]
__all__ += ["truncate"]

REMOVED_AT_ONCE: Final = 256
"""Chunks in one call of the chunk port."""
_Change: TypeAlias = int | tuple[int, int] | None
"""Of a chunk: to this length; zeros at this offset, so many; it is removed."""
CUT_PAUSE_NS: Final = 50_000_000
"""Until a cut of another service is looked at again."""


# --- bodies ---


async def truncate(request: Truncate, context: Context, inode: Inode) -> Found:
    """`inode`: what the request's place is. With handle 0 the right to write has been checked."""
    if inode.kind is Kind.DIRECTORY:
        raise file_error(errno.EISDIR)
    inode, body = file_of(inode)
    if request.handle:
        await writer_of(context, inode.id, request.handle)
    if request.length > max_bytes(body.layout):
        raise file_error(errno.EFBIG)
    await _undisturbed(context, inode)
    writers = await writers_of(context, inode.id)
    grows = request.length > body.length
    if (grows and all(one == context.requester.client for one, _ in writers)) or (
        not writers and request.length == body.length
    ):
        return Found(await _extended(context, inode, request.length))
    if not context.owner:
        raise NotAtOnce(inode.id, "chunks must be removed first")
    if grows:
        await _allowed(context, inode, request.length - body.length)
    row = _row(context, TruncationKind.TRUNCATE, request.length, request.length)
    return Found(start_truncation(context, unprivileged(context, inode), row))


async def allocate(request: Allocate, context: Context) -> Found:
    """Raises EFBIG, EDQUOT, EBADF."""
    inode, body = file_of(await context.inode(request.inode))
    await writer_of(context, inode.id, request.handle)
    end = request.offset + request.size
    if end > max_bytes(body.layout):
        raise file_error(errno.EFBIG)
    await _undisturbed(context, inode)
    if request.mode is AllocateMode.KEEP_SIZE:
        inode = _stamped(unprivileged(context, inode), context.now_ns)
        context.put(inode)
        return Found(inode)
    if request.mode is AllocateMode.DEFAULT:
        return Found(await _extended(context, inode, max(end, body.length)))
    if not context.owner:
        raise NotAtOnce(inode.id, "chunks must be removed first")
    least = end if request.mode is AllocateMode.ZERO_RANGE else 0
    if least > body.length:
        await _allowed(context, inode, least - body.length)
    row = _row(context, TruncationKind.ZERO, request.offset, end, least)
    inode = unprivileged(context, inode)
    context.put(inode)
    return Found(start_truncation(context, inode, row))


async def _undisturbed(context: Context, inode: Inode) -> None:
    if await truncation_of(context, inode.id) is not None:
        raise NotAtOnce(inode.id, "another truncation has not finished")
    if file_of(inode)[1].cutting is not None:
        raise file_error(errno.ESTALE, "the file was removed")  # it is being collected


async def _allowed(context: Context, inode: Inode, bytes_more: int) -> None:
    """Raises EDQUOT. It is charged at the end."""
    await quota_trees.charge(context, inode.quota_tree, bytes_more, 0)
    await quota_trees.charge(context, inode.quota_tree, -bytes_more, 0)


async def _extended(context: Context, inode: Inode, length: int) -> Inode:
    inode, refused = await grown(context, inode, length)
    if refused is not None:
        raise file_error(refused.errno, refused.message)
    inode = _stamped(unprivileged(context, inode), context.now_ns)
    context.put(inode)
    return inode


def _stamped(inode: Inode, now_ns: int) -> Inode:
    return msgspec.structs.replace(inode, mtime_ns=now_ns, ctime_ns=now_ns)


def _row(context: Context, kind: TruncationKind, start: int, end: int, least_length: int = 0) -> TruncationRow:
    return TruncationRow(kind, start, end, least_length, context.owner, context.requester.client, context.number)


# --- work on chunks ---


async def measure(inode_id: InodeId, ports: Ports, *, patient: bool = True) -> ChunkEnd | None:
    """Where the last chunk of the file ends, and the `cut` that it had before. None where `go_on` gives up. Raises
    ESTALE where it is gone."""
    while True:
        if not await go_on(inode_id, ports, patient=patient):
            return None

        async def look(context: Context) -> FileDetails:
            inode, body = file_of(await context.inode(inode_id))
            if await is_being_collected(context, inode):
                raise file_error(errno.ESTALE, "the file was removed")
            return body

        body = await ports.transact(look)
        if body.cutting is None:
            layout = body.layout
            found = await ports.chunks.last(inode_id, order_of(layout, ports.chunks.chains(layout.table)))
            ends = [index * layout.chunk_bytes + length for index, length in filter(None, found)]
            return ChunkEnd(body.cut, min(max(ends, default=0), max_bytes(layout)))


async def go_on(inode_id: InodeId, ports: Ports, *, patient: bool = True, settled: ClientId = 0) -> bool:
    """Until no cut of the file is under way: True. Each that is met is finished, or waited for where it is another's
    who lives; False instead of waiting unless `patient`. `settled`: a session that has been over for long enough."""
    while True:

        async def look(context: Context) -> tuple[TruncationRow | None, bool]:
            row = await truncation_of(context, inode_id)
            return row, row is not None and row.owner != 0 and await lives(context.rows, row.owner)

        row, owner_lives = await ports.transact(look)
        if row is None:
            return True
        session = ports.session
        if row.owner == session and ports.claim(inode_id):
            try:
                await _carry_through(inode_id, row, ports)
            finally:
                ports.release(inode_id)
        elif row.owner != session and (row.owner == 0 or (not owner_lives and row.owner == settled)):
            await _take_over(inode_id, row, session, ports)
        elif not patient:
            return False
        elif row.owner == session or owner_lives:
            await ports.pause(CUT_PAUSE_NS, inode_id)
        else:
            await ports.pause(ports.settle_ns, 0)
            settled = row.owner


async def forget_in_doubt(inode_id: InodeId, ports: Ports) -> None:
    """Of a cut that another process has ended: when nothing of this one could arrive any more."""
    if not ports.claim(inode_id):
        return
    try:

        async def look(context: Context) -> bool:
            return await truncation_of(context, inode_id) is not None

        if not await ports.transact(look):
            ports.in_doubt(inode_id).clear()
    finally:
        ports.release(inode_id)


async def _take_over(inode_id: InodeId, row: TruncationRow, session: ClientId, ports: Ports) -> None:
    async def body(context: Context) -> None:
        if await truncation_of(context, inode_id) == row:
            mine = msgspec.structs.replace(row, owner=session)
            context.rows.set(number_key(CUTS, inode_id), CUT_ROWS.encode(mine))

    await ports.transact(body)


async def _carry_through(inode_id: InodeId, row: TruncationRow, ports: Ports) -> None:
    """Looks at the row again: between the last look and the claim another task may have ended this cut."""

    async def look(context: Context) -> FileDetails | None:
        if await truncation_of(context, inode_id) != row:
            return None
        return file_of(await context.inode(inode_id))[1]

    body = await ports.transact(look)
    if body is None:
        return
    order = order_of(body.layout, ports.chunks.chains(body.layout.table))
    await _resolve(inode_id, row, ports)
    if row.kind is TruncationKind.TRUNCATE:
        await _cut_off(inode_id, body, order, row, ports)
    else:
        await _make_hole(inode_id, body, order, row, ports)

    async def end(context: Context) -> None:
        await _end(context, inode_id, row)

    await ports.transact(end)


async def _resolve(inode_id: InodeId, row: TruncationRow, ports: Ports) -> None:
    """Doubts of another cut count no more: it was ended by who took it over, when nothing of it could arrive."""
    in_doubt = ports.in_doubt(inode_id)
    for (of, chain, index), change in list(in_doubt.items()):
        if of == row:
            await _change(inode_id, row, [(chain, index)], change, ports)
        else:
            del in_doubt[of, chain, index]


async def _change(
    inode_id: InodeId, row: TruncationRow, chunks: Sequence[tuple[ChainId, int]], change: _Change, ports: Ports
) -> None:  # fmt: skip
    in_doubt = ports.in_doubt(inode_id)
    keys = [(row, chain, index) for chain, index in chunks]
    in_doubt.update(dict.fromkeys(keys, change))
    if change is None:
        await ports.chunks.remove(inode_id, chunks, session=row.owner)
    else:
        for chain, index in chunks:
            if isinstance(change, int):
                await ports.chunks.truncate(inode_id, chain, index, change, session=row.owner)
            else:
                await ports.chunks.write_zeros(inode_id, chain, index, *change, session=row.owner)
    for key in keys:
        in_doubt.pop(key, None)


async def _cut_off(
    inode_id: InodeId, body: FileDetails, order: Sequence[ChainId], row: TruncationRow, ports: Ports
) -> None:
    index, within = divmod(row.start, body.layout.chunk_bytes)
    if within:
        await _shorten(inode_id, row, (chain_of(order, index), index), within, ports)
    first = index + (within > 0)
    while (found := await _few(inode_id, order, first, ports)) is None or found:
        if found is None:
            found = await _some(inode_id, order, first, MAX_CHUNKS, ports)
        await _change(inode_id, row, found, None, ports)


async def _few(
    inode_id: InodeId, order: Sequence[ChainId], first: int, ports: Ports
) -> Sequence[tuple[ChainId, int]] | None:  # fmt: skip
    """Where chunks of the file from `first` on can be, by one question to all chains at once; None: in more than
    `REMOVED_AT_ONCE` places."""
    last = await ports.chunks.last(inode_id, order)
    ends = [0 if one is None else one[0] + 1 for one in last]
    if max(ends) - first > REMOVED_AT_ONCE:
        return None
    return [(chain_of(order, index), index) for index in range(first, max(ends)) if index < ends[index % len(order)]]


async def _some(
    inode_id: InodeId, order: Sequence[ChainId], first: int, end: int, ports: Ports
) -> Sequence[tuple[ChainId, int]]:  # fmt: skip
    """Chunks [first, end) of the file that are there, at most `REMOVED_AT_ONCE`."""
    found: list[tuple[ChainId, int]] = []
    for chain in order:
        listed = await ports.chunks.list(chain, inode_id, first, REMOVED_AT_ONCE - len(found))
        found += [(chain, index) for index, _ in listed if index < end]
        if len(found) >= REMOVED_AT_ONCE:
            break
    return found


async def remove_all(inode_id: InodeId, order: Sequence[ChainId], ports: Ports) -> None:
    """Of a file that nobody writes any more, nor will: so it does not matter when it is done, or by which session."""
    few = await _few(inode_id, order, 0, ports)
    if few is not None:
        if few:
            await ports.chunks.remove(inode_id, few, session=0)
        return
    while found := await _some(inode_id, order, 0, MAX_CHUNKS, ports):
        await ports.chunks.remove(inode_id, found, session=0)


async def _shorten(
    inode_id: InodeId, row: TruncationRow, chunk: tuple[ChainId, int], length: int, ports: Ports
) -> None:
    chain, index = chunk
    listed = await ports.chunks.list(chain, inode_id, index, 1)
    if listed and listed[0][0] == index and listed[0][1] > length:
        await _change(inode_id, row, [chunk], length, ports)


async def _make_hole(
    inode_id: InodeId, body: FileDetails, order: Sequence[ChainId], row: TruncationRow, ports: Ports
) -> None:  # fmt: skip
    """Bytes of a chunk that has no more of them are zeros already: it must not become longer by this."""
    chunk_bytes = body.layout.chunk_bytes
    first, end = -(-row.start // chunk_bytes), row.end // chunk_bytes
    while first < end and (found := await _some(inode_id, order, first, end, ports)):
        await _change(inode_id, row, found, None, ports)
    edges = [*pieces(body.layout, row.start, min(row.end, first * chunk_bytes) - row.start)]
    if end >= first:
        edges += pieces(body.layout, end * chunk_bytes, row.end - end * chunk_bytes)
    for piece in edges:
        chain = chain_of(order, piece.chunk)
        listed = await ports.chunks.list(chain, inode_id, piece.chunk, 1)
        if listed and listed[0][0] == piece.chunk and listed[0][1] > piece.offset:
            size = min(piece.size, listed[0][1] - piece.offset)
            await _change(inode_id, row, [(chain, piece.chunk)], (piece.offset, size), ports)


async def _end(context: Context, inode_id: InodeId, row: TruncationRow) -> None:
    """Nothing where another has ended it: its commit was not known."""
    if await truncation_of(context, inode_id) != row:
        return
    inode, body = file_of(await context.inode(inode_id))
    context.rows.clear(number_key(CUTS, inode_id))
    length = row.start if row.kind is TruncationKind.TRUNCATE else max(body.length, row.least_length)
    refused: ErrorReply | None = None
    if length > body.length:
        inode, refused = await grown(context, inode, length)
    elif length < body.length:
        await quota_trees.charge(context, inode.quota_tree, length - body.length, 0)
        inode = msgspec.structs.replace(inode, body=msgspec.structs.replace(body, length=length))
    if row.kind is TruncationKind.TRUNCATE:
        _, body = file_of(inode)
        inode = msgspec.structs.replace(inode, body=msgspec.structs.replace(body, cutting=None, cut=body.cut + 1))
    if row.client:
        inode = _stamped(inode, context.now_ns)
    context.put(inode)
    if row.client and row.number:
        answer: Answer = granted(inode, row.opens, context.now_ns) if row.opens else Found(inode)
        await replies.keep_late(context.rows, row.client, row.number, refused or answer)
    await truncate_excess(context, inode)
