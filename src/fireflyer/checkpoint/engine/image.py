"""A shard in memory as it is in its file, and how it is written: several pieces in flight, sums beside them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import numpy as np

from fireflyer.base.ports import Disk, DiskFile, Transfer
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.blocks import all_block_sizes, summed
from fireflyer.checkpoint.core.manifest import ShardRecord, TensorRecord
from fireflyer.checkpoint.core.pieces import cut
from fireflyer.checkpoint.core.safetensors import PlacedTensor, build_header, encode_entries
from fireflyer.checkpoint.engine.steps import Steps
from fireflyer.native import crc32c_ranges

__all__ = [
    "WRITE_BYTES",
    "ImageCopies",
    "RunningSums",
    "Share",
    "header_of",
    "header_with",
    "records_of",
    "write_shard",
]

WRITE_BYTES: Final = 16 * MIB
"""One write."""
_WRITES_IN_FLIGHT: Final = 3


class ImageCopies(Protocol):
    """What devices still copy into an image."""

    def before_update(self) -> None:
        """What the calling thread gives to the devices from now on starts after all copies. Does not block."""

    def wait(self) -> None:
        """Blocks until every copy has ended, then raises if one has failed. May be called again."""


class Share(msgspec.Struct, frozen=True):
    """What one rank writes. `image` is the whole file: `header_bytes` of header, then the tensors back to back."""

    rank: int
    step: int
    layout: int
    placed: Sequence[PlacedTensor]
    header_bytes: int
    image: memoryview
    total_bytes: int = 0
    """Of the shards of all ranks, about; 0: not known."""
    copies: ImageCopies | None = None
    """Until these have ended, nothing may read or replace the image."""


def header_of(placed: Sequence[PlacedTensor], *, step: int, rank: int) -> bytes:
    """The first bytes of a shard. Raises `UsageError` when they would be above the format's limit."""
    return header_with(encode_entries(placed), step=step, rank=rank)


def header_with(entries: bytes, *, step: int, rank: int) -> bytes:
    """As `header_of`, of tensors whose entries were encoded before."""
    return build_header(entries, {"step": str(step), "rank": str(rank)})


class RunningSums:
    """CRC32C of each of several ranges that lie back to back, from pieces that are cut anywhere. One native call for
    each piece, however many ranges it has."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = np.cumsum(np.array(sizes, np.int64))
        self._at = 0
        self._sums = np.zeros(len(sizes), np.uint32)

    @property
    def sums(self) -> list[int]:
        """As far as pieces have come."""
        return self._sums.tolist()

    def update(self, piece: memoryview) -> None:
        end = self._at + len(piece)
        first = int(np.searchsorted(self._ends, self._at, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        if first < len(self._ends) and end > self._at:
            ends = np.minimum(self._ends[first : last + 1], end) - self._at
            begins = np.concatenate(([0], ends[:-1]))
            sums = self._sums[first : last + 1]
            crc32c_ranges(sums, piece, begins.astype(np.uint64), (ends - begins).astype(np.uint64))
        self._at = end


def write_shard(disk: Disk, path: str, share: Share, *, piece_bytes: int = WRITE_BYTES) -> Steps[ShardRecord]:
    """Creates the shard file `path`; the file and its name are durable at the end. However it ends, nothing reads the
    image any more. Raises what the disk raises, and what a device does that has failed to copy its tensors."""
    file = disk.create(path, direct=True)
    with contextlib.closing(file):
        yield
        file.allocate(len(share.image))
        if share.copies is not None:
            yield
            share.copies.wait()
        record = yield from _write_image(file, path, share, piece_bytes)
        yield
        file.fsync()
    yield
    disk.sync_dir(path.rpartition("/")[0])
    return record


def _write_image(file: DiskFile, path: str, share: Share, piece_bytes: int) -> Steps[ShardRecord]:
    """Forms the sums of the header and of the blocks of each tensor, and the record, while pieces are on their way."""
    blocks = all_block_sizes([item.spec.size_bytes for item in share.placed])
    sums = RunningSums([share.header_bytes, *blocks])
    flight: deque[Transfer] = deque()
    try:
        for piece in cut(len(share.image), piece_bytes):
            yield
            if len(flight) == _WRITES_IN_FLIGHT:
                flight.popleft().wait()
            data = share.image[piece.offset : piece.offset + piece.size_bytes]
            flight.append(file.start_pwrite(data, piece.offset))
            sums.update(data)
        record = _record(share, path.rpartition("/")[2], sums.sums)
        while flight:
            yield
            flight.popleft().wait()
    finally:
        for transfer in flight:  # something has failed, and is being raised
            with contextlib.suppress(Exception):
                transfer.wait()
    return record


def _record(share: Share, name: str, sums: Sequence[int]) -> ShardRecord:
    tensors = records_of(share.placed, share.header_bytes, sums[1:])
    return ShardRecord(share.rank, name, len(share.image), share.header_bytes, sums[0], share.layout, tensors)


def records_of(placed: Sequence[PlacedTensor], header_bytes: int, sums: Sequence[int]) -> tuple[TensorRecord, ...]:
    """From the sums of the blocks of all tensors, one after the other."""
    specs = [item.spec for item in placed]
    sizes = [spec.size_bytes for spec in specs]
    of_each = summed(sizes, sums)
    return tuple(
        [  # faster than a generator, and there may be a million
            TensorRecord(spec.name, spec.dtype, spec.shape, header_bytes + item.offset, size, crc, blocks, spec.slice)
            for spec, item, size, (crc, blocks) in zip(specs, placed, sizes, of_each, strict=True)
        ]
    )
