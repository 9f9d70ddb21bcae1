"""Memory of tensors gets its pages from a thread, before bytes arrive."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from tests.support.patience import allowed_s

from fireflyer.checkpoint import CheckpointManager, State
from fireflyer.checkpoint.engine import loading
from fireflyer.checkpoint.engine.memory import made_ready

PAGES: Final = 4096


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """In small pages, of which only the third one is touched."""
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as found:
        found.madvise(mmap.MADV_NOHUGEPAGE)
        found[2 * mmap.PAGESIZE] = 7
        yield found


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def present(address: int, pages: int = PAGES) -> list[bool]:
    """Whether each page has memory, or was swapped out: the two uppermost bits of /proc/self/pagemap (proc(5))."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        return [bool(one >> 62) for one in np.frombuffer(file.read(8 * pages), np.uint64).tolist()]


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "checkpoint-memory"]


def release() -> tuple[int, ...]:
    return tuple(int(one) for one in os.uname().release.split("-")[0].split(".")[:2])


@pytest.mark.skipif(release() < (5, 14), reason="this kernel gives no pages ahead")
def test_whole_pages_of_the_ranges_get_memory_and_keep_what_they_have(memory: mmap.mmap) -> None:
    address, page = address_of(memory), mmap.PAGESIZE
    ranges = [(address + 1, 3 * page), (address + 100 * page, (PAGES - 101) * page)]
    deadline = time.monotonic() + allowed_s(30)
    with made_ready(ranges):
        while not present(address)[PAGES - 2] and time.monotonic() < deadline:
            pass
    expected = [at in (1, 2) or 100 <= at < PAGES - 1 for at in range(PAGES)]
    assert present(address) == expected
    assert memory[2 * page] == 7
    assert not threads()


def test_the_thread_ends_with_the_block_whatever_is_left(memory: mmap.mmap) -> None:
    def ranges() -> Iterator[tuple[int, int]]:
        while True:
            yield address_of(memory), mmap.PAGESIZE

    with pytest.raises(ZeroDivisionError), made_ready(ranges()):
        raise ZeroDivisionError
    assert not threads()


@pytest.mark.parametrize("blocking", [True, False])
def test_memory_of_a_snapshot_has_its_pages_before_the_first_save(tmp_path: Path, blocking: bool) -> None:
    with CheckpointManager(str(tmp_path), rank=0, world_size=1, store=None) as manager:
        manager.reserve(State({"w": torch.ones(1 << 20)}), blocking=blocking)
        buffer = manager._saving._buffer
        buffer._join()
        address, pages = buffer._image.data_ptr(), -(-buffer._image.numel() // mmap.PAGESIZE)
        assert pages > 1024
        assert sum(present(address, pages)) == pages


def test_a_load_makes_large_tensors_ready_and_no_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"large": torch.ones(1 << 20), "small": torch.ones((1 << 20) - 1), "other": torch.ones(3 << 19)}
    manager = CheckpointManager(str(tmp_path), rank=0, world_size=1, store=None)
    manager.save(1, State(state)).result()
    asked: list[int] = []

    def spy(ranges: Iterable[tuple[int, int]]) -> contextlib.AbstractContextManager[None]:
        asked.extend(size for _, size in ranges)
        return contextlib.nullcontext()

    monkeypatch.setattr(loading, "made_ready", spy)
    restored = manager.restore()
    assert restored is not None
    assert sorted(asked) == [4 << 20, 6 << 20]
    assert all(torch.equal(restored.shared[name], tensor) for name, tensor in state.items())


def test_without_a_thread_a_load_goes_on(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with made_ready([(address_of(memory), len(memory))]):
        memory[0] = 1


def test_memory_that_cannot_be_had_changes_nothing(memory: mmap.mmap) -> None:
    with made_ready([(mmap.PAGESIZE, mmap.PAGESIZE), (address_of(memory), len(memory))]):  # nothing is mapped there
        pass
    assert sum(present(address_of(memory))) == 1
