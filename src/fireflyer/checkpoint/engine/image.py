"""A shard in memory as it is in its file, and how it is written: several pieces in flight, sums beside them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from fireflyer.base.ports import Disk, DiskFile, Transfer
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.blocks import block_sizes, summed
from fireflyer.checkpoint.core.manifest import ShardRecord, TensorRecord
from fireflyer.checkpoint.core.pieces import cut
from fireflyer.checkpoint.core.safetensors import PlacedTensor, build_header
from fireflyer.checkpoint.engine.steps import Steps
from fireflyer.native import crc32c

__all__ = ["WRITE_BYTES", "ImageCopies", "RunningSums", "Share", "header_of", "records_of", "write_shard"]

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
    return build_header(placed, {"step": str(step), "rank": str(rank)})


class RunningSums:
    """CRC32C of each of several ranges that lie back to back, from pieces that are cut anywhere."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._done = 0
        self.sums = [0] * len(sizes)
        self._index = 0

    def update(self, piece: memoryview) -> None:
        at, end = 0, len(piece)
        while at < end:
            while self._done == self._sizes[self._index]:
                self._index, self._done = self._index + 1, 0
            part = piece[at : at + self._sizes[self._index] - self._done]
            self.sums[self._index] = crc32c(part, self.sums[self._index])
            self._done += len(part)
            at += len(part)


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
        sums = yield from _write_image(file, share, piece_bytes)
        yield
        file.fsync()
    yield
    directory, _, name = path.rpartition("/")
    disk.sync_dir(directory)
    return _record(share, name, sums)


def _write_image(file: DiskFile, share: Share, piece_bytes: int) -> Steps[list[int]]:
    """Returns the sums of the header and of the blocks of each tensor, formed while pieces are on their way."""
    blocks = [size for item in share.placed for size in block_sizes(item.spec.size_bytes)]
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
        while flight:
            yield
            flight.popleft().wait()
    finally:
        for transfer in flight:  # something has failed, and is being raised
            with contextlib.suppress(Exception):
                transfer.wait()
    return sums.sums


def _record(share: Share, name: str, sums: Sequence[int]) -> ShardRecord:
    tensors = records_of(share.placed, share.header_bytes, sums[1:])
    return ShardRecord(share.rank, name, len(share.image), share.header_bytes, sums[0], share.layout, tensors)


def records_of(placed: Sequence[PlacedTensor], header_bytes: int, sums: Sequence[int]) -> tuple[TensorRecord, ...]:
    """From the sums of the blocks of all tensors, one after the other."""
    of_each = summed([item.spec.size_bytes for item in placed], sums)
    return tuple(
        TensorRecord(
            item.spec.name,
            item.spec.dtype,
            item.spec.shape,
            header_bytes + item.offset,
            item.spec.size_bytes,
            found.crc32c,
            found.blocks,
            item.spec.slice,
        )
        for item, found in zip(placed, of_each, strict=True)
    )
