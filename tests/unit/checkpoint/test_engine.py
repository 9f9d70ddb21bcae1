"""The engine between a state and its files: pieces in flight, memory that is reused, damage that is found."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoints.states import SHARD, manager, newest, same, save_all, snapshot_of, state_of

from fireflyer.base.errors import Aborted, DataCorruption, FireflyerError, InvariantViolation, NoSpace
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import DIRECT_ALIGN_BYTES, Transfer
from fireflyer.checkpoint import State
from fireflyer.checkpoint.core.manifest import decode_manifest, encode_manifest
from fireflyer.checkpoint.core.pieces import MAX_GAP_BYTES, cut, plan_reads, plan_straight
from fireflyer.checkpoint.engine import loading
from fireflyer.checkpoint.engine.image import Share, write_shard
from fireflyer.checkpoint.engine.memory import aligned_memory
from fireflyer.checkpoint.engine.steps import run_steps
from fireflyer.checkpoint.snapshot import SnapshotBuffer
from fireflyer.fs.client.files.disk import FileSystemFile
from fireflyer.native import copy_ranges, crc32c, crc32c_ranges
from fireflyer.runtime.disk import RealDisk, RealFile
from fireflyer.sim import SimDisk

# Pieces.

extents = st.lists(st.tuples(st.integers(0, 3 * MAX_GAP_BYTES), st.integers(0, 90_000)), max_size=8).map(
    lambda gaps: [(sum(map(sum, gaps[:index])) + gap, size) for index, (gap, size) in enumerate(gaps)]
)


@given(extents, st.integers(1, 8))
def test_pieces_hold_every_wanted_byte_once_and_in_order(wanted: list[tuple[int, int]], pages: int) -> None:
    piece_bytes = pages * DIRECT_ALIGN_BYTES
    read = [0] * len(wanted)
    begun = -1
    offsets, sizes = [offset for offset, _ in wanted], [size for _, size in wanted]
    for piece in plan_reads(offsets, sizes, piece_bytes, DIRECT_ALIGN_BYTES):
        assert piece.offset % DIRECT_ALIGN_BYTES == piece.size_bytes % DIRECT_ALIGN_BYTES == 0
        assert piece.needed_bytes <= piece.size_bytes <= piece_bytes
        assert piece.offset > begun
        begun = piece.offset
        for part in piece.parts:
            assert part.start == read[part.tensor]
            assert piece.offset + part.at == wanted[part.tensor][0] + part.start
            assert part.at + part.size_bytes <= piece.needed_bytes
            read[part.tensor] += part.size_bytes
    assert read == [size for _, size in wanted]


def test_a_large_gap_is_left_out_and_a_small_one_is_read_along() -> None:
    def pieces(gap: int) -> list[int]:
        return [piece.size_bytes for piece in plan_reads([0, 10 + gap], [10, 10], 1 << 30, 4096)]

    assert pieces(MAX_GAP_BYTES) == [MAX_GAP_BYTES + 4096]
    assert pieces(MAX_GAP_BYTES + 1) == [4096, 4096]


def test_pieces_end_where_multiples_of_their_size_are_in_the_file() -> None:
    pieces = list(plan_reads([8192 + 100], [40_000], 16384, 4096))
    assert [(piece.offset, piece.offset + piece.needed_bytes) for piece in pieces] == [
        (8192, 16384),
        (16384, 32768),
        (32768, 48292),
    ]


@given(extents, st.integers(1, 50_000))
def test_reads_without_buffers_hold_every_byte_once_and_in_order(wanted: list[tuple[int, int]], most: int) -> None:
    read = [0] * len(wanted)
    for one in plan_straight([(index, *extent) for index, extent in enumerate(wanted)], most):
        assert one.start == read[one.tensor]
        assert one.offset == wanted[one.tensor][0] + one.start
        assert one.offset // most == (one.offset + one.size_bytes - 1) // most
        read[one.tensor] += one.size_bytes
    assert read == [size for _, size in wanted]


def test_a_file_is_cut_from_its_first_byte_to_its_last() -> None:
    assert [(piece.offset, piece.size_bytes) for piece in cut(10, 4)] == [(0, 4), (4, 4), (8, 2)]
    assert list(cut(0, 4)) == []


# Writing.


class Watched(RealFile):
    """Counts transfers that were started and those that were waited for; the write at `fails_at` fails."""

    started: list[tuple[int, int]]
    waited = 0
    fails_at = -1

    def start_pwrite(self, data: memoryview, offset: int) -> Transfer:
        self.started.append((offset, len(data)))
        inner = super().start_pwrite(data, offset)
        file = self

        class Counted(Transfer):
            def wait(self) -> int:
                file.waited += 1
                moved = inner.wait()
                if offset == file.fails_at:
                    raise translate_os_error(OSError(errno.EIO, "injected"), "write")
                return moved

        return Counted()


class WatchedDisk(RealDisk):
    def __init__(self, fails_at: int = -1) -> None:
        self.files: list[Watched] = []
        self._fails_at = fails_at

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        file = super().create(path, direct=direct)
        watched = Watched(file._fd, path, file._direct_fd)
        file._fd = file._direct_fd = -1
        watched.started, watched.fails_at = [], self._fails_at
        self.files.append(watched)
        return watched


def share_of_bytes(size_bytes: int) -> Share:
    tensor = torch.frombuffer(bytearray(random.Random(1).randbytes(size_bytes)), dtype=torch.uint8)
    return SnapshotBuffer().take(3, snapshot_of(State({"w": tensor})))


def test_a_shard_is_its_image_written_in_pieces(tmp_path: Path) -> None:
    share, disk = share_of_bytes(50_000), WatchedDisk()
    record = run_steps(write_shard(disk, f"{tmp_path}/s", share, piece_bytes=8192))
    assert (tmp_path / "s").read_bytes() == share.image
    assert record.header_crc32c == crc32c(share.image[: record.header_bytes])
    (file,) = disk.files
    assert file.started == [(piece.offset, piece.size_bytes) for piece in cut(len(share.image), 8192)]
    assert file.waited == len(file.started)


@pytest.mark.parametrize("fails_at", [0, 8192, 40960])
def test_when_a_write_fails_nothing_reads_the_image_any_more(tmp_path: Path, fails_at: int) -> None:
    disk = WatchedDisk(fails_at)
    with pytest.raises(FireflyerError, match="EIO"):
        run_steps(write_shard(disk, f"{tmp_path}/s", share_of_bytes(50_000), piece_bytes=8192))
    (file,) = disk.files
    assert file.waited == len(file.started)
    assert file._fd == -1, "it is closed"


@pytest.mark.parametrize("after", range(1, 12))
def test_when_a_save_is_given_up_nothing_reads_the_image_any_more(tmp_path: Path, after: int) -> None:
    disk, left = WatchedDisk(), iter(range(after))
    with contextlib.suppress(Aborted):
        run_steps(
            write_shard(disk, f"{tmp_path}/s", share_of_bytes(50_000), piece_bytes=8192),
            lambda: next(left, None) is None,
        )
    for file in disk.files:
        assert file.waited == len(file.started)
        assert file._fd == -1


def test_the_image_of_a_snapshot_can_go_past_the_page_cache() -> None:
    address = torch.frombuffer(share_of_bytes(10).image, dtype=torch.uint8).data_ptr()
    assert address % DIRECT_ALIGN_BYTES == 0
    assert len(aligned_memory(10)) == 10
    assert len(aligned_memory(0)) == 0


def test_a_second_snapshot_uses_the_memory_and_the_layout_of_the_first() -> None:
    buffer, first = SnapshotBuffer(), snapshot_of(state_of(1))
    image = buffer.take(1, first).image
    second = snapshot_of(state_of(2), last=first.layout)
    assert second.layout is first.layout
    again = buffer.take(2, second)
    assert (
        torch.frombuffer(again.image, dtype=torch.uint8).data_ptr()
        == torch.frombuffer(image, dtype=torch.uint8).data_ptr()
    )
    more = snapshot_of(State({**state_of(2).shared, "more": torch.ones(9000)}, state_of(2).own), last=first.layout)
    assert more.layout is not first.layout
    assert bytes(buffer.take(3, more).image) == bytes(SnapshotBuffer().take(3, more).image)


def test_memory_that_is_made_beside_training_is_what_the_first_save_takes(tmp_path: Path) -> None:
    with manager(tmp_path) as ours:
        ours.reserve(state_of(5), blocking=False)
        ours._saving._buffer._join()
        made = ours._saving._buffer._image
        assert made.numel()
        ours.save(5, state_of(5), blocking=True).result()
        assert ours._saving._buffer._image is made
    assert same(newest(tmp_path), 5)


def test_thousands_of_small_tensors_are_a_few_writes_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    start = RealFile.start_pread

    def counted(file: RealFile, target: memoryview, offset: int) -> Transfer:
        reads.append(offset)
        return start(file, target, offset)

    monkeypatch.setattr(RealFile, "start_pread", counted)
    tensors = {f"w{number}": torch.full((7,), float(number)) for number in range(3_000)}
    disk = WatchedDisk()
    with manager(tmp_path, disk=disk) as ours:
        ours.save(1, State(tensors), blocking=True).result()
        restored = ours.restore()
    assert restored is not None
    assert all(torch.equal(restored.shared[name], tensor) for name, tensor in tensors.items())
    assert sum(len(file.started) for file in disk.files) <= 2
    assert len(reads) <= 2


# Reading.


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor lies in several pieces, and a piece in several tensors."""
    monkeypatch.setattr(loading, "READ_BYTES", 2 * DIRECT_ALIGN_BYTES)


