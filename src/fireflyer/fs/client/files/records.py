"""Batches of reads as arrays, in one call of the ring and straight into the caller's memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.fs.client.files.engine import ThreadPort
from fireflyer.fs.client.files.open_file import File
from fireflyer.fs.client.files.open_inode import as_file_error, zero_behind
from fireflyer.fs.client.memory import memory_of
from fireflyer.fs.client.replica_selector import READ, Reads

__all__ = ["read_rows", "read_together"]

_TOGETHER: Final = 16384
"""Reads of one call of the ring."""
_Counts = np.ndarray[Any, np.dtype[np.int64]]


async def read_rows(engine: ThreadPort, file: File, offsets: Any, into: Any) -> _Counts:
    """Row i of `into` becomes what is at `offsets[i]` of the file; how many bytes of each there were."""
    memory = memory_of(into, writable=True)
    wanted = _places(offsets).reshape(-1)
    count = len(wanted)
    if not count:
        return np.zeros(0, dtype=np.int64)
    size, rest = divmod(memory.nbytes, count)
    shape = tuple(getattr(into, "shape", (memory.nbytes,)))
    if rest or (len(shape) > 1 and shape[0] != count):
        given = f"{shape[0]} rows" if len(shape) > 1 else f"{memory.nbytes} bytes"
        raise UsageError(f"{count} offsets and {given}; give as many rows as offsets")
    plan = await _plan([file], np.zeros(count, dtype=np.int64), wanted, np.full(count, size), np.arange(count) * size)
    await _carry_out(engine, plan.reads, memory, file, into)
    for row in plan.odd:
        await file.body.read(memory[row * size : (row + 1) * size], int(wanted[row]), None)
    return plan.counts


async def read_together(engine: ThreadPort, wanted: Sequence[tuple[File, int, Any]]) -> list[int]:
    """Of each (file, offset, buffer) how many bytes there were."""
    if not wanted:
        return []
    views = [memory_of(buffer, writable=True) for _, _, buffer in wanted]
    sizes = np.array([view.nbytes for view in views])
    offsets = _places([offset for _, offset, _ in wanted])
    lowest, memory, places = _spanning(views)
    number: dict[File, int] = {}
    of = np.array([number.setdefault(file, len(number)) for file, _, _ in wanted])
    plan = await _plan(list(number), of, offsets, sizes, places - lowest)
    await _carry_out(engine, plan.reads, memory, wanted[0][0], (wanted, views))
    for at in plan.odd:
        await wanted[at][0].body.read(views[at], int(offsets[at]), None)
    return [int(one) for one in plan.counts]


def _places(offsets: Any) -> _Counts:
    try:
        given = np.asarray(offsets)
        if given.size and given.dtype.kind not in "iuO":
            raise UsageError(f"offsets have dtype {given.dtype}; give integers")
        return np.ascontiguousarray(given, dtype=np.int64)
    except OverflowError as error:
        raise UsageError(f"an offset is above 2^63 - 1: {error}") from error


class _Plan(NamedTuple):
    reads: Reads
    counts: _Counts
    """Of each record the bytes that there are."""
    odd: list[int]
    """Records that are in several chunks, or not all at the storage nodes."""


async def _plan(files: Sequence[File], of: _Counts, offsets: _Counts, sizes: _Counts, places: _Counts) -> _Plan:
    """`of`: which of the files each record is of. `places`: where in the memory."""
    if int(offsets.min()) < 0:
        raise UsageError(f"offset {int(offsets.min())} is negative")
    await _refreshed(files, of, offsets + sizes)

    def each(values: Sequence[int]) -> Any:
        return values[0] if len(files) == 1 else np.array(values)[of]

    bodies = [file.body for file in files]
    chunk_bytes = each([body.where.chunk_bytes for body in bodies])
    counts = np.clip(each([body.length for body in bodies]) - offsets, 0, sizes)
    chunks, within = np.divmod(offsets, chunk_bytes)
    whole = (within + counts <= chunk_bytes) & (counts > 0)
    for at, body in enumerate(bodies):
        for extent in body.pending.extents:
            whole &= (of != at) | (offsets >= extent.end) | (offsets + counts <= extent.begin)
    odd = np.flatnonzero(~whole & (counts > 0)).tolist()
    orders = [body.where.order for body in bodies]
    firsts = list(itertools.accumulate(map(len, orders), initial=0))[:-1]
    chains = np.array([chain for order in orders for chain in order], dtype=np.uint32)
    reads = np.zeros(len(offsets), READ)
    reads["file"], reads["index"], reads["offset"] = each([body.id for body in bodies]), chunks, within
    reads["length"], reads["at"] = counts, places
    reads["chain"] = chains[each(firsts) + chunks % each([len(order) for order in orders])]
    return _Plan(reads if whole.all() else reads[whole], counts, odd)


async def _refreshed(files: Sequence[File], of: _Counts, ends: _Counts) -> None:
    """Who reads beyond an end asks whether it is still the end."""
    for file in files:
        file.check_readable()
    lengths = np.array([file.length for file in files])
    if (ends <= lengths[of]).all() and not any(file.body.needs_revalidation for file in files):
        return
    for at, file in enumerate(files):
        await file.body.refresh(int(ends[of == at].max()))


async def _carry_out(engine: ThreadPort, reads: Reads, memory: Any, file: File, keep: Any) -> None:
    """`keep`: what must not be freed while the ring may write there."""
    view = memory if isinstance(memory, memoryview) else memoryview(memory)
    for first in range(0, len(reads), _TOGETHER):
        some = reads[first : first + _TOGETHER]
        try:
            future = engine.read_records(some, view)
            future.then(lambda: _kept(keep))
            counts = await future
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
