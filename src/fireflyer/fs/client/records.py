"""Batches of reads as arrays, in one call of the ring and straight into the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.fs.client.engine import Engine
from fireflyer.fs.client.memory import memory_of
from fireflyer.fs.client.opened import File, as_file_error, zero_behind
from fireflyer.fs.client.spread import READ, Reads

__all__ = ["read_rows", "read_together"]

_TOGETHER: Final = 16384
"""Reads of one call of the ring."""
_Counts = np.ndarray[Any, np.dtype[np.int64]]


async def read_rows(engine: Engine, file: File, offsets: Any, into: Any) -> _Counts:
    """Row i of `into` becomes what is at `offsets[i]` of the file; how many bytes of each there were."""
    memory, where = memory_of(into, writable=True), file.body.where
    wanted = np.ascontiguousarray(offsets, dtype=np.int64).reshape(-1)
    count = len(wanted)
    if not count:
        return np.zeros(0, dtype=np.int64)
    size, rest = divmod(memory.nbytes, count)
    if rest or int(wanted.min()) < 0:
        raise UsageError(
            f"{memory.nbytes} bytes for {count} records at {int(wanted.min())} and up: not the same for each"
        )
    file.check_readable()
    await file.body.refresh(int(wanted.max()) + size)
    lengths = np.clip(file.body.length - wanted, 0, size)
    chunks, within = np.divmod(wanted, where.chunk_bytes)
    whole = (within + lengths <= where.chunk_bytes) & (lengths > 0)
    if file.body.pending:
        whole &= ~_pending(file, wanted, size)
    which = np.flatnonzero(whole)
    reads = np.zeros(len(which), READ)
    reads["file"], reads["index"], reads["offset"] = file.inode_id, chunks[which], within[which]
    reads["length"], reads["at"] = lengths[which], which * size
    reads["chain"] = np.array(where.order, dtype=np.uint32)[chunks[which] % len(where.order)]
    await _carry_out(engine, reads, memory, file, into)
    for row in np.flatnonzero(~whole & (lengths > 0)).tolist():
        await file.body.read(memory[row * size : (row + 1) * size], int(wanted[row]), None)
    return lengths


def _pending(file: File, offsets: Any, size: int) -> Any:
    """Which of them meet bytes that the storage nodes do not have yet."""
    met = np.zeros(len(offsets), dtype=np.bool_)
    for extent in file.body.pending.extents:
        met |= (offsets < extent.end) & (offsets + size > extent.begin)
    return met


async def read_together(engine: Engine, wanted: Sequence[tuple[File, int, Any]]) -> list[int]:
    """Of each (file, offset, buffer) how many bytes there were."""
    views = [memory_of(buffer, writable=True) for _, _, buffer in wanted]
    if not views:
        return []
    lowest, memory, places = _spanning(views)
    rows: list[tuple[int, int, int, int, int, int]] = []
    counts = []
    for (file, offset, _), view, place in zip(wanted, views, places, strict=True):
        if offset < 0:
            raise UsageError(f"offset {offset} is negative")
        file.check_readable()
        body = file.body
        await body.refresh(offset + view.nbytes)
        size = max(0, min(view.nbytes, body.length - offset))
        counts.append(size)
        if body.pending and body.pending.overlaps(offset, size):
            await body.read(view[:size], offset, None)
            continue
        at = place - lowest
        rows += [
            (body.id, one.chunk, one.offset, one.size, at + one.at, one.chain) for one in body.where.parts(offset, size)
        ]
    reads = np.zeros(len(rows), READ)
    if rows:
        columns = np.array(rows, dtype=np.int64).T
        for name, column in zip(("file", "index", "offset", "length", "at", "chain"), columns, strict=True):
            reads[name] = column
        await _carry_out(engine, reads, memory, wanted[0][0], (wanted, views))
    return counts


async def _carry_out(engine: Engine, reads: Reads, memory: Any, file: File, keep: Any) -> None:
    """`keep`: what must not be freed while the ring may write there."""
    view = memory if isinstance(memory, memoryview) else memoryview(memory)
    for first in range(0, len(reads), _TOGETHER):
        some = reads[first : first + _TOGETHER]
        try:
            ticket = engine.read_records(some, view)
            ticket.then(lambda: _kept(keep))
            counts = await ticket
        except FireflyerError as error:
            raise as_file_error(error, file.path) from error
        short = counts != some["length"]
        for row in np.flatnonzero(short).tolist() if short.any() else ():
            begin, length = int(some[row]["at"]), int(some[row]["length"])
            zero_behind(view[begin : begin + length], int(counts[row]))


def _kept(_: Any) -> None:
    pass


class _Span:
    """All addresses from the first byte of some buffers to the last of them; only the buffers may be touched."""

    def __init__(self, first: int, size: int) -> None:
        self.__array_interface__ = {"data": (first, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _spanning(views: Sequence[memoryview]) -> tuple[int, Any, list[int]]:
    """The lowest address, memory from there on that holds all of them, and where each is."""
    places = [np.frombuffer(one, dtype=np.uint8).__array_interface__["data"][0] if one.nbytes else 0 for one in views]
    real = [(place, place + one.nbytes) for place, one in zip(places, views, strict=True) if one.nbytes]
    if not real:
        return 0, np.zeros(0, dtype=np.uint8), places
    lowest, highest = min(begin for begin, _ in real), max(end for _, end in real)
    return lowest, np.asarray(_Span(lowest, highest - lowest)), places
