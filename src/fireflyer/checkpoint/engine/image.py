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
from fireflyer.checkpoint.core.names import MANIFEST_FILE
from fireflyer.checkpoint.core.pieces import cut
from fireflyer.checkpoint.core.safetensors import PlacedTensor, build_header, encode_entries
from fireflyer.checkpoint.engine.directory import OpenFiles, sync_names
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
    "sizes_of",
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


def write_shard(
    disk: Disk, path: str, share: Share, *, piece_bytes: int = WRITE_BYTES, files: OpenFiles | None = None
) -> Steps[ShardRecord]:
    """Creates the shard file `path`; the file and its name are durable at the end. However it ends, nothing reads the
    image any more. `files`: of a rank that is alone; its manifest is created too, and what is written is durable only
    when it commits. Raises what the disk raises, and what a device does that has failed to copy its tensors."""
    directory = path.rpartition("/")[0]
    if files is None:
        file = disk.create(path, direct=True)
    else:
        file, files.manifest = disk.create_all((path, f"{directory}/{MANIFEST_FILE}"), direct=True)
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        yield
        if len(share.image) > piece_bytes:  # a single write tells as much about space, and needs no extents
            file.allocate(len(share.image))
        if share.copies is not None:
            yield
            share.copies.wait()
        record = yield from _write_image(file, path, share, piece_bytes)
        yield
        if files is not None:
            files.shard = file
            stack.pop_all()
            return record
        file.fsync()
    yield from sync_names(disk, directory)
    return record


def _write_image(file: DiskFile, path: str, share: Share, piece_bytes: int) -> Steps[ShardRecord]:
    """Forms the sums of the header and of the blocks of each tensor, and the record, while pieces are on their way."""
    sizes = sizes_of(share.placed, len(share.image) - share.header_bytes)
    sums = RunningSums([share.header_bytes, *all_block_sizes(sizes)])
    flight: deque[Transfer] = deque()
    try:
        for piece in cut(len(share.image), piece_bytes):
            yield
            if len(flight) == _WRITES_IN_FLIGHT:
                flight.popleft().wait()
            data = share.image[piece.offset : piece.offset + piece.size_bytes]
            flight.append(file.start_pwrite(data, piece.offset))
            sums.update(data)
        record = _record(share, path.rpartition("/")[2], sizes, sums.sums)
        while flight:
            yield
            flight.popleft().wait()
    finally:
        for transfer in flight:  # something has failed, and is being raised
            with contextlib.suppress(Exception):
                transfer.wait()
    return record


def _record(share: Share, name: str, sizes: Sequence[int], sums: Sequence[int]) -> ShardRecord:
    tensors = records_of(share.placed, sizes, share.header_bytes, sums[1:])
    return ShardRecord(share.rank, name, len(share.image), share.header_bytes, sums[0], share.layout, tensors)


def sizes_of(placed: Sequence[PlacedTensor], data_bytes: int) -> list[int]:
    """In bytes, of tensors that lie back to back and are `data_bytes` together."""
    begins = np.array([item.offset for item in placed], np.int64)
    sizes: list[int] = np.diff(begins, append=data_bytes).tolist()
    return sizes


def records_of(
    placed: Sequence[PlacedTensor], sizes: Sequence[int], header_bytes: int, sums: Sequence[int]
) -> tuple[TensorRecord, ...]:
    """From the sizes of tensors, and the sums of their blocks, one after the other. A column at a time: no Python runs
    for each record, and there may be a million."""
    specs = [item.spec for item in placed]
    of_each = summed(sizes, sums)
    columns = (
        [spec.name for spec in specs],
        [spec.dtype for spec in specs],
        [spec.shape for spec in specs],
        [header_bytes + item.offset for item in placed],
        sizes,
        of_each.crc32c,
        of_each.blocks,
        [spec.slice for spec in specs],
    )
    return tuple(map(TensorRecord, *columns))
