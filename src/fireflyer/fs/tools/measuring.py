"""What a tree can do: a large file, many small ones, names. The same for a cluster and for a directory here, so that
one can be put beside the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, Protocol

import msgspec

from fireflyer.base.units import KIB, MIB
from fireflyer.fs.tools.trees import Tree, join

__all__ = ["Load", "Measurement", "measure"]

BLOCK_BYTES: Final = 4 * MIB
RECORD_BYTES: Final = 4 * KIB
RECORDS_TOGETHER: Final = 64
RECORDS: Final = 4096


class _Batching(Tree, Protocol):
    def read_batch(self, reads: Sequence[tuple[Any, int, memoryview]]) -> list[int]: ...


class Load(msgspec.Struct, frozen=True):
    large_bytes: int
    files: int
    small_bytes: int
    jobs: int
    """Threads for small files and names."""


class Measurement(msgspec.Struct, frozen=True):
    what: str
    per_s: float
    unit: str
    """B: bytes; else what is counted."""


def measure(tree: _Batching, directory: str, load: Load, *, doing: Callable[[str], None]) -> list[Measurement]:
    """In `directory`, which is made for it and removed. `doing` hears what comes next. Reads follow writes, so a file
    system with a cache of its own may answer from memory."""
    tree.mkdir(directory)
    try:
        found = list(_large(tree, join(directory, "large"), load, doing))
        found += _small(tree, join(directory, "small"), load, doing)
    finally:
        tree.rmtree(directory)
    return found


def _large(tree: _Batching, path: str, load: Load, doing: Callable[[str], None]) -> Iterator[Measurement]:
    block = memoryview(bytearray(os.urandom(MIB) * (BLOCK_BYTES // MIB)))
    blocks = max(1, load.large_bytes // BLOCK_BYTES)
    doing("write a large file")
    with _timed() as took:
        file = tree.open(path, "xb")
        for _ in range(blocks):
            left = block
            while left:
                left = left[file.write(left) or 0 :]
        file.fsync()
        file.close()
    yield Measurement("write, one file", blocks * BLOCK_BYTES / took(), "B")
    doing("read it")
    with _timed() as took:
        file = tree.open(path, "rb")
        while file.readinto(block):
            pass
        file.close()
    yield Measurement("read, one file", blocks * BLOCK_BYTES / took(), "B")
    doing("read records of it")
    file = tree.open(path, "rb")
    places = blocks * BLOCK_BYTES // RECORD_BYTES
    records = [block[at * RECORD_BYTES : (at + 1) * RECORD_BYTES] for at in range(RECORDS_TOGETHER)]
    with _timed() as took:
        for first in range(0, RECORDS, RECORDS_TOGETHER):
            # 2654435761: Knuth's multiplicative hash, so that no order of places helps anybody.
            offsets = [(first + at) * 2654435761 % places * RECORD_BYTES for at in range(RECORDS_TOGETHER)]
            tree.read_batch([(file, offset, record) for offset, record in zip(offsets, records, strict=True)])
    file.close()
    yield Measurement(f"read {RECORD_BYTES // KIB} KiB, {RECORDS_TOGETHER} at a time", RECORDS / took(), "reads")


def _small(tree: _Batching, directory: str, load: Load, doing: Callable[[str], None]) -> Iterator[Measurement]:
    data = os.urandom(load.small_bytes)
    tree.mkdir(directory)
    paths = [join(directory, f"{number:08d}") for number in range(load.files)]

    def write(path: str) -> None:
        file = tree.open(path, "xb")
        left = memoryview(data)
        while left:
            left = left[file.write(left) or 0 :]
        file.close()

    def read(path: str) -> None:
        file = tree.open(path, "rb")
        while file.read(max(1, load.small_bytes)):
            pass
        file.close()

    with ThreadPoolExecutor(load.jobs) as pool:
        actions: tuple[tuple[str, Callable[[str], object], int], ...] = (
            ("write small files", write, load.small_bytes),
            ("read small files", read, load.small_bytes),
            ("stat", tree.stat, 0),
        )
        for what, action, size in actions:
            doing(what)
            with _timed() as took:
                for _ in pool.map(action, paths):
                    pass
            yield Measurement(what, load.files / took(), "files")
            if size:
                yield Measurement(f"{what}, bytes", load.files * size / took(), "B")
    doing("list")
    with _timed() as took:
        count = sum(1 for _ in tree.scandir(directory))
    yield Measurement("list with attributes", count / took(), "names")
    doing("remove")
    with _timed() as took:
        tree.rmtree(directory)
    yield Measurement("remove", count / took(), "names")


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    """Seconds of the block, when it is over."""
    began_ns = time.perf_counter_ns()
    ended: list[int] = []
    yield lambda: max(1, ended[0] - began_ns) / 1e9
    ended.append(time.perf_counter_ns())