@pytest.mark.usefixtures("small_pieces")
def test_tensors_that_lie_across_pieces_come_back(tmp_path: Path) -> None:
    sizes = [1, 5000, 0, 30_000, 3, 8192, 70_001]
    tensors = {
        f"w{number}": torch.frombuffer(bytearray(random.Random(number).randbytes(size)), dtype=torch.uint8)
        if size
        else torch.empty(0, dtype=torch.uint8)
        for number, size in enumerate(sizes)
    }
    with manager(tmp_path) as ours:
        ours.save(1, State(tensors), blocking=True).result()
        restored = ours.restore()
    assert restored is not None
    assert all(torch.equal(restored.shared[name], tensor) for name, tensor in tensors.items())


def test_tensors_that_are_there_are_filled_in_place(tmp_path: Path) -> None:
    save_all(tmp_path, [10])
    expected = state_of(10).shared
    given = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    unfit = {
        "w1": torch.zeros(2, 3).t(),
        "w2": torch.zeros(3, 3, dtype=torch.float64),
        "w3": torch.zeros(4, 3),
        "other": torch.zeros(3),
    }
    with manager(tmp_path) as ours:
        restored = ours.restore(into={**given, **unfit})
    assert same(restored, 10)
    assert restored is not None
    assert {name for name in expected if restored.shared[name] is given[name]} == {"w0", "w4"}
    assert not any(tensor.any() for tensor in unfit.values())


