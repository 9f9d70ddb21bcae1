"""Reads shards: pieces in flight into a few aligned buffers, and one pass that forms sums and copies into place.

While a piece is checked and copied, the next ones are on their way. Memory: `_BUFFERS` times `READ_BYTES`, whatever is
loaded. A tensor counts as read when its sum is right; until `load` has returned nothing of what was given is usable.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from fireflyer.base.errors import DataCorruption
from fireflyer.base.ports import DIRECT_ALIGN_BYTES, Disk, DiskFile, Transfer
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.manifest import Manifest, ShardRecord, TensorRecord
from fireflyer.checkpoint.core.pieces import ReadPiece, plan_reads
from fireflyer.checkpoint.engine.memory import aligned_memory
from fireflyer.native import crc32c, crc32c_copy

__all__ = ["READ_BYTES", "Sink", "load"]

READ_BYTES: Final = 8 * MIB
"""The most that is read in one call."""
_BUFFERS: Final = 4
"""One is checked and copied, the others are on their way."""

Sink = Callable[[int, TensorRecord], memoryview | None]
"""Given the rank whose shard holds it and the record of a tensor, says where its bytes go; None to only verify it."""


class _Wanted(NamedTuple):
    tensor: TensorRecord
    place: memoryview | None


class _PendingRead(NamedTuple):
    piece: ReadPiece
    buffer: memoryview
    transfer: Transfer


def load(disk: Disk, root: str, name: str, manifest: Manifest, sink: Sink, *, only_wanted: bool = False) -> None:
    """Reads and verifies every shard; with `only_wanted` just the tensors for which `sink` gives a place.
    Raises `DataCorruption` and what the disk raises; then what `sink` gave holds nothing usable."""
    largest = min(READ_BYTES, max(shard.file_bytes for shard in manifest.shards))
    buffers = [aligned_memory(largest + -largest % DIRECT_ALIGN_BYTES) for _ in range(_BUFFERS)]
    for shard in manifest.shards:
        path = f"{root}/{name}/{shard.file}"
        with contextlib.closing(disk.open(path, direct=True)) as file:
            _check_frame(file, path, shard)  # before `sink` takes memory for what the manifest only claims
            wanted = [_Wanted(tensor, sink(shard.rank, tensor)) for tensor in shard.tensors]
            if only_wanted:
                wanted = [each for each in wanted if each.place is not None]
            _read_tensors(file, path, wanted, buffers)


def _check_frame(file: DiskFile, path: str, shard: ShardRecord) -> None:
    size = file.size()
    if size != shard.file_bytes:
        raise DataCorruption(f"{path} has {size} bytes instead of {shard.file_bytes}")
    if crc32c(file.pread(shard.header_bytes, 0)) != shard.header_crc32c:
        raise DataCorruption(f"the header of {path} does not match its checksum")


def _read_tensors(file: DiskFile, path: str, wanted: Sequence[_Wanted], buffers: Sequence[memoryview]) -> None:
    sums = [0] * len(wanted)
    free, pending = list(buffers), deque[_PendingRead]()
    piece_bytes = len(buffers[0])
    try:
        for piece in plan_reads([_extent(each.tensor) for each in wanted], piece_bytes, DIRECT_ALIGN_BYTES):
            if not free:
                free.append(_finish_read(pending, path, wanted, sums))
            buffer = free.pop()
            transfer = file.start_pread(buffer[: piece.size_bytes], piece.offset)
            pending.append(_PendingRead(piece, buffer, transfer))
        while pending:
            _finish_read(pending, path, wanted, sums)
    finally:
        for read in pending:  # something has failed, and is being raised
            with contextlib.suppress(Exception):
                read.transfer.wait()
    for each, crc in zip(wanted, sums, strict=True):
        if crc != each.tensor.crc32c:
            raise DataCorruption(f"tensor {each.tensor.name!r} in {path} does not match its checksum")


def _extent(tensor: TensorRecord) -> tuple[int, int]:
    return tensor.offset, tensor.size_bytes


def _finish_read(pending: deque[_PendingRead], path: str, wanted: Sequence[_Wanted], sums: list[int]) -> memoryview:
    """Waits for the oldest piece, and puts its bytes where they belong. Returns its buffer, free again."""
    piece, buffer, transfer = pending.popleft()
    if transfer.wait() < piece.needed_bytes:
        raise DataCorruption(f"{path} ends within tensor {wanted[piece.parts[-1].tensor].tensor.name!r}")
    for index, start, at, size_bytes in piece.parts:
        data, place = buffer[at : at + size_bytes], wanted[index].place
        if place is None:
            sums[index] = crc32c(data, sums[index])
        else:
            sums[index] = crc32c_copy(place[start : start + size_bytes], data, sums[index])
    return buffer
