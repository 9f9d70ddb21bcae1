r"""Record shards: immutable files of byte records with random access by number and a CRC32C for each record.

Layout, version 1; integers are little-endian, R is the number of records:

    offset          bytes   what
    0               8       magic  46 46 53 48 41 52 44 0A  ("FFSHARD\n")
    8               4       version, 1 (uint32)
    12              4       CRC32C of bytes 0 … 11 (uint32)
    16              …       the records one after another, each begun at a multiple of 8, the gap before it zeros
    I               8·R     index: offset of each record in the file (uint64)
    I + 8·R         4·R     index: length of each record in bytes (uint32)
    I + 12·R        4·R     index: CRC32C of each record (uint32)
    I + 16·R        8       I, the offset of the index, a multiple of 8 (uint64)
    I + 16·R + 8    8       R (uint64)
    I + 16·R + 16   8       sum of all record lengths (uint64)
    I + 16·R + 24   4       CRC32C of the index, 16·R bytes (uint32)
    I + 16·R + 28   4       version, 1 (uint32)
    I + 16·R + 32   4       zero (uint32)
    I + 16·R + 36   4       CRC32C of the 36 bytes from I + 16·R on (uint32)
    I + 16·R + 40   8       magic  46 46 49 4E 44 45 58 0A  ("FFINDEX\n")

Record n+1 begins where record n ends, rounded up to 8, and the index where the last one ends: nothing can overlap, and
a reader checks the whole geometry against the size of the file before it believes a word of it.

A shard appears under its name only when whole and durable (temporary name, fsync, rename, fsync of the directory), and
is never changed afterwards: any number of processes may map it at once. Records are handed out as read-only views of
the mapping, without a copy; a view keeps the mapping alive, also after `close`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import DataCorruption, Exists, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Data, Disk
from fireflyer.base.units import GIB
from fireflyer.data.files import create_temporary, default_disk, publish
from fireflyer.native import crc32c

__all__ = [
    "ALIGNMENT_BYTES",
    "MAX_RECORDS",
    "MAX_RECORD_BYTES",
    "MAX_SHARD_BYTES",
    "ShardInfo",
    "ShardReader",
    "ShardWriter",
    "Verify",
]

Verify = Literal["always", "first", "never"]
"""When a record's CRC is checked: at every access, at the first one through this reader, or not at all."""

MAX_RECORD_BYTES: Final = GIB
MAX_SHARD_BYTES: Final = 256 * GIB
MAX_RECORDS: Final = 1 << 28
ALIGNMENT_BYTES: Final = 8

