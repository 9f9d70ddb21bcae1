"""Random access to the records of shards (layout: `fireflyer.data.shard_format`), wherever they lie.

Files are read, not mapped: a disk that fails, or a mount that goes away, is an error that names the shard, where a
mapping would end the process with SIGBUS. Views of a batch share one buffer, which lives as long as one of them does.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import KIB, MIB
from fireflyer.data.places import Place, place_of, read_all, translated
from fireflyer.data.read_plan import plan_reads, split_by_bytes
from fireflyer.data.shard_format import (
    HEADER_BYTES,
    TRAILER_BYTES,
    Index,
    ShardInfo,
    check_header,
    corrupt,
    parse_index,
    parse_trailer,
)
from fireflyer.native import crc32c

__all__ = ["SEQUENTIAL_BYTES", "SEQUENTIAL_RECORDS", "ShardReader", "Verify", "read_records"]

Verify = Literal["always", "first", "never"]
"""When a record's CRC is checked: at every access, at the first one through this reader, or not at all."""

SEQUENTIAL_BYTES: Final = 8 * MIB
SEQUENTIAL_RECORDS: Final = 16384
"""Of one batch, where records are read one after another."""
_TAIL_BYTES: Final = 64 * KIB
"""Read with the header: in most shards the index is in there."""
_log = logging.getLogger(__name__)
_Integers = NDArray[np.int64]


class ShardReader:
    """`reader[i]` is a read-only view of record i, `reader.read_batch([…])` are many at once.

    Thread-safe; pickled by path. Raises `DataCorruption` naming file and record when bytes are not what was written.
    """

    def __init__(self, path: str | Place, *, verify: Verify = "always") -> None:
        """Reads and checks header, index and geometry. Raises `NotFound`, `DataCorruption`."""
        if verify not in get_args(Verify):
            raise UsageError(f"verify={verify!r}; it must be one of {', '.join(get_args(Verify))}")
        self._open = False
        self.place = place_of(path) if isinstance(path, str) else path
        self.path = self.place.name
        self.verify: Verify = verify
        self._process = os.getpid()
        with translated(f"open {self.path}"):
            self.file = self.place.files.open_file(self.place.path)
            self._open = True
            try:
                self.info, self.index = self._read_index()
            except BaseException:
                self.close()
                raise
        self.verified = bytearray(self.info.records if verify == "first" else 0)
        """1 for each record that was found right, where `verify` is "first"."""

    def _read_index(self) -> tuple[ShardInfo, Index]:
        size = self.place.files.stat(self.place.path).st_size
        if size < HEADER_BYTES + TRAILER_BYTES:
            raise corrupt(self.path, f"{size} bytes are too few for a record shard")
        header, tail = bytearray(HEADER_BYTES), bytearray(min(size, _TAIL_BYTES))
        self._read_exactly((0, header), (size - len(tail), tail))
        check_header(self.path, header)
        trailer = parse_trailer(self.path, tail[-TRAILER_BYTES:], size)
        first = trailer.index_offset - (size - len(tail))
        if first >= 0:
            content = tail[first : first + trailer.index_bytes]
        else:
            content = bytearray(trailer.index_bytes)
            self._read_exactly((trailer.index_offset, content))
        return parse_index(self.path, content, trailer, size)

    def _read_exactly(self, *wanted: tuple[int, bytearray]) -> None:
        counts = read_all(self.place.files, [(self.file, offset, memoryview(part)) for offset, part in wanted])
        if counts != [len(part) for _, part in wanted]:
            raise corrupt(self.path, "it became shorter while it was read")

    def __len__(self) -> int:
        return self.info.records

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Length of every record in bytes, uint32 `[records]`, read-only."""
        return self.index.lengths

    @property
    def index_bytes(self) -> int:
        """Memory that the index takes."""
        return sum(array.nbytes for array in self.index) + len(self.verified)

    def __getitem__(self, index: int) -> memoryview:
        """Read-only bytes of record `index` (negative counts from the end). Raises `IndexError`, `DataCorruption`."""
        return self.read_batch([index])[0]

    def read_batch(self, indices: Sequence[int] | _Integers) -> list[memoryview]:
        """Read-only bytes of each of these records. Raises `IndexError`, `DataCorruption`, `UsageError` when closed."""
        if not self._open:
            raise UsageError(f"{self.path}: this reader is closed")
        numbers = check_numbers(indices, len(self), self.path)
        return read_records([self], np.zeros(len(numbers), np.int64), numbers)

    def array(self, index: int, dtype: np.dtype[Any] | type[np.generic]) -> NDArray[Any]:
        """Record `index` as a read-only NumPy array `[n]` of `dtype`. Raises `DataCorruption` if its length is no
        multiple of the item size."""
        return as_array(self[index], dtype, f"{self.path}: record {index}")

    def __iter__(self) -> Iterator[memoryview]:
        lengths = self.lengths.astype(np.int64)
        for first, end in split_by_bytes(lengths, SEQUENTIAL_BYTES, SEQUENTIAL_RECORDS):
            yield from self.read_batch(np.arange(first, end))

    def close(self) -> None:
        """Close the file; what was read before stays. May be called twice. A forked child's copy of an open file of
        3FS stays open: it is its parent's."""
        if self._open and not (self.place.remote and os.getpid() != self._process):
            self.file.close()
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __reduce__(self) -> tuple[Callable[[str, Verify], ShardReader], tuple[str, Verify]]:
        return _reopen, (self.path, self.verify)


