"""Looks at all of a data set: how long its records are, and whether every byte is what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from fireflyer.base.errors import DataCorruption, NotFound, PermanentError, UsageError
from fireflyer.data.read_plan import split_by_bytes
from fireflyer.data.recordset import RecordSet
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
    """Reads everything and yields a line for each shard, and each record, that is missing or not what was written; goes
    on after each. `advanced(bytes, records)` is told what was read. `records` must check always."""
    if records.verify != "always":
        raise UsageError(f"verify={records.verify!r}; open the data set with verify='always'")
    first = 0
    for number, shard in enumerate(records.shards):
        try:
            lengths = records.lengths_of(number)
        except (DataCorruption, NotFound, PermanentError, UsageError) as error:
            yield str(error)
        else:
            for begin, end in split_by_bytes(lengths, SEQUENTIAL_BYTES, SEQUENTIAL_RECORDS):
                yield from _damaged(records, first + begin, first + end)
                advanced(int(lengths[begin:end].sum()), end - begin)
        first += shard.records
    if records.names:
        yield from _damaged_names(records)


def _damaged(records: RecordSet, first: int, end: int) -> Iterator[str]:
    """All at once, and where that fails one by one."""
    try:
        records.read_batch(np.arange(first, end))
    except (DataCorruption, PermanentError) as error:
        if end - first == 1:
            yield str(error)
            return
        middle = (first + end) // 2
        yield from _damaged(records, first, middle)
        yield from _damaged(records, middle, end)


def _damaged_names(records: RecordSet) -> Iterator[str]:
    first = 0
    for shard in records.names:
        try:
            for number in range(first, first + shard.records):
                records.name(number)
        except (DataCorruption, NotFound, PermanentError, UnicodeDecodeError) as error:
            yield str(error)
        first += shard.records