_VERSION = 1
_HEADER = struct.Struct("<8sII")
_TRAILER = struct.Struct("<QQQIIII8s")
_TRAILER_CHECKED_BYTES = 36
_HEADER_MAGIC = b"FFSHARD\n"
_TRAILER_MAGIC = b"FFINDEX\n"
_INDEX_ENTRY_BYTES = 16
_WRITE_BUFFER_BYTES = 1 << 20


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a shard that a data set remembers, so that another file under its name is noticed."""

    name: str
    records: int
    data_bytes: int
    """Sum of the record lengths."""
    file_bytes: int
    index_crc: int


class ShardWriter:
    """Writes one shard; it appears at `path` on `commit`, and never if `abort` is called or the process dies.

    As a context manager it commits at the end and aborts on an exception. Not thread-safe.
    """

    def __init__(self, path: str, *, disk: Disk | None = None, max_bytes: int = MAX_SHARD_BYTES) -> None:
        """Raises `Exists` if there is a shard at `path`, `NotFound` if its directory is missing, `NoSpace`."""
        if not 0 < max_bytes <= MAX_SHARD_BYTES:
            raise UsageError(f"max_bytes={max_bytes}; it must be 1 to {MAX_SHARD_BYTES}")
        self.path = os.path.abspath(path)
        self.max_bytes = max_bytes
        self._disk = default_disk(disk)
        self._refuse_existing()
        self._temporary, self._file = create_temporary(self._disk, self.path)
        self._open = True
        self._buffer = bytearray(_header())
        self._written = 0
        self._data_bytes = 0
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self._crcs: list[int] = []

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def file_bytes(self) -> int:
        """Size that the shard would have if it were committed now."""
        records_end = _aligned(self._written + len(self._buffer))
        return records_end + len(self) * _INDEX_ENTRY_BYTES + _TRAILER.size

    def fits(self, length: int) -> bool:
        """Whether a record of `length` bytes can still be added."""
        grown = self.file_bytes + _aligned(length) + _INDEX_ENTRY_BYTES
        return length <= MAX_RECORD_BYTES and len(self) < MAX_RECORDS and grown <= self.max_bytes

    def add(self, record: Data) -> int:
        """Appends a record (any contiguous bytes, also none) and returns its number. Raises `UsageError` if it does
        not fit, `NoSpace`."""
        self._require_open()
        with memoryview(record) as view, view.cast("B") as data:
            if not self.fits(len(data)):
                raise UsageError(
                    f"{self.path}: a record of {len(data)} bytes does not fit after {len(self)} records "
                    f"({self.file_bytes} of {self.max_bytes} bytes used); begin another shard"
                )
            self._pad()
            self._offsets.append(self._written + len(self._buffer))
            self._lengths.append(len(data))
            self._crcs.append(crc32c(data))
            self._data_bytes += len(data)
            if len(data) < _WRITE_BUFFER_BYTES:
                self._buffer += data
            else:
                self._flush()
                self._file.pwrite(data, self._written)
                self._written += len(data)
        if len(self._buffer) >= _WRITE_BUFFER_BYTES:
            self._flush()
        return len(self) - 1

    def commit(self) -> ShardInfo:
        """Makes the shard durable and visible. Raises `Exists`, `NoSpace`; the shard is then aborted."""
        self._require_open()
        try:
            self._pad()
            index_offset = self._written + len(self._buffer)
            index = b"".join(
                (
                    np.array(self._offsets, "<u8").tobytes(),
                    np.array(self._lengths, "<u4").tobytes(),
                    np.array(self._crcs, "<u4").tobytes(),
                )
            )
            index_crc = crc32c(index)
            self._buffer += index
            self._buffer += _trailer(index_offset, len(self), self._data_bytes, index_crc)
            self._flush()
            self._file.fsync()
            self._file.close()
            self._refuse_existing()
            publish(self._disk, self._temporary, self.path)
        except BaseException:
            self.abort()
            raise
        self._open = False
        return ShardInfo(
            name=os.path.basename(self.path),
            records=len(self),
            data_bytes=self._data_bytes,
            file_bytes=self._written,
            index_crc=index_crc,
        )

    def abort(self) -> None:
        """Leaves nothing behind; harmless when the shard was committed or aborted before."""
        if not self._open:
            return
        self._open = False
        self._buffer = bytearray()
        try:
            self._file.close()
        finally:
            if self._disk.exists(self._temporary):
                self._disk.remove(self._temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()

    def _require_open(self) -> None:
        if not self._open:
            raise UsageError(f"{self.path}: this writer was committed or aborted; open another one")

    def _refuse_existing(self) -> None:
        if self._disk.exists(self.path):
            raise Exists(f"{self.path} exists; shards are never overwritten, choose another name or remove it")

    def _pad(self) -> None:
        position = self._written + len(self._buffer)
        self._buffer += bytes(_aligned(position) - position)

    def _flush(self) -> None:
        self._file.pwrite(self._buffer, self._written)
        self._written += len(self._buffer)
        self._buffer = bytearray()


class ShardReader:
    """Random access to the records of one shard: `reader[i]` is a read-only view of record i.

    Thread-safe. Survives fork, and pickling by path. Raises `DataCorruption` naming file and record when bytes are not
    what was written.
    """

    def __init__(self, path: str, *, verify: Verify = "always") -> None:
        """Maps the shard and checks header, index and geometry. Raises `NotFound`, `DataCorruption`."""
        if verify not in get_args(Verify):
            raise UsageError(f"verify={verify!r}; it must be one of {', '.join(get_args(Verify))}")
        self.path = os.path.abspath(path)
        self.verify: Verify = verify
        self._map = _map_file(self.path)
        self._view = memoryview(self._map)
        try:
            self.info, self._offsets, self._lengths, self._crcs = _read_index(self.path, self._view)
        except BaseException:
            self.close()
            raise
        self._verified = bytearray(self.info.records if verify == "first" else 0)

    def __len__(self) -> int:
        return self.info.records

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Length of every record in bytes, uint32 `[records]`, read-only."""
        return self._lengths

    def __getitem__(self, index: int) -> memoryview:
        """Read-only bytes of record `index` (negative counts from the end). Raises `IndexError`, `DataCorruption`."""
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path}: record {index} is out of range; there are {len(self)}")
        start = int(self._offsets[number])
        record = self._view[start : start + int(self._lengths[number])]
        if self.verify == "always" or (self.verify == "first" and not self._verified[number]):
            self._check(number, record)
        return record

    def array(self, index: int, dtype: np.dtype[Any] | type[np.generic]) -> NDArray[Any]:
        """Record `index` as a read-only NumPy array `[n]` of `dtype` over the mapping. Raises `DataCorruption` if its
        length is no multiple of the item size."""
        record = self[index]
        if len(record) % np.dtype(dtype).itemsize:
            raise DataCorruption(
                f"{self.path}: record {index} has {len(record)} bytes, not a multiple of the size of "
                f"{np.dtype(dtype)}; give the dtype that it was written with"
            )
        return np.frombuffer(record, dtype)

    def __iter__(self) -> Iterator[memoryview]:
        return map(self.__getitem__, range(len(self)))

    def close(self) -> None:
        """Gives the mapping back once no view of it is left. Using the reader afterwards raises `ValueError`."""
        self._view.release()
        empty = np.empty(0, np.uint32)
        self._offsets, self._lengths, self._crcs = np.empty(0, np.uint64), empty, empty
        with contextlib.suppress(BufferError):  # views are still in use; the last of them unmaps
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[str, Verify], ShardReader], tuple[str, Verify]]:
        return _reopen, (self.path, self.verify)

    def _check(self, number: int, record: memoryview) -> None:
        found, stored = crc32c(record), int(self._crcs[number])
        if found != stored:
            raise DataCorruption(
                f"{self.path}: record {number} has CRC32C {found:08x}, {stored:08x} was written; "
                "restore the file from a copy or rebuild the data set"
            )
        if self.verify == "first":
            self._verified[number] = 1


