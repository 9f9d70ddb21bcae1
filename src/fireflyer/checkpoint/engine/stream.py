"""Writes a shard whose tensors come one after the other, in as much memory as a few pieces take.

`engine.image` writes what lies in memory as in its file; this is for what does not: a state that somebody else has
staged, another checkpoint, files of another format.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.base.ports import DIRECT_ALIGN_BYTES, Disk, DiskFile, Transfer
from fireflyer.checkpoint.core.blocks import all_block_sizes
from fireflyer.checkpoint.core.manifest import ShardRecord
from fireflyer.checkpoint.core.safetensors import PlacedTensor, TensorSpec
from fireflyer.checkpoint.engine.image import WRITE_BYTES, RunningSums, records_of
from fireflyer.checkpoint.engine.memory import aligned_memory

__all__ = ["Source", "write_stream"]

Source = Callable[[TensorSpec], Iterable[memoryview]]
"""The bytes of a tensor, row-major, in pieces; each may be overwritten when the next is asked for."""
_BUFFERS: Final = 3


class _Writer:
    """Pieces of a file in flight, each in a buffer of its own."""

    def __init__(self, file: DiskFile, file_bytes: int, sums: RunningSums) -> None:
        size = min(WRITE_BYTES, file_bytes + -file_bytes % DIRECT_ALIGN_BYTES)
        self._file, self._sums = file, sums
        self._free = [aligned_memory(size) for _ in range(_BUFFERS)]
        self._flight: deque[tuple[Transfer, memoryview]] = deque()
        self._buffer = self._free.pop()
        self._filled, self._offset = 0, 0

    def write(self, data: memoryview) -> None:
        while data:
            part = data[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == len(self._buffer):
                self._send()

    def _send(self) -> None:
        piece = self._buffer[: self._filled]
        self._flight.append((self._file.start_pwrite(piece, self._offset), self._buffer))
        self._sums.update(piece)
        self._offset, self._filled = self._offset + len(piece), 0
        if not self._free:
            transfer, buffer = self._flight.popleft()
            transfer.wait()
            self._free.append(buffer)
        self._buffer = self._free.pop()

    def finish(self) -> None:
        if self._filled:
            self._send()
        while self._flight:
            self._flight.popleft()[0].wait()

    def abandon(self) -> None:
        for transfer, _ in self._flight:
            with contextlib.suppress(Exception):  # another error is being raised
                transfer.wait()


def write_stream(
    disk: Disk,
    path: str,
    header: bytes,
    placed: Sequence[PlacedTensor],
    source: Source,
    *,
    rank: int = 0,
    layout: int = 0,
) -> ShardRecord:
    """Creates the shard file `path` with the tensors `placed`, in that order; the file and its name are durable at the
    end. Raises `UsageError` where `source` gives another number of bytes than a tensor has, and what the disk and
    `source` raise."""
    sizes = [item.spec.size_bytes for item in placed]
    file_bytes = len(header) + sum(sizes)
    sums = RunningSums([len(header), *all_block_sizes(sizes)])
    with contextlib.closing(disk.create(path, direct=True)) as file:
        file.allocate(file_bytes)
        writer = _Writer(file, file_bytes, sums)
        try:
            writer.write(memoryview(header))
            for item in placed:
                _copy(writer, item.spec, source)
            writer.finish()
        finally:
            writer.abandon()
        file.fsync()
    directory, _, name = path.rpartition("/")
    disk.sync_dir(directory)
    records = records_of(placed, sizes, len(header), sums.sums[1:])
    return ShardRecord(rank, name, file_bytes, len(header), sums.sums[0], layout, records)


def _copy(writer: _Writer, spec: TensorSpec, source: Source) -> None:
    left = spec.size_bytes
    for piece in source(spec):
        left -= len(piece)
        if left < 0:
            break
        writer.write(piece)
    if left:
        what = "more" if left < 0 else "fewer"
        raise UsageError(f"tensor {spec.name[:80]!r} came with {what} bytes than its {spec.size_bytes}")
