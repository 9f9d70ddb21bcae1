"""Reads shards: pieces in flight into a few aligned buffers, and one pass that forms sums and copies into place.

While a piece is checked and copied, the next ones are on their way. Memory: `_BUFFERS` times `READ_BYTES`, whatever is
loaded. A tensor counts as read when its sum is right; until `load` has returned nothing of what was given is usable.

Tensors on a device are filled by the device itself, from the buffer, which is pinned when the first of them is met; the
buffer is used again when its copies have ended.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fireflyer.base.errors import DataCorruption
from fireflyer.base.ports import DIRECT_ALIGN_BYTES, Disk, DiskFile, Transfer
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.manifest import Manifest, ShardRecord, TensorRecord
from fireflyer.checkpoint.core.pieces import ReadPiece, plan_reads
from fireflyer.checkpoint.engine.memory import aligned_memory
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent, HostMemory
from fireflyer.native import crc32c, crc32c_copy

__all__ = ["READ_BYTES", "DevicePlace", "Place", "Sink", "load"]

READ_BYTES: Final = 8 * MIB
"""The most that is read in one call."""
_BUFFERS: Final = 4
"""One is checked and copied, the others are on their way."""


class DevicePlace(NamedTuple):
    """The memory of a tensor on a device."""

    engine: CopyEngine
    target: Any
    """Flat, of uint8."""


Place = memoryview | DevicePlace
Sink = Callable[[int, TensorRecord], Place | None]
"""Given the rank whose shard holds it and the record of a tensor, says where its bytes go; None to only verify it."""


class _Wanted(NamedTuple):
    tensor: TensorRecord
    place: Place | None


class _Buffer:
    """What is read into, and the copies by devices that read it."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = aligned_memory(size_bytes)
        self._pinned: HostMemory | None = None
        self._ends: list[CopyEvent] = []

    def copy_to_devices(self, parts: Sequence[tuple[DevicePlace, int, int, int]]) -> None:
        """Starts them: to byte `start` of the place, from byte `at` of the buffer, so many bytes."""
        by_engine: dict[int, list[tuple[DevicePlace, int, int, int]]] = {}
        for part in parts:
            by_engine.setdefault(id(part[0].engine), []).append(part)
        for some in by_engine.values():
            engine = some[0][0].engine
            if self._pinned is None:
                self._pinned = engine.pin(np.frombuffer(self.memory, dtype=np.uint8))
            sources = [self._pinned.tensor[at : at + size] for _, _, at, size in some]
            targets = [place.target[start : start + size] for place, start, _, size in some]
            # after what the caller has given to the device before: that may still use the tensors
            self._ends.append(engine.tensors_to_device(sources, targets, [engine.here()]))

    def wait(self) -> None:
        """Until no device reads it. Waits for all copies, then raises what one of them raised."""
        ends, self._ends = self._ends, []
        failed: Exception | None = None
        for end in ends:
            try:
                end.wait()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def close(self) -> None:
        with contextlib.suppress(Exception):  # something else has failed, and is being raised
            self.wait()
        if self._pinned is not None:
            self._pinned.release()


class _PendingRead(NamedTuple):
    piece: ReadPiece
    buffer: _Buffer
    transfer: Transfer


def load(disk: Disk, root: str, name: str, manifest: Manifest, sink: Sink, *, only_wanted: bool = False) -> None:
    """Reads and verifies every shard; with `only_wanted` just the tensors for which `sink` gives a place. When it
    returns, devices have copied theirs. Raises `DataCorruption`, and what the disk and devices raise; then what `sink`
    gave holds nothing usable."""
    largest = min(READ_BYTES, max(shard.file_bytes for shard in manifest.shards))
    buffers = [_Buffer(largest + -largest % DIRECT_ALIGN_BYTES) for _ in range(_BUFFERS)]
    try:
        for shard in manifest.shards:
            path = f"{root}/{name}/{shard.file}"
            with contextlib.closing(disk.open(path, direct=True)) as file:
                _check_frame(file, path, shard)  # before `sink` takes memory for what the manifest only claims
                wanted = [_Wanted(tensor, sink(shard.rank, tensor)) for tensor in shard.tensors]
                if only_wanted:
                    wanted = [each for each in wanted if each.place is not None]
                _read_tensors(file, path, wanted, buffers)
        for buffer in buffers:
            buffer.wait()
    finally:
        for buffer in buffers:
            buffer.close()


def _check_frame(file: DiskFile, path: str, shard: ShardRecord) -> None:
    size = file.size()
    if size != shard.file_bytes:
        raise DataCorruption(f"{path} has {size} bytes instead of {shard.file_bytes}")
    if crc32c(file.pread(shard.header_bytes, 0)) != shard.header_crc32c:
        raise DataCorruption(f"the header of {path} does not match its checksum")


def _read_tensors(file: DiskFile, path: str, wanted: Sequence[_Wanted], buffers: Sequence[_Buffer]) -> None:
    sums = [0] * len(wanted)
    free, pending = deque(buffers), deque[_PendingRead]()
    piece_bytes = len(buffers[0].memory)
    try:
        for piece in plan_reads([_extent(each.tensor) for each in wanted], piece_bytes, DIRECT_ALIGN_BYTES):
            if not free:
                free.append(_finish_read(pending, path, wanted, sums))
            buffer = free.popleft()
            buffer.wait()
            transfer = file.start_pread(buffer.memory[: piece.size_bytes], piece.offset)
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


def _finish_read(pending: deque[_PendingRead], path: str, wanted: Sequence[_Wanted], sums: list[int]) -> _Buffer:
    """Waits for the oldest piece, and puts its bytes where they belong. Returns its buffer, which devices may still
    read."""
    piece, buffer, transfer = pending.popleft()
    if transfer.wait() < piece.needed_bytes:
        raise DataCorruption(f"{path} ends within tensor {wanted[piece.parts[-1].tensor].tensor.name!r}")
    on_devices: list[tuple[DevicePlace, int, int, int]] = []
    for index, start, at, size_bytes in piece.parts:
        data, place = buffer.memory[at : at + size_bytes], wanted[index].place
        if isinstance(place, memoryview):
            sums[index] = crc32c_copy(place[start : start + size_bytes], data, sums[index])
            continue
        if place is not None:
            on_devices.append((place, start, at, size_bytes))
        sums[index] = crc32c(data, sums[index])
    buffer.copy_to_devices(on_devices)
    return buffer