def test_one_wrong_byte_anywhere_is_found_and_the_checkpoint_before_is_used() -> None:
    device = SimDisk()
    with manager("/c", disk=device.mount()) as ours:
        for step in (10, 20):
            ours.save(step, State({"w": torch.full((3,), float(step))}), blocking=True).result()
        for file in (SHARD, "manifest.json"):
            path = f"/c/step-00000020/{file}"
            content = device.read(path)
            for offset in range(len(content)):
                device.corrupt(path, offset, mask=1 << offset % 8)
                restored = ours.restore()
                assert restored is not None
                assert restored.shared["w"].tolist() == [10.0] * 3, (file, offset)
                device.replace(path, content)
        restored = ours.restore()
        assert restored is not None
        assert restored.shared["w"].tolist() == [20.0] * 3


class AnyMemoryFile(RealFile):
    """Like a file of 3FS; notes the memory of each read."""

    any_memory = True
    reads: list[tuple[int, int, int]]
    """Address, size and offset."""
    waited = 0
    ends_at = 1 << 60
    """Reads have nothing from there on."""
    flipped: int | None = None
    """Bits of the sum that the disk gives for each read; None: it gives none."""

    def start_pread(self, target: memoryview, offset: int) -> Transfer:
        self.reads.append((torch.frombuffer(target, dtype=torch.uint8).data_ptr(), len(target), offset))
        inner, file = super().start_pread(target, offset), self

        class Counted(Transfer):
            def wait(self) -> int:
                file.waited += 1
                size = min(inner.wait(), max(0, file.ends_at - offset))
                if file.flipped is not None:
                    self.crc32c = crc32c(target[:size]) ^ file.flipped
                return size

        return Counted()