def _reopen(path: str, verify: Verify) -> ShardReader:
    return ShardReader(path, verify=verify)


def check_numbers(indices: Sequence[int] | _Integers, size: int, name: str) -> _Integers:
    """Numbers from 0, int64 `[n]`, where negative ones counted from the end. Raises `IndexError`."""
    try:
        given = np.asarray(indices, dtype=np.int64).reshape(-1)
    except OverflowError:
        index = next(one for one in indices if not -size <= one < size)
        raise IndexError(f"{name}: record {index} is out of range; there are {size}") from None
    numbers = np.where(given < 0, given + size, given)
    wrong = np.flatnonzero((numbers < 0) | (numbers >= size))
    if wrong.size:
        raise IndexError(f"{name}: record {given[wrong[0]]} is out of range; there are {size}")
    return numbers


def as_array(record: memoryview, dtype: np.dtype[Any] | type[np.generic], what: str) -> NDArray[Any]:
    if len(record) % np.dtype(dtype).itemsize:
        raise DataCorruption(
            f"{what} has {len(record)} bytes, not a multiple of the size of {np.dtype(dtype)}; "
            "give the dtype that it was written with"
        )
    return np.frombuffer(record, dtype)


def read_records(readers: Sequence[ShardReader], of: _Integers, numbers: _Integers) -> list[memoryview]:
    """Record `numbers[j]` of `readers[of[j]]` for each j, in one batch of reads and one buffer. All readers are of one
    file system. Raises `DataCorruption` naming shard and record."""
    found = _read(readers, of, numbers)
    wrong = [at for at, record in enumerate(found) if not _is_right(readers[of[at]], int(numbers[at]), record)]
    for place in wrong:
        reader, number = readers[of[place]], int(numbers[place])
        _log.warning("record does not match its CRC32C, reading it again path=%s record=%d", reader.path, number)
        (found[place],) = _read([reader], np.zeros(1, np.int64), numbers[place : place + 1])
        if not _is_right(reader, number, found[place]):
            seen, stored = crc32c(found[place]), int(reader.index.crcs[number])
            raise DataCorruption(
                f"{reader.path}: record {number} has CRC32C {seen:08x}, {stored:08x} was written; "
                "restore the file from a copy or rebuild the data set"
            )
    return found


def _is_right(reader: ShardReader, number: int, record: memoryview) -> bool:
    if reader.verify == "never" or (reader.verify == "first" and reader.verified[number]):
        return True
    if crc32c(record) != reader.index.crcs[number]:
        return False
    if reader.verify == "first":
        reader.verified[number] = 1
    return True


def _read(readers: Sequence[ShardReader], of: _Integers, numbers: _Integers) -> list[memoryview]:
    if not len(numbers):
        return []
    offsets, lengths = np.empty(len(of), np.int64), np.empty(len(of), np.int64)
    for shard, reader in enumerate(readers):
        mine = of == shard if len(readers) > 1 else slice(None)
        offsets[mine] = reader.index.offsets[numbers[mine]]
        lengths[mine] = reader.index.lengths[numbers[mine]]
    plan = plan_reads(of, offsets, lengths)
    memory = np.empty(plan.buffer_bytes, np.uint8).data
    reads = [
        (readers[shard].file, offset, memory[place : place + length])
        for shard, offset, length, place in zip(
            plan.shards.tolist(), plan.offsets.tolist(), plan.lengths.tolist(), plan.places.tolist(), strict=True
        )
    ]
    others = f" and {len(readers) - 1} more shards" if len(readers) > 1 else ""
    with translated(f"read records of {readers[0].path}{others}"):
        counts = read_all(readers[0].place.files, reads)
    short = np.flatnonzero(np.asarray(counts) < plan.lengths)
    if short.size:
        run = int(short[0])
        raise corrupt(
            readers[plan.shards[run]].path,
            f"it ends at {plan.offsets[run] + counts[run]}, before the records that it had when it was opened",
        )
    memory = memory.toreadonly()
    ends = plan.records + lengths
    return [memory[begin:end] for begin, end in zip(plan.records.tolist(), ends.tolist(), strict=True)]
