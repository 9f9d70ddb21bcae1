"""Looks at all of a data set: how long its records are, and whether every byte is what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import DataCorruption, PermanentError, TransientError, UsageError
from fireflyer.data.read_plan import split_by_bytes
from fireflyer.data.recordset import RecordSet
from fireflyer.data.shard_format import ShardInfo
from fireflyer.data.shard_reader import SEQUENTIAL_BYTES, SEQUENTIAL_RECORDS

__all__ = ["LengthRange", "Lengths", "find_damage", "measure_lengths"]


class LengthRange(NamedTuple):
    """Records of `first` to `last` bytes."""

    first: int
    last: int
    records: int
    data_bytes: int


class Lengths(NamedTuple):
    smallest: int
    largest: int
    ranges: tuple[LengthRange, ...]
    """From 0, then from each power of two; those that hold records, and the ones between."""


def measure_lengths(records: RecordSet) -> Lengths | None:
    """None where there are no records. Reads the indexes alone. Raises `DataCorruption`, `NotFound`."""
    counts, sizes = np.zeros(64, np.int64), np.zeros(64, np.int64)
    smallest, largest = 1 << 62, 0
    for shard in range(len(records.shards)):
        lengths = records.lengths_of(shard)
        if not len(lengths):
            continue
        bins = np.frexp(lengths.astype(np.float64))[1]  # 0 for 0, n for [2**(n-1), 2**n)
        counts += np.bincount(bins, minlength=64)
        sizes += np.bincount(bins, weights=lengths, minlength=64).astype(np.int64)
        smallest, largest = min(smallest, int(lengths.min())), max(largest, int(lengths.max()))
    used = np.flatnonzero(counts)
    if not used.size:
        return None
    ranges = tuple(
        LengthRange(0 if at == 0 else 1 << (at - 1), 0 if at == 0 else (1 << at) - 1, int(counts[at]), int(sizes[at]))
        for at in range(int(used[0]), int(used[-1]) + 1)
    )
    return Lengths(smallest, largest, ranges)


def _nothing(_bytes: int, _records: int) -> None:
    pass


def find_damage(records: RecordSet, advanced: Callable[[int, int], None] = _nothing) -> Iterator[str]:
    """Reads everything and yields a line for each shard, and each record and name, that is missing or not what was
    written; goes on after each. Of a shard that the storage does not give, which may take minutes to say so, what is
    left is not tried. `advanced(bytes, records)` is told what was read. `records` must check always."""
    if records.verify != "always":
        raise UsageError(f"verify={records.verify!r}; open the data set with verify='always'")
    yield from _damaged_shards(_Part(records.shards, records.lengths_of, records.read_batch), advanced)
    if records.names:
        yield from _damaged_shards(_Part(records.names, records.lengths_of_names, records.read_names), _nothing)


class _Part(NamedTuple):
    """The records of a data set, or their names."""

    shards: Sequence[ShardInfo]
    lengths_of: Callable[[int], NDArray[np.int64]]
    read: Callable[[NDArray[np.int64]], Sequence[object]]


def _damaged_shards(part: _Part, advanced: Callable[[int, int], None]) -> Iterator[str]:
    first = 0
    for number, shard in enumerate(part.shards):
        try:
            lengths = part.lengths_of(number)
        except (DataCorruption, PermanentError, TransientError, UsageError) as error:
            yield str(error)
        else:
            yield from _damaged(part, shard, first, lengths, advanced)
        first += shard.records


def _damaged(
    part: _Part, shard: ShardInfo, first: int, lengths: NDArray[np.int64], advanced: Callable[[int, int], None]
) -> Iterator[str]:
    for begin, end in split_by_bytes(lengths, SEQUENTIAL_BYTES, SEQUENTIAL_RECORDS):
        try:
            yield from _damaged_records(part, first + begin, first + end)
        except (PermanentError, TransientError) as error:
            yield f"{error}; records {begin} to {shard.records - 1} of {shard.name} were not checked"
            return
        advanced(int(lengths[begin:end].sum()), end - begin)


def _damaged_records(part: _Part, first: int, end: int) -> Iterator[str]:
    """All at once, and where bytes are wrong by halves. Raises what the storage raises."""
    try:
        part.read(np.arange(first, end))
    except DataCorruption as error:
        if end - first == 1:
            yield str(error)
            return
        middle = (first + end) // 2
        yield from _damaged_records(part, first, middle)
        yield from _damaged_records(part, middle, end)
