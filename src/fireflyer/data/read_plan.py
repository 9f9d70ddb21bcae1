"""Which reads bring a batch of records into one buffer: neighbours in a shard come with one read. Pure.

Records are put into the order of (shard, offset). A *run* is a stretch of one shard that holds records of which each
begins where the one before it ends, but for the gap of alignment; it is read at once, and is cut where it would cross a
multiple of `RUN_BYTES`, so that its parts can be under way together. A record that is asked for twice is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.data.shard_format import ALIGNMENT_BYTES

__all__ = ["RUN_BYTES", "ReadPlan", "plan_reads", "split_by_bytes"]

RUN_BYTES: Final = 1 << 20
_Integers = NDArray[np.int64]


class ReadPlan(NamedTuple):
    """Run i reads `lengths[i]` bytes from `offsets[i]` of shard `shards[i]` to `places[i]` of a buffer of
    `buffer_bytes`; record j of the batch is then at `records[j]` of the buffer."""

    shards: _Integers
    offsets: _Integers
    lengths: _Integers
    places: _Integers
    records: _Integers
    buffer_bytes: int


def plan_reads(shards: _Integers, offsets: _Integers, lengths: _Integers) -> ReadPlan:
    """For records `[n]`, each of `lengths[j]` bytes at `offsets[j]` (a multiple of 8) of shard `shards[j]`."""
    empty = np.empty(0, np.int64)
    if not len(shards):
        return ReadPlan(empty, empty, empty, empty, empty, 0)
    order = np.lexsort((lengths, offsets, shards))
    shard, begin = shards[order], offsets[order]
    end = begin + lengths[order]
    # Records do not overlap, so the end of the one before is the furthest so far.
    first = np.ones(len(order), np.bool_)
    first[1:] = (
        (shard[1:] != shard[:-1])
        | (begin[1:] >= end[:-1] + ALIGNMENT_BYTES)
        | (begin[1:] // RUN_BYTES != begin[:-1] // RUN_BYTES)
    )
    heads = np.flatnonzero(first)
    run = np.cumsum(first) - 1
    run_begin = begin[heads]
    run_bytes = np.maximum.reduceat(end, heads) - run_begin
    room = -(-run_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    places = np.concatenate((np.zeros(1, np.int64), np.cumsum(room)[:-1]))
    records = np.empty(len(order), np.int64)
    records[order] = places[run] + begin - run_begin[run]
    wanted = run_bytes > 0
    return ReadPlan(
        shard[heads][wanted], run_begin[wanted], run_bytes[wanted], places[wanted], records, int(room.sum())
    )


def split_by_bytes(lengths: _Integers, max_bytes: int, max_records: int) -> Iterator[tuple[int, int]]:
    """`[first, end)` of successive records with at most `max_bytes` and `max_records` together, but one at least."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        end = int(np.searchsorted(ends, before + max_bytes, side="right"))
        end = min(max(end, first + 1), first + max_records)
        yield first, end
        first = end