class AnyMemoryDisk(RealDisk):
    def __init__(self, ends_at: int = 1 << 60, flipped: int | None = None) -> None:
        self.files: list[AnyMemoryFile] = []
        self._ends_at, self._flipped = ends_at, flipped

    def open(self, path: str, *, direct: bool = False) -> RealFile:
        file = super().open(path, direct=direct)
        watched = AnyMemoryFile(file._fd, path, file._direct_fd)
        file._fd = file._direct_fd = -1
        watched.reads, watched.ends_at, watched.flipped = [], self._ends_at, self._flipped
        self.files.append(watched)
        return watched


@pytest.fixture
def large_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """A checkpoint in `tmp_path` of tensors on both sides of what is large enough for reads of its own."""
    monkeypatch.setattr(loading, "READ_BYTES", 128 << 10)
    sizes = [7, loading._STRAIGHT_BYTES, 5000, 3 * loading._STRAIGHT_BYTES + 77, loading._STRAIGHT_BYTES - 1]
    tensors = {f"w{at}": torch.randint(0, 256, (size,), dtype=torch.uint8) for at, size in enumerate(sizes)}
    with manager(tmp_path) as ours:
        ours.save(1, State(tensors), blocking=True).result()
    return tensors


def test_a_file_that_can_be_read_into_any_memory_is_read_straight_into_large_tensors(
    tmp_path: Path, large_and_small: dict[str, torch.Tensor]
) -> None:
    assert FileSystemFile.any_memory, "files of 3FS are such files"
    target = {name: torch.zeros_like(tensor) for name, tensor in large_and_small.items()}
    disk = AnyMemoryDisk()
    with manager(tmp_path, disk=disk) as ours:
        ours.restore(into=target)
    assert all(torch.equal(target[name], tensor) for name, tensor in large_and_small.items())
    (file,) = (one for one in disk.files if one.reads)
    read = {
        name: sum(size for at, size, _ in file.reads if 0 <= at - tensor.data_ptr() < tensor.numel())
        for name, tensor in target.items()
    }
    assert read == {name: tensor.numel() if name in ("w1", "w3") else 0 for name, tensor in target.items()}
    assert file.waited == len(file.reads)


@pytest.mark.parametrize("name", ["w0", "w1", "w3", "w4"])
def test_a_wrong_byte_of_a_tensor_that_is_read_straight_is_found(
    tmp_path: Path, large_and_small: dict[str, torch.Tensor], name: str
) -> None:
    path = tmp_path / "step-00000001" / SHARD
    data = bytearray(path.read_bytes())
    at = bytes(data).index(large_and_small[name].numpy().tobytes()) + large_and_small[name].numel() - 1
    data[at] ^= 4
    path.write_bytes(data)
    with manager(tmp_path, disk=AnyMemoryDisk()) as ours, pytest.raises(DataCorruption, match=f"{name}.*checksum"):
        ours.restore()


