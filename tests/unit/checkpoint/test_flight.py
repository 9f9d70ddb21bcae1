"""Pieces are on their way while others are summed and copied, and shards go past the page cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.support.checkpoints.ranks import Ranks
from tests.support.checkpoints.states import SHARD, manager, newest, same, save_all, snapshot_of, state_of

from fireflyer.base.ports import Transfer
from fireflyer.checkpoint import State
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.checkpoint.engine import image, loading, stream
from fireflyer.checkpoint.engine.image import header_with, write_shard
from fireflyer.checkpoint.engine.steps import run_steps
from fireflyer.checkpoint.engine.stream import write_stream
from fireflyer.checkpoint.snapshot import SnapshotBuffer
from fireflyer.checkpoint.tensors import bytes_of
from fireflyer.runtime.disk import RealDisk, RealFile

PIECE: Final = 8192
PIECES: Final = 20


class Held(Transfer):
    """Ends when somebody waits for it, and not before."""

    def __init__(self, end: Callable[[], int]) -> None:
        self._end = end

    def wait(self) -> int:
        return self._end()


class HoldingFile(RealFile):
    """Notes the order in which transfers begin and end."""

    events: list[str]

    def _held(self, transfer: Callable[[], Transfer]) -> Transfer:
        self.events.append("begin")

        def end() -> int:
            self.events.append("end")
            return transfer().wait()

        return Held(end)

    def start_pwrite(self, data: memoryview, offset: int) -> Transfer:
        start = super().start_pwrite
        return self._held(lambda: start(data, offset))

    def start_pread(self, target: memoryview, offset: int) -> Transfer:
        start = super().start_pread
        return self._held(lambda: start(target, offset))


class HoldingDisk(RealDisk):
    """Holds every transfer until it is waited for."""

    def __init__(self, *, any_memory: bool = False) -> None:
        self.events: list[str] = []
        self._any_memory = any_memory

    def _holding(self, file: RealFile) -> RealFile:
        held = HoldingFile(file._fd, file._path, file._direct_fd)
        file._fd = file._direct_fd = -1
        held.events, held.any_memory = self.events, self._any_memory
        return held

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        return self._holding(super().create(path, direct=direct))

    def open(self, path: str, *, direct: bool = False) -> RealFile:
        return self._holding(super().open(path, direct=direct))


def sums_noted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, events: list[str]) -> None:
    """From now on `module` notes when it sums a piece."""
    real = getattr(module, name)

    def noted(*arguments: Any) -> Any:
        events.append("sum")
        return real(*arguments)

    monkeypatch.setattr(module, name, noted)


def in_flight(events: list[str], until: str) -> list[int]:
    """How many transfers have begun and not ended, whenever an event `until` comes."""
    found: list[int] = []
    flight = 0
    for event in events:
        if event == until:
            found.append(flight)
        flight += {"begin": 1, "end": -1}.get(event, 0)
    return found


def content_of(pieces: int) -> torch.Tensor:
    """Lies in so many pieces, with its header."""
    return torch.frombuffer(bytearray(random.Random(1).randbytes((pieces - 1) * PIECE)), dtype=torch.uint8)


def test_a_save_begins_several_writes_before_the_first_ends_and_forms_sums_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HoldingDisk()
    sums_noted(monkeypatch, image, "crc32c_ranges", disk.events)
    share = SnapshotBuffer().take(1, snapshot_of(State({"w": content_of(PIECES)})))
    run_steps(write_shard(disk, f"{tmp_path}/s", share, piece_bytes=PIECE))
    most = image._WRITES_IN_FLIGHT
    assert most >= 3
    assert in_flight(disk.events, "end") == [most] * (PIECES - most) + list(range(most, 0, -1))
    assert in_flight(disk.events, "sum") == [*range(1, most), *[most] * (PIECES - most + 1)]
    assert (tmp_path / "s").read_bytes() == share.image


def test_a_state_that_comes_in_pieces_is_written_with_several_writes_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HoldingDisk()
    monkeypatch.setattr(stream, "WRITE_BYTES", PIECE)
    sums_noted(monkeypatch, image, "crc32c_ranges", disk.events)
    content = content_of(PIECES)
    write_content(disk, f"{tmp_path}/s", content)
    most = stream._BUFFERS
    assert most >= 3
    assert in_flight(disk.events, "end") == [most] * (PIECES - most) + list(range(most, 0, -1))
    assert in_flight(disk.events, "sum") == [*range(1, most), *[most] * (PIECES - most + 1)]
    assert (tmp_path / "s").read_bytes().endswith(content.numpy().tobytes())


def write_content(disk: RealDisk, path: str, content: torch.Tensor) -> None:
    layout = snapshot_of(State({"w": content})).layout

    def source(_: TensorSpec) -> Iterator[memoryview]:
        yield bytes_of(content)

    write_stream(disk, path, header_with(layout.entries, step=1, rank=0), layout.placed, source)


def test_a_load_has_reads_on_their_way_while_a_piece_is_summed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, disk = content_of(PIECES), HoldingDisk()
    with manager(tmp_path) as ours:
        ours.save(1, State({"w": content}), blocking=True).result()
    monkeypatch.setattr(loading, "READ_BYTES", PIECE)
    sums_noted(monkeypatch, loading, "crc32c_ranges", disk.events)
    assert torch.equal(newest(tmp_path, disk=disk).shared["w"], content)
    most, pieces = loading._BUFFERS, disk.events.count("begin")
    assert most >= 3
    assert pieces >= PIECES - 1
    assert in_flight(disk.events, "end") == [most] * (pieces - most + 1) + list(range(most - 1, 0, -1))
    assert in_flight(disk.events, "sum") == [most - 1] * (pieces - most + 1) + list(range(most - 2, -1, -1))


def test_a_load_without_buffers_has_reads_on_their_way_while_a_piece_is_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, disk = content_of(PIECES), HoldingDisk(any_memory=True)
    with manager(tmp_path) as ours:
        ours.save(1, State({"w": content}), blocking=True).result()
    monkeypatch.setattr(loading, "READ_BYTES", PIECE)
    monkeypatch.setattr(loading, "_STRAIGHT_BYTES", PIECE)
    assert torch.equal(newest(tmp_path, disk=disk).shared["w"], content)
    most, pieces = loading._STRAIGHT_READS, disk.events.count("begin")
    assert most >= 3
    assert pieces >= PIECES - 1
    assert in_flight(disk.events, "end") == [most] * (pieces - most + 1) + list(range(most - 1, 0, -1))


# Past the page cache.


class Recording(RealDisk):
    """Notes which files are to go past the page cache."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bool]] = []

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        self.asked.append(("create", path, direct))
        return super().create(path, direct=direct)

    def open(self, path: str, *, direct: bool = False) -> RealFile:
        self.asked.append(("open", path, direct))
        return super().open(path, direct=direct)

    def shards(self, call: str) -> list[bool]:
        """Of each shard, in the order of the calls."""
        return [direct for name, path, direct in self.asked if name == call and path.endswith(".safetensors")]


def test_a_shard_is_saved_past_the_page_cache(tmp_path: Path) -> None:
    disk = Recording()
    save_all(tmp_path, [1], disk=disk)
    assert disk.shards("create") == [True]


def test_a_shard_is_loaded_past_the_page_cache(tmp_path: Path) -> None:
    disk = Recording()
    save_all(tmp_path, [1])
    assert same(newest(tmp_path, disk=disk), 1)
    assert disk.shards("open") == [True]


def test_shards_of_several_ranks_are_saved_past_the_page_cache(tmp_path: Path) -> None:
    disk = Recording()
    ranks = Ranks(str(tmp_path), 2, disk)
    for handle in ranks.together(lambda ours: ours.save(1, state_of(1), blocking=True)):
        handle.result()
    ranks.close()
    assert disk.shards("create") == [True, True]


def test_a_shard_of_a_state_that_comes_in_pieces_is_written_past_the_page_cache(tmp_path: Path) -> None:
    disk = Recording()
    write_content(disk, f"{tmp_path}/{SHARD}", content_of(2))
    assert disk.shards("create") == [True]