def _reopen(path: str, verify: Verify) -> ShardReader:
    return ShardReader(path, verify=verify)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _header() -> bytes:
    checked = struct.pack("<8sI", _HEADER_MAGIC, _VERSION)
    return checked + struct.pack("<I", crc32c(checked))


def _trailer(index_offset: int, records: int, data_bytes: int, index_crc: int) -> bytes:
    checked = struct.pack("<QQQIII", index_offset, records, data_bytes, index_crc, _VERSION, 0)
    return checked + struct.pack("<I8s", crc32c(checked), _TRAILER_MAGIC)


def _map_file(path: str) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise translate_os_error(error, f"open {path}") from error
    try:
        size = os.fstat(fd).st_size
        if size < _HEADER.size + _TRAILER.size:
            raise _corrupt(path, f"{size} bytes are too few for a record shard")
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise translate_os_error(error, f"map {path}") from error
    finally:
        os.close(fd)


def _corrupt(path: str, why: str) -> DataCorruption:
    return DataCorruption(f"{path}: {why}; restore the file from a copy or rebuild the data set")


_Index = tuple[ShardInfo, NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]


def _read_index(path: str, view: memoryview) -> _Index:
    _check_header(path, view)
    index_offset, records, data_bytes, index_crc = _check_trailer(path, view)
    index = view[index_offset : len(view) - _TRAILER.size]
    if crc32c(index) != index_crc:
        raise _corrupt(path, "the index does not match its CRC32C")
    offsets = np.frombuffer(index[: 8 * records], "<u8")
    lengths = np.frombuffer(index[8 * records : 12 * records], "<u4")
    crcs = np.frombuffer(index[12 * records :], "<u4")
    _check_geometry(path, offsets, lengths, index_offset, data_bytes)
    info = ShardInfo(
        name=os.path.basename(path),
        records=records,
        data_bytes=data_bytes,
        file_bytes=len(view),
        index_crc=index_crc,
    )
    return info, offsets, lengths, crcs


def _check_header(path: str, view: memoryview) -> None:
    magic, version, crc = _HEADER.unpack(view[: _HEADER.size])
    if magic != _HEADER_MAGIC:
        raise _corrupt(path, f"begins with {bytes(magic)!r}, a record shard begins with {_HEADER_MAGIC!r}")
    if crc != crc32c(view[:12]):
        raise _corrupt(path, "the header does not match its CRC32C")
    if version != _VERSION:
        raise UsageError(
            f"{path}: record shard version {version}, this release reads {_VERSION}; use the newer release"
        )


def _check_trailer(path: str, view: memoryview) -> tuple[int, int, int, int]:
    trailer = view[len(view) - _TRAILER.size :]
    index_offset, records, data_bytes, index_crc, version, zero, crc, magic = _TRAILER.unpack(trailer)
    if magic != _TRAILER_MAGIC:
        raise _corrupt(path, "it does not end with an index: the file was truncated")
    if crc != crc32c(trailer[:_TRAILER_CHECKED_BYTES]) or version != _VERSION or zero != 0:
        raise _corrupt(path, "its last 48 bytes do not match their CRC32C")
    expected = index_offset + records * _INDEX_ENTRY_BYTES + _TRAILER.size
    if records > MAX_RECORDS or index_offset % ALIGNMENT_BYTES or expected != len(view):
        raise _corrupt(path, f"{records} records with their index at {index_offset} do not fit into {len(view)} bytes")
    return index_offset, records, data_bytes, index_crc


def _check_geometry(
    path: str, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32], index_offset: int, data_bytes: int
) -> None:
    """Record 0 follows the header, each other one its predecessor, the index the last one."""
    alignment = np.uint64(ALIGNMENT_BYTES)
    ends = offsets + (lengths.astype(np.uint64) + alignment - np.uint64(1)) // alignment * alignment
    starts = np.concatenate((np.array([_HEADER.size], np.uint64), ends))
    expected = np.append(offsets, np.uint64(index_offset))
    wrong = np.flatnonzero(starts != expected)
    if wrong.size:
        number = int(wrong[0])
        raise _corrupt(path, f"the index says that record {number} begins at {expected[number]}, not {starts[number]}")
    if int(lengths.sum(dtype=np.uint64)) != data_bytes:
        raise _corrupt(path, f"the lengths of the records do not add up to {data_bytes} bytes")