@pytest.mark.parametrize("flipped", [0, 4])
def test_the_sums_that_a_disk_has_verified_are_taken_for_those_of_the_bytes(
    tmp_path: Path, large_and_small: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, flipped: int
) -> None:
    summed: list[int] = []

    def counted(data: memoryview, crc: int = 0) -> int:
        summed.append(len(data))
        return crc32c(data, crc)

    monkeypatch.setattr(loading, "crc32c", counted)
    with manager(tmp_path, disk=AnyMemoryDisk(flipped=flipped)) as ours:
        if flipped:
            with pytest.raises(DataCorruption, match=r"'w1'.*checksum"):
                ours.restore()
            return
        state = ours.restore()
    assert state is not None
    assert all(torch.equal(state.shared[name], tensor) for name, tensor in large_and_small.items())
    assert sum(summed) < loading._STRAIGHT_BYTES, "only the header and what is small is summed again"


@pytest.mark.usefixtures("large_and_small")
def test_a_straight_read_that_has_fewer_bytes_is_damage_and_the_others_are_waited_for(tmp_path: Path) -> None:
    disk = AnyMemoryDisk(ends_at=400 << 10)
    with manager(tmp_path, disk=disk) as ours, pytest.raises(DataCorruption, match="ends within tensor 'w3'"):
        ours.restore()
    (file,) = (one for one in disk.files if one.reads)
    assert file.waited == len(file.reads)


def test_files_are_byte_for_byte_those_of_older_releases(tmp_path: Path) -> None:
    """The sums were taken of what the release before this engine wrote."""
    shared = {
        f"w{number}": torch.arange(10, 10 + 3 * (number + 1), dtype=torch.float32).view(3, number + 1)
        for number in range(5)
    }
    shared["h"] = torch.arange(7, dtype=torch.bfloat16)
    shared["e"] = torch.empty(0, 3, dtype=torch.int64)
    shared["b"] = torch.tensor([True, False, True])
    state = State(shared, {"rng": torch.full((4,), 10, dtype=torch.uint8)}, {"step": 10})
    with manager(tmp_path) as ours:
        ours.save(10, state, blocking=True).result()
    shard, manifest = ((tmp_path / "step-00000010" / name).read_bytes() for name in (SHARD, "manifest.json"))
    assert (len(shard), crc32c(shard)) == (777, 0xA7263248)
    assert decode_manifest(manifest).saved is not None, "the one thing that is new"
    as_before = encode_manifest(msgspec.structs.replace(decode_manifest(manifest), saved=None))
    assert (len(as_before), crc32c(as_before)) == (1124, 0x60886AD2)


# Many ranges in one native call.


def test_ranges_that_are_not_within_the_data_and_arrays_that_do_not_fit_are_refused() -> None:
    data, sums = bytearray(range(100)), np.zeros(2, np.uint32)
    begins, sizes = np.array([0, 90], np.uint64), np.array([10, 10], np.uint64)
    crc32c_ranges(sums, data, begins, sizes)
    assert sums.tolist() == [crc32c(data[:10]), crc32c(data[90:])]
    for wrong in ([0, 91], [0, 101], [0, 1 << 64 - 1]):
        with pytest.raises(ValueError, match="range 1 is not within data"):
            crc32c_ranges(sums, data, np.array(wrong, np.uint64), sizes)
    with pytest.raises(ValueError, match="sums holds 4 bytes"):
        crc32c_ranges(sums[:1], data, begins, sizes)
    with pytest.raises(ValueError, match="targets holds 8 bytes"):
        copy_ranges(begins[:1], begins, sizes)


