"""Reads shards: pieces in flight into a few aligned buffers, and one pass that forms sums and copies into place.

While a piece is checked and copied, the next ones are on their way. Memory: `_BUFFERS` times `READ_BYTES`, whatever is
loaded. Where a file can be read into any memory (`DiskFile.any_memory`), large tensors in host memory take no buffer:
they are read straight to their places, and only summed there, unless the disk has done so (`Transfer.crc32c`). A
tensor counts as read when its sum is right; until `load` has returned nothing of what was given is usable.

Tensors on a device are filled by the device itself, from the buffer, which is pinned when the first of them is met; the
buffer is used again when its copies have ended.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fireflyer.base.errors import DataCorruption
from fireflyer.base.ports import DIRECT_ALIGN_BYTES, Disk, DiskFile, Transfer
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.blocks import BLOCK_BYTES, block_sizes, needed_blocks
from fireflyer.checkpoint.core.manifest import Manifest, ShardRecord, TensorRecord
from fireflyer.checkpoint.core.pieces import ReadPiece, StraightRead, plan_reads, plan_straight
from fireflyer.checkpoint.core.slices import Run
from fireflyer.checkpoint.engine.memory import aligned_memory
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent, HostMemory
from fireflyer.native import crc32c, crc32c_copy, crc32c_joined

__all__ = ["READ_BYTES", "DevicePlace", "Place", "Scattered", "Sink", "load"]

READ_BYTES: Final = 8 * MIB
"""The most that is read in one call."""
_BUFFERS: Final = 4
"""One is checked and copied, the others are on their way."""
_STRAIGHT_BYTES: Final = 256 << 10
"""A tensor that is at least as large is read straight to its place, where the file allows it. Smaller ones share
reads."""
_STRAIGHT_READS: Final = 6
"""At once, each of `READ_BYTES` at the most."""


class Scattered:
    """Where parts of a stored tensor go: `runs` of it, in rising order, each into the memory beside them."""

    def __init__(self, parts: Sequence[tuple[Sequence[Run], memoryview]]) -> None:
        self._parts = [(runs, [run.source for run in runs], target) for runs, target in parts]

    def ranges(self) -> list[tuple[int, int]]:
        """(begin, size) in the tensor of what is wanted, in rising order for each target."""
        return [(run.source, run.size_bytes) for runs, _, _ in self._parts for run in runs]

    def put(self, start: int, data: memoryview) -> None:
        """Copies what is wanted of `data`, the bytes of the tensor from `start` on."""
        end = start + len(data)
        for runs, begins, target in self._parts:
            for run in runs[max(bisect_right(begins, start) - 1, 0) :]:
                if run.source >= end:
                    break
                begin, stop = max(run.source, start), min(run.source + run.size_bytes, end)
                if begin < stop:
                    at = run.target + begin - run.source
                    target[at : at + stop - begin] = data[begin - start : stop - start]


class DevicePlace(NamedTuple):
    """The memory of a tensor on a device."""

    engine: CopyEngine
    target: Any
    """Flat, of uint8."""


Place = memoryview | DevicePlace | Scattered
Sink = Callable[[int, TensorRecord], Place | None]
"""Given the rank whose shard holds it and the record of a tensor, says where its bytes go; None to only verify it."""


class _Wanted(NamedTuple):
    """Bytes of a tensor that have a sum: all of it, or a block."""

    tensor: TensorRecord
    place: Place | None
    begin: int
    """In the tensor."""
    size_bytes: int
    crc32c: int


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
    """Reads and verifies every shard; with `only_wanted` just the tensors for which `sink` gives a place, and of those
    that are scattered just the blocks which have something that is wanted. When it returns, devices have copied theirs.
    Raises `DataCorruption`, and what the disk and devices raise; then what `sink` gave holds nothing usable."""
    largest = min(READ_BYTES, max(shard.file_bytes for shard in manifest.shards))
    buffers = [_Buffer(largest + -largest % DIRECT_ALIGN_BYTES) for _ in range(_BUFFERS)]
    try:
        for shard in manifest.shards:
            path = f"{root}/{name}/{shard.file}"
            with contextlib.closing(disk.open(path, direct=True)) as file:
                _check_frame(file, path, shard)  # before `sink` takes memory for what the manifest only claims
                wanted: list[_Wanted] = []
                for tensor in shard.tensors:
                    wanted += _wanted(tensor, sink(shard.rank, tensor), only_wanted=only_wanted)
                _read_tensors(file, path, wanted, buffers)
        for buffer in buffers:
            buffer.wait()
    finally:
        for buffer in buffers:
            buffer.close()


def _wanted(tensor: TensorRecord, place: Place | None, *, only_wanted: bool) -> Iterator[_Wanted]:
    if only_wanted and place is None:
        return
    if not only_wanted or not isinstance(place, Scattered) or not tensor.blocks:
        yield _Wanted(tensor, place, 0, tensor.size_bytes, tensor.crc32c)
    else:
        sizes = block_sizes(tensor.size_bytes)
        for number in needed_blocks(tensor.size_bytes, place.ranges()):
            yield _Wanted(tensor, place, number * BLOCK_BYTES, sizes[number], tensor.blocks[number])


def _check_frame(file: DiskFile, path: str, shard: ShardRecord) -> None:
    size = file.size()
    if size != shard.file_bytes:
        raise DataCorruption(f"{path} has {size} bytes instead of {shard.file_bytes}")
    if crc32c(file.pread(shard.header_bytes, 0)) != shard.header_crc32c:
        raise DataCorruption(f"the header of {path} does not match its checksum")


def _read_tensors(file: DiskFile, path: str, wanted: Sequence[_Wanted], buffers: Sequence[_Buffer]) -> None:
    straight = [each for each in wanted if file.any_memory and _may_go_straight(each)]
    _check_sums(path, straight, _read_straight(file, path, straight))
    others = [each for each in wanted if not (file.any_memory and _may_go_straight(each))]
    _check_sums(path, others, _read_through(file, path, others, buffers))


def _may_go_straight(wanted: _Wanted) -> bool:
    return isinstance(wanted.place, memoryview) and wanted.size_bytes >= _STRAIGHT_BYTES


def _check_sums(path: str, wanted: Sequence[_Wanted], sums: Sequence[int]) -> None:
    for each, crc in zip(wanted, sums, strict=True):
        if crc != each.crc32c:
            raise DataCorruption(f"tensor {each.tensor.name!r} in {path} does not match its checksum")


def _read_straight(file: DiskFile, path: str, wanted: Sequence[_Wanted]) -> list[int]:
    """To their places, `memoryview`s all of them; returns the sums."""
    sums = [0] * len(wanted)
    places: list[Any] = [each.place for each in wanted]
    pending = deque[tuple[StraightRead, Transfer]]()

    def finish() -> None:
        (_, index, start, size_bytes), transfer = pending.popleft()
        if transfer.wait() < size_bytes:
            raise DataCorruption(f"{path} ends within tensor {wanted[index].tensor.name!r}")
        sums[index] = _with(sums[index], transfer, places[index][start : start + size_bytes])

    with _waited_for(pending):
        for read in plan_straight([(index, *_extent(each)) for index, each in enumerate(wanted)], READ_BYTES):
            if len(pending) == _STRAIGHT_READS:
                finish()
            target = places[read.tensor][read.start : read.start + read.size_bytes]
            pending.append((read, file.start_pread(target, read.offset)))
        while pending:
            finish()
    return sums


def _with(crc: int, transfer: Transfer, data: memoryview) -> int:
    """The sum `crc`, continued with `data`, which `transfer` has read: where the disk has verified the bytes, their sum
    is known, and they need not be looked at again."""
    return crc32c(data, crc) if transfer.crc32c is None else crc32c_joined(crc, transfer.crc32c, len(data))


def _read_through(file: DiskFile, path: str, wanted: Sequence[_Wanted], buffers: Sequence[_Buffer]) -> list[int]:
    """By way of buffers; returns the sums."""
    sums = [0] * len(wanted)
    free, pending = deque(buffers), deque[_PendingRead]()
    piece_bytes = len(buffers[0].memory)
    with _waited_for(pending):
        for piece in plan_reads([_extent(each) for each in wanted], piece_bytes, DIRECT_ALIGN_BYTES):
            if not free:
                free.append(_finish_read(pending, path, wanted, sums))
            buffer = free.popleft()
            buffer.wait()
            transfer = file.start_pread(buffer.memory[: piece.size_bytes], piece.offset)
            pending.append(_PendingRead(piece, buffer, transfer))
        while pending:
            _finish_read(pending, path, wanted, sums)
    return sums


@contextlib.contextmanager
def _waited_for(pending: deque[Any]) -> Iterator[None]:
    """However it ends, no transfer is under way any more: each is the last of what `pending` has."""
    try:
        yield
    finally:
        for *_, transfer in pending:  # something has failed, and is being raised
            with contextlib.suppress(Exception):
                transfer.wait()


def _extent(wanted: _Wanted) -> tuple[int, int]:
    return wanted.tensor.offset + wanted.begin, wanted.size_bytes


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
        sums[index] = crc32c(data, sums[index])
        if isinstance(place, Scattered):
            place.put(wanted[index].begin + start, data)
        elif place is not None:
            on_devices.append((place, start, at, size_bytes))
    buffer.copy_to_devices(on_devices)
    return buffer
