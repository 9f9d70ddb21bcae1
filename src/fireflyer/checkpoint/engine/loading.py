"""Reads shards: pieces in flight into a few aligned buffers, and one pass that forms sums and copies into place.

While a piece is checked and copied, the next ones are on their way. What is said of each tensor (offset, size, sum,
address) is kept in arrays, and one native call serves all tensors of a piece. Memory: `_BUFFERS` times `READ_BYTES`,
whatever is loaded. Where a file can be read into any memory (`DiskFile.any_memory`), large tensors in host memory take
no buffer: they are read straight to their places, and only summed there, unless the disk has done so
(`Transfer.crc32c`). A tensor counts as read when its sum is right; until `load` has returned nothing of what was given
is usable.

Tensors on a device are filled by the device itself, from the buffer, which is pinned when the first of them is met; the
buffer is used again when its copies have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import (
    DataCorruption,
    FireflyerError,
    InvariantViolation,
    PermissionDenied,
    TransientError,
)
from fireflyer.base.ports import DIRECT_ALIGN_BYTES, Disk, DiskFile, Transfer
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.blocks import BLOCK_BYTES, block_sizes, needed_blocks
from fireflyer.checkpoint.core.manifest import MAX_SHARD_BYTES, Manifest, ShardRecord, TensorRecord
from fireflyer.checkpoint.core.pieces import ReadPiece, StraightRead, plan_reads, plan_straight
from fireflyer.checkpoint.core.slices import Runs
from fireflyer.checkpoint.engine.memory import aligned_memory, made_ready
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent, HostMemory
from fireflyer.native import crc32c, crc32c_joined, crc32c_ranges

__all__ = [
    "READ_BYTES",
    "DevicePlace",
    "Place",
    "Places",
    "Scattered",
    "Sink",
    "load",
    "places_of",
    "sink_of",
    "wrong_tensors",
]

READ_BYTES: Final = 8 * MIB
"""The most that is read in one call."""
_BUFFERS: Final = 4
"""One is checked and copied, the others are on their way."""
_STRAIGHT_BYTES: Final = 256 << 10
"""A tensor that is at least as large is read straight to its place, where the file allows it. Smaller ones share
reads."""
_READY_BYTES: Final = 4 * MIB
"""Tensors that are at least as large get their pages from a thread of their own: to get pages takes new memory longer
than to be copied to."""
_STRAIGHT_READS: Final = 6
"""At once, each of `READ_BYTES` at the most."""


class Scattered:
    """Where parts of a stored tensor go: `runs` of it, each into the memory beside them."""

    def __init__(self, parts: Sequence[tuple[Runs, memoryview]]) -> None:
        self._parts = parts

    def next_wanted(self, begin: int) -> int | None:
        """The first byte of the tensor from `begin` on that goes somewhere."""
        firsts = (next(runs.between(begin, MAX_SHARD_BYTES), None) for runs, _ in self._parts)
        return min((max(begin, run.source) for run in firsts if run is not None), default=None)

    def put(self, start: int, data: memoryview) -> None:
        """Copies what is wanted of `data`, the bytes of the tensor from `start` on."""
        end = start + len(data)
        for runs, target in self._parts:
            for source, first, size_bytes in runs.between(start, end):
                begin, stop = max(source, start), min(source + size_bytes, end)
                at = first + begin - source
                target[at : at + stop - begin] = data[begin - start : stop - start]


class DevicePlace(NamedTuple):
    """The memory of a tensor on a device."""

    engine: CopyEngine
    target: Any
    """Flat, of uint8."""


Place = memoryview | int | DevicePlace | Scattered
"""An int is the address of host memory, which has room for the tensor and stays until `load` has returned: a memoryview
of each of ten thousand tensors takes longer than to read them."""
Elsewhere = memoryview | DevicePlace | Scattered


class Places(NamedTuple):
    """Where the bytes of the tensors of a shard go."""

    addresses: npt.NDArray[np.uint64]
    """Of the host memory of each (see `Place`); 0: it has no bytes, or is in `others`, or is only to be verified."""
    others: Mapping[int, Elsewhere]
    """By the number of the tensor in its shard."""


Sink = Callable[[ShardRecord], Places]
"""Given the record of a shard, says where the bytes of each of its tensors go."""


def sink_of(place_of: Callable[[int, TensorRecord], Place | None]) -> Sink:
    """By a function that is given the rank whose shard holds it and the record of a tensor, and returns None to only
    verify it."""

    def sink(shard: ShardRecord) -> Places:
        return places_of([place_of(shard.rank, tensor) for tensor in shard.tensors])

    return sink


def places_of(places: Sequence[Place | None]) -> Places:
    """Of tensors with these places."""
    others = {at: place for at, place in enumerate(places) if isinstance(place, Elsewhere)}
    return Places(np.array([place if type(place) is int else 0 for place in places], np.uint64), others)


class _Wanted(NamedTuple):
    """Ranges of tensors that have a sum (all of a tensor, or a block), in the order of the file: of each its tensor,
    where it begins in its tensor and in the file, its size and sum, and the address that it is copied to, 0 where it is
    not."""

    tensors: Sequence[TensorRecord]
    begins: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    crc32c: npt.NDArray[np.uint32]
    targets: npt.NDArray[np.uint64]
    others: Mapping[int, DevicePlace | Scattered]
    """The places of those that do not go to one place in host memory, by their number here, rising."""

    def only(self, chosen: npt.NDArray[np.bool_]) -> _Wanted:
        if chosen.all():
            return self
        numbers = np.flatnonzero(chosen).tolist()
        others = {at: self.others[number] for at, number in enumerate(numbers) if number in self.others}
        return _Wanted(
            [self.tensors[at] for at in numbers],
            self.begins[chosen],
            self.offsets[chosen],
            self.sizes[chosen],
            self.crc32c[chosen],
            self.targets[chosen],
            others,
        )


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
    buffers = _buffers_for(manifest.shards)
    try:
        for shard in manifest.shards:
            path = f"{root}/{name}/{shard.file}"
            with contextlib.closing(disk.open(path, direct=True)) as file:
                _check_frame(file, path, shard)  # before `sink` takes memory for what the manifest only claims
                wanted = _wanted(shard.tensors, sink(shard), only_wanted=only_wanted)
                with _ready(wanted):
                    _read_tensors(file, path, wanted, buffers)
        for buffer in buffers:
            buffer.wait()
    finally:
        for buffer in buffers:
            buffer.close()


def wrong_tensors(disk: Disk, root: str, name: str, shard: ShardRecord) -> list[str]:
    """Reads every byte of a shard, and says of each tensor that is not as recorded what is wrong. Each byte is read
    once, but where the disk refuses some: then parts of the shard are read again, to find the tensors that are there.
    Raises `DataCorruption` where the length or the header is wrong, and what the disk raises of the file."""
    path = f"{root}/{name}/{shard.file}"
    with contextlib.closing(disk.open(path, direct=True)) as file:
        _check_frame(file, path, shard)
        return _wrong_of(file, path, shard.tensors, _buffers_for([shard]))


def _wrong_of(file: DiskFile, path: str, tensors: Sequence[TensorRecord], buffers: Sequence[_Buffer]) -> list[str]:
    wanted = _wanted(tensors, places_of([None] * len(tensors)), only_wanted=False)
    try:
        return _mismatches(path, wanted, _read_through(file, path, wanted, buffers))
    except (TransientError, PermissionDenied):
        raise
    except FireflyerError as error:
        if len(tensors) < 2:
            return [f"tensor {tensors[0].name!r} cannot be read: {error.message}"]
    half = len(tensors) // 2
    return [*_wrong_of(file, path, tensors[:half], buffers), *_wrong_of(file, path, tensors[half:], buffers)]


def _buffers_for(shards: Sequence[ShardRecord]) -> list[_Buffer]:
    largest = min(READ_BYTES, max(shard.file_bytes for shard in shards))
    return [_Buffer(largest + -largest % DIRECT_ALIGN_BYTES) for _ in range(_BUFFERS)]


def _wanted(tensors: Sequence[TensorRecord], places: Places, *, only_wanted: bool) -> _Wanted:
    if len(places.addresses) != len(tensors):
        raise InvariantViolation(f"{len(places.addresses)} places are not those of {len(tensors)} tensors")
    sizes = [tensor.size_bytes for tensor in tensors]
    targets, others = places.addresses.copy(), dict[int, DevicePlace | Scattered]()
    for at, place in sorted(places.others.items(), key=lambda item: item[0]):
        if isinstance(place, memoryview):
            targets[at] = _address(place, sizes[at])
        else:
            others[at] = place
    whole = _Wanted(
        tensors,
        np.zeros(len(tensors), np.int64),
        np.array([tensor.offset for tensor in tensors], np.int64),
        np.array(sizes, np.int64),
        np.array([tensor.crc32c for tensor in tensors], np.uint32),
        targets,
        others,
    )
    return _needed(whole) if only_wanted else whole


def _ready(wanted: _Wanted) -> contextlib.AbstractContextManager[None]:
    """Pages for what is copied to host memory, where it is so much that a thread is worth its start."""
    large = (wanted.targets != 0) & (wanted.sizes >= _READY_BYTES)
    if not large.any():
        return contextlib.nullcontext()
    return made_ready(zip(wanted.targets[large].tolist(), wanted.sizes[large].tolist(), strict=True))


def _needed(whole: _Wanted) -> _Wanted:
    """What has a place: of tensors that are scattered just the blocks of which something is wanted. What has no bytes
    needs no place."""
    has_place = whole.targets != 0
    has_place[list(whole.others)] = True
    wanted = whole.only(has_place)
    if not any(isinstance(place, Scattered) for place in wanted.others.values()):
        return wanted
    numbers, begins, sizes, sums = list[int](), list[int](), list[int](), list[int]()
    others: dict[int, DevicePlace | Scattered] = {}
    for at, tensor in enumerate(wanted.tensors):
        place = wanted.others.get(at)
        parts = [(0, tensor.size_bytes, tensor.crc32c)]
        if isinstance(place, Scattered) and tensor.blocks:
            of_blocks = block_sizes(tensor.size_bytes)
            needed = needed_blocks(tensor.size_bytes, place.next_wanted)
            parts = [(number * BLOCK_BYTES, of_blocks[number], tensor.blocks[number]) for number in needed]
        for begin, size_bytes, crc in parts:
            if place is not None:
                others[len(numbers)] = place
            numbers.append(at)
            begins.append(begin)
            sizes.append(size_bytes)
            sums.append(crc)
    starts = np.array(begins, np.int64)
    return _Wanted(
        [wanted.tensors[at] for at in numbers],
        starts,
        wanted.offsets[numbers] + starts,
        np.array(sizes, np.int64),
        np.array(sums, np.uint32),
        wanted.targets[numbers],
        others,
    )


def _address(place: memoryview, size_bytes: int) -> int:
    if not size_bytes:
        return 0
    if place.nbytes != size_bytes or place.readonly:
        raise InvariantViolation(f"memory of {place.nbytes} bytes cannot take a tensor of {size_bytes}")
    return np.frombuffer(place, np.uint8).ctypes.data


def _memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _check_frame(file: DiskFile, path: str, shard: ShardRecord) -> None:
    size = file.size()
    if size != shard.file_bytes:
        raise DataCorruption(f"{path} has {size} bytes instead of {shard.file_bytes}")
    if crc32c(file.pread(shard.header_bytes, 0)) != shard.header_crc32c:
        raise DataCorruption(f"the header of {path} does not match its checksum")


def _read_tensors(file: DiskFile, path: str, wanted: _Wanted, buffers: Sequence[_Buffer]) -> None:
    if file.any_memory:
        is_straight = (wanted.targets != 0) & (wanted.sizes >= _STRAIGHT_BYTES)
        straight, wanted = wanted.only(is_straight), wanted.only(~is_straight)
        _check_sums(path, straight, _read_straight(file, path, straight))
    _check_sums(path, wanted, _read_through(file, path, wanted, buffers))


def _check_sums(path: str, wanted: _Wanted, sums: npt.NDArray[np.uint32]) -> None:
    for wrong in _mismatches(path, wanted, sums):
        raise DataCorruption(wrong)


def _mismatches(path: str, wanted: _Wanted, sums: npt.NDArray[np.uint32]) -> list[str]:
    wrong = np.flatnonzero(sums != wanted.crc32c).tolist()
    return [f"tensor {wanted.tensors[at].name!r} in {path} does not match its checksum" for at in wrong]


def _read_straight(file: DiskFile, path: str, wanted: _Wanted) -> npt.NDArray[np.uint32]:
    """To their places, which are in host memory all of them; returns the sums."""
    sums = [0] * len(wanted.tensors)
    extents = list(zip(range(len(sums)), wanted.offsets.tolist(), wanted.sizes.tolist(), strict=True))
    places = [_memory(int(address), size) for address, (_, _, size) in zip(wanted.targets, extents, strict=True)]
    pending = deque[tuple[StraightRead, Transfer]]()

    def finish() -> None:
        (_, index, start, size_bytes), transfer = pending.popleft()
        if transfer.wait() < size_bytes:
            raise DataCorruption(f"{path} ends within tensor {wanted.tensors[index].name!r}")
        sums[index] = _with(sums[index], transfer, places[index][start : start + size_bytes])

    with _waited_for(pending):
        for read in plan_straight(extents, READ_BYTES):
            if len(pending) == _STRAIGHT_READS:
                finish()
            target = places[read.tensor][read.start : read.start + read.size_bytes]
            pending.append((read, file.start_pread(target, read.offset)))
        while pending:
            finish()
    return np.array(sums, np.uint32)


def _with(crc: int, transfer: Transfer, data: memoryview) -> int:
    """The sum `crc`, continued with `data`, which `transfer` has read: where the disk has verified the bytes, their sum
    is known, and they need not be looked at again."""
    return crc32c(data, crc) if transfer.crc32c is None else crc32c_joined(crc, transfer.crc32c, len(data))


def _read_through(file: DiskFile, path: str, wanted: _Wanted, buffers: Sequence[_Buffer]) -> npt.NDArray[np.uint32]:
    """By way of buffers; returns the sums."""
    sums = np.zeros(len(wanted.tensors), np.uint32)
    others = list(wanted.others)
    free, pending = deque(buffers), deque[_PendingRead]()
    piece_bytes = len(buffers[0].memory)
    with _waited_for(pending):
        for piece in plan_reads(wanted.offsets, wanted.sizes, piece_bytes, DIRECT_ALIGN_BYTES):
            if not free:
                free.append(_finish_read(pending, path, wanted, others, sums))
            buffer = free.popleft()
            buffer.wait()
            transfer = file.start_pread(buffer.memory[: piece.size_bytes], piece.offset)
            pending.append(_PendingRead(piece, buffer, transfer))
        while pending:
            _finish_read(pending, path, wanted, others, sums)
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


def _finish_read(
    pending: deque[_PendingRead],
    path: str,
    wanted: _Wanted,
    others: Sequence[int],
    sums: npt.NDArray[np.uint32],
) -> _Buffer:
    """Waits for the oldest piece, and puts its bytes where they belong. Returns its buffer, which devices may still
    read. `others`: the numbers of those that do not go to one place in host memory, rising."""
    piece, buffer, transfer = pending.popleft()
    first, end = piece.first, piece.first + len(piece.sizes)
    if transfer.wait() < piece.needed_bytes:
        raise DataCorruption(f"{path} ends within tensor {wanted.tensors[end - 1].name!r}")
    addresses = wanted.targets[first:end]
    targets = np.where(addresses, addresses + piece.starts, np.uint64(0))
    crc32c_ranges(sums[first:end], buffer.memory, piece.begins, piece.sizes, targets)
    on_devices: list[tuple[DevicePlace, int, int, int]] = []
    for index in others[bisect_left(others, first) : bisect_left(others, end)]:
        start, at, size_bytes = (int(each[index - first]) for each in (piece.starts, piece.begins, piece.sizes))
        place = wanted.others[index]
        if isinstance(place, Scattered):
            place.put(int(wanted.begins[index]) + start, buffer.memory[at : at + size_bytes])
        elif size_bytes:
            on_devices.append((place, start, at, size_bytes))
    buffer.copy_to_devices(on_devices)
    return buffer