def test_tensors_that_do_not_lie_as_in_the_file_are_saved_like_others(tmp_path: Path) -> None:
    """The rest are copied by their addresses."""
    base = torch.randn(6, 4, dtype=torch.complex64)
    state = {
        "turned": base.t(),
        "conjugated": base.conj(),
        "negated": base.conj().imag,
        "part": base[1:3],
        "none": base[:0],
    }
    with manager(tmp_path) as ours:
        ours.save(1, State(state), blocking=True).result()
        restored = ours.restore(into={"conjugated": torch.zeros(6, 4, dtype=torch.complex64).conj()})
    assert restored is not None
    assert all(torch.equal(restored.shared[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("memory", [memoryview(bytearray(15)), memoryview(bytes(16))])
def test_memory_that_is_not_as_large_as_its_tensor_or_not_writable_is_refused(memory: memoryview) -> None:
    device = SimDisk()
    disk = device.mount()
    with manager("/c", disk=disk) as ours:
        ours.save(1, State({"w": torch.zeros(4)}), blocking=True).result()
    manifest = decode_manifest(device.read("/c/step-00000001/manifest.json"))
    with pytest.raises(InvariantViolation, match="cannot take a tensor of 16"):
        loading.load(disk, "/c", "step-00000001", manifest, loading.sink_of(lambda _rank, _tensor: memory))


def test_places_that_are_not_one_for_each_tensor_are_refused() -> None:
    device = SimDisk()
    disk = device.mount()
    with manager("/c", disk=disk) as ours:
        ours.save(1, State({"v": torch.zeros(4), "w": torch.zeros(4)}), blocking=True).result()
    manifest = decode_manifest(device.read("/c/step-00000001/manifest.json"))
    with pytest.raises(InvariantViolation, match="1 places are not those of 2 tensors"):
        loading.load(disk, "/c", "step-00000001", manifest, lambda _shard: loading.places_of([None]))


def test_a_restore_fills_what_it_may_and_leaves_the_rest_to_new_tensors_in_the_order_of_the_checkpoint() -> None:
    names = [f"w{number}" for number in range(6)]
    state = {name: torch.rand(3, 4) for name in names}
    into = {
        "w0": torch.zeros(3, 4),
        "w1": torch.zeros(4, 3).t(),
        "w2": torch.zeros(3, 4, dtype=torch.float64),
        "w4": torch.zeros(4, 3),
        "w5": torch.nn.Parameter(torch.zeros(3, 4)),
        "another": torch.zeros(3, 4),
    }
    with manager("/c", disk=SimDisk().mount()) as ours:
        ours.save(1, State(state, {"w0": torch.ones(2)}), blocking=True).result()
        restored = ours.restore(into)
    assert restored is not None
    assert list(restored.shared) == names
    assert [name for name in names if restored.shared[name] is into.get(name)] == ["w0", "w5"]
    assert all(torch.equal(restored.shared[name], state[name]) for name in names)
    assert not into["another"].any()
    assert restored.own is not None
    assert torch.equal(restored.own["w0"], torch.ones(2))


# Space.


def test_a_save_that_cannot_fit_says_what_it_needs_and_writes_nothing() -> None:
    device = SimDisk()
    disk = device.mount()
    with manager("/c", disk=disk) as ours:
        ours.save(10, state_of(10), blocking=True).result()
        state = State({"w": torch.zeros(1 << 18)})
        device.capacity_bytes = device.used_bytes() + (1 << 19)
        before = len(device.operations)
        with pytest.raises(NoSpace, match=r"no space left for a checkpoint in /c: it needs 1.0 MiB, 0.5 MiB are free"):
            ours.save(20, state, blocking=True).result()
        assert not [it for it in device.operations[before:] if it.operation in ("create", "pwrite", "allocate")]
    assert same(newest("/c", disk=disk), 10)


@pytest.mark.parametrize(
    ("piece_bytes", "first"), [(8192, ["create", "allocate", "pwrite"]), (1 << 20, ["create", "pwrite"])]
)
def test_the_space_of_a_shard_is_reserved_before_the_first_of_several_pieces(
    piece_bytes: int, first: list[str]
) -> None:
    """A single write tells as much."""
    device = SimDisk()
    disk = device.mount()
    disk.mkdir("/c")
    run_steps(write_shard(disk, "/c/s", share_of_bytes(50_000), piece_bytes=piece_bytes))
    assert [it.operation for it in device.operations if it.path == "/c/s"][: len(first)] == first


def test_a_forked_child_has_the_addresses_of_the_memory_and_nothing_that_was_in_it() -> None:
    """If it had not, it would give them to something else, which is unmapped when its copy of the object goes."""
    memory = aligned_memory(1 << 20)
    memory[:] = b"\1" * len(memory)
    child = os.fork()
    if not child:
        os._exit(0 if not any(memory) else 1)  # SIGSEGV where nothing is mapped there
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(memory)
