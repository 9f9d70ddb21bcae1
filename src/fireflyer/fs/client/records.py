"""Batches of reads as arrays, in one call of the ring and straight into the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

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
    memory = memory_of(into, writable=True)
    wanted = np.ascontiguousarray(offsets, dtype=np.int64).reshape(-1)
    count = len(wanted)
    if not count:
        return np.zeros(0, dtype=np.int64)
    size, rest = divmod(memory.nbytes, count)
    if rest:
        raise UsageError(f"{memory.nbytes} bytes for {count} records: not the same for each")
    plan = await _plan(file, wanted, np.full(count, size), np.arange(count) * size)
    await _carry_out(engine, plan.reads, memory, file, into)
    for row in plan.odd:
        await file.body.read(memory[row * size : (row + 1) * size], int(wanted[row]), None)
    return plan.counts


async def read_together(engine: Engine, wanted: Sequence[tuple[File, int, Any]]) -> list[int]:
    """Of each (file, offset, buffer) how many bytes there were."""
    if not wanted:
        return []
    views = [memory_of(buffer, writable=True) for _, _, buffer in wanted]
    sizes = np.array([view.nbytes for view in views])
    offsets = np.array([offset for _, offset, _ in wanted], dtype=np.int64)
    lowest, memory, places = _spanning(views)
    of_file: dict[File, list[int]] = {}
    for at, (file, _, _) in enumerate(wanted):
        of_file.setdefault(file, []).append(at)
    counts, reads = np.zeros(len(wanted), dtype=np.int64), []
    for file, some in of_file.items():
        plan = await _plan(file, offsets[some], sizes[some], places[some] - lowest)
        counts[some] = plan.counts
        reads.append(plan.reads)
        for row in plan.odd:
            at = some[row]
            await file.body.read(views[at], int(offsets[at]), None)
    await _carry_out(engine, np.concatenate(reads), memory, wanted[0][0], (wanted, views))
    return [int(one) for one in counts]


class _Plan(NamedTuple):
    reads: Reads
    counts: _Counts
    """Of each record the bytes that there are."""
    odd: list[int]
    """Records that are in several chunks, or not all at the storage nodes."""


async def _plan(file: File, offsets: _Counts, sizes: _Counts, places: _Counts) -> _Plan:
    """Of one file. `places`: where in the memory."""
    file.check_readable()
    if int(offsets.min()) < 0:
        raise UsageError(f"offset {int(offsets.min())} is negative")
    body, where = file.body, file.body.where
    await body.refresh(int((offsets + sizes).max()))
    counts = np.clip(body.length - offsets, 0, sizes)
    chunks, within = np.divmod(offsets, where.chunk_bytes)
    whole = (within + counts <= where.chunk_bytes) & (counts > 0)
    for extent in body.pending.extents:
        whole &= (offsets >= extent.end) | (offsets + counts <= extent.begin)
    odd = np.flatnonzero(~whole & (counts > 0)).tolist()
    lengths = counts
    if not whole.all():
        chunks, within, places, lengths = chunks[whole], within[whole], places[whole], counts[whole]
    reads = np.zeros(len(chunks), READ)
    reads["file"], reads["index"], reads["offset"] = file.inode_id, chunks, within
    reads["length"], reads["at"] = lengths, places
    reads["chain"] = np.array(where.order, dtype=np.uint32)[chunks % len(where.order)]
    return _Plan(reads, counts, odd)


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


def _spanning(views: Sequence[memoryview]) -> tuple[int, Any, _Counts]:
    """The lowest address, memory from there on that holds all of them, and where each is."""
    begins = np.array([_address(one) for one in views], dtype=np.int64)
    ends = begins + np.array([one.nbytes for one in views])
    real = ends > begins
    if not real.any():
        return 0, np.zeros(0, dtype=np.uint8), begins
    lowest, highest = int(begins[real].min()), int(ends[real].max())
    return lowest, np.asarray(_Span(lowest, highest - lowest)), begins


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]) if view.nbytes else 0
