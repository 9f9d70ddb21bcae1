r"""Record shards, byte by byte: records with random access by number and a CRC32C for each. Pure.

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
"""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.ports import Data
from fireflyer.base.units import GIB
from fireflyer.native import crc32c

__all__ = [
    "ALIGNMENT_BYTES",
    "HEADER_BYTES",
    "INDEX_ENTRY_BYTES",
    "MAX_RECORDS",
    "MAX_RECORD_BYTES",
    "MAX_SHARD_BYTES",
    "TRAILER_BYTES",
    "Index",
    "ShardInfo",
    "Trailer",
    "aligned",
    "check_header",
    "corrupt",
    "header",
    "index_and_trailer",
    "largest_record",
    "parse_index",
    "parse_trailer",
]

MAX_RECORD_BYTES: Final = GIB
MAX_SHARD_BYTES: Final = 256 * GIB
MAX_RECORDS: Final = 1 << 28
ALIGNMENT_BYTES: Final = 8
INDEX_ENTRY_BYTES: Final = 16

_VERSION = 1
_HEADER = struct.Struct("<8sII")
_TRAILER = struct.Struct("<QQQIIII8s")
HEADER_BYTES: Final = _HEADER.size
TRAILER_BYTES: Final = _TRAILER.size
_TRAILER_CHECKED_BYTES = 36
_HEADER_MAGIC = b"FFSHARD\n"
_TRAILER_MAGIC = b"FFINDEX\n"


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a shard that a data set remembers, so that another file under its name is noticed."""

    name: str
    records: int
    data_bytes: int
    """Sum of the record lengths."""
    file_bytes: int
    index_crc: int


class Trailer(NamedTuple):
    index_offset: int
    records: int
    data_bytes: int
    index_crc: int

    @property
    def index_bytes(self) -> int:
        return self.records * INDEX_ENTRY_BYTES


class Index(NamedTuple):
    """Arrays `[records]`, read-only."""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    crcs: NDArray[np.uint32]


def largest_record(shard_bytes: int) -> int:
    """Bytes of the largest record that a shard of at most `shard_bytes` holds."""
    room = shard_bytes - aligned(HEADER_BYTES) - INDEX_ENTRY_BYTES - TRAILER_BYTES
    return min(MAX_RECORD_BYTES, room - room % ALIGNMENT_BYTES)


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def corrupt(path: str, why: str) -> DataCorruption:
    return DataCorruption(f"{path}: {why}; restore the file from a copy or rebuild the data set")


def header() -> bytes:
    checked = struct.pack("<8sI", _HEADER_MAGIC, _VERSION)
    return checked + struct.pack("<I", crc32c(checked))


def index_and_trailer(
    offsets: Sequence[int], lengths: Sequence[int], crcs: Sequence[int], index_offset: int
) -> tuple[bytes, int]:
    """What follows the records of a shard, and the CRC32C of its index."""
    index = b"".join(
        (np.array(offsets, "<u8").tobytes(), np.array(lengths, "<u4").tobytes(), np.array(crcs, "<u4").tobytes())
    )
    crc = crc32c(index)
    checked = struct.pack("<QQQIII", index_offset, len(offsets), sum(lengths), crc, _VERSION, 0)
    return index + checked + struct.pack("<I8s", crc32c(checked), _TRAILER_MAGIC), crc


def check_header(path: str, data: Data) -> None:
    """`data`: the first `HEADER_BYTES` of the file. Raises `DataCorruption`, and `UsageError` for a newer version."""
    magic, version, crc = _HEADER.unpack(data)
    if magic != _HEADER_MAGIC:
        raise corrupt(path, f"begins with {bytes(magic)!r}, a record shard begins with {_HEADER_MAGIC!r}")
    if crc != crc32c(memoryview(data)[:12]):
        raise corrupt(path, "the header does not match its CRC32C")
    if version != _VERSION:
        raise UsageError(
            f"{path}: record shard version {version}, this release reads {_VERSION}; use the newer release"
        )


def parse_trailer(path: str, data: Data, file_bytes: int) -> Trailer:
    """`data`: the last `TRAILER_BYTES` of the file. Raises `DataCorruption`."""
    index_offset, records, data_bytes, index_crc, version, zero, crc, magic = _TRAILER.unpack(data)
    if magic != _TRAILER_MAGIC:
        raise corrupt(path, "it does not end with an index: the file was truncated")
    if crc != crc32c(memoryview(data)[:_TRAILER_CHECKED_BYTES]) or version != _VERSION or zero != 0:
        raise corrupt(path, "its last 48 bytes do not match their CRC32C")
    expected = index_offset + records * INDEX_ENTRY_BYTES + TRAILER_BYTES
    if records > MAX_RECORDS or index_offset % ALIGNMENT_BYTES or expected != file_bytes:
        raise corrupt(path, f"{records} records with their index at {index_offset} do not fit into {file_bytes} bytes")
    return Trailer(index_offset, records, data_bytes, index_crc)


def parse_index(path: str, data: Data, trailer: Trailer, file_bytes: int) -> tuple[ShardInfo, Index]:
    """`data`: the `trailer.index_bytes` from `trailer.index_offset` on; the arrays are views of it. Raises
    `DataCorruption`."""
    view, records = memoryview(data), trailer.records
    if crc32c(view) != trailer.index_crc:
        raise corrupt(path, "the index does not match its CRC32C")
    index = Index(
        np.frombuffer(view[: 8 * records], "<u8"),
        np.frombuffer(view[8 * records : 12 * records], "<u4"),
        np.frombuffer(view[12 * records :], "<u4"),
    )
    for array in index:
        array.flags.writeable = False
    _check_geometry(path, index, trailer)
    info = ShardInfo(
        name=posixpath.basename(path),
        records=records,
        data_bytes=trailer.data_bytes,
        file_bytes=file_bytes,
        index_crc=trailer.index_crc,
    )
    return info, index


def _check_geometry(path: str, index: Index, trailer: Trailer) -> None:
    """Record 0 follows the header, each other one its predecessor, the index the last one."""
    alignment = np.uint64(ALIGNMENT_BYTES)
    ends = index.offsets + (index.lengths.astype(np.uint64) + alignment - np.uint64(1)) // alignment * alignment
    starts = np.concatenate((np.array([HEADER_BYTES], np.uint64), ends))
    expected = np.append(index.offsets, np.uint64(trailer.index_offset))
    wrong = np.flatnonzero(starts != expected)
    if wrong.size:
        number = int(wrong[0])
        raise corrupt(path, f"the index says that record {number} begins at {expected[number]}, not {starts[number]}")
    if int(index.lengths.sum(dtype=np.uint64)) != trailer.data_bytes:
        raise corrupt(path, f"the lengths of the records do not add up to {trailer.data_bytes} bytes")
