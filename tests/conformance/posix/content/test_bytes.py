"""One file and its twin on a local file system: the same bytes after every operation, also while storage nodes die."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.posix.both import Both
from tests.support.posix.client import ClientPlace
from tests.support.posix.core import CorePlace
from tests.support.posix.local import LocalPlace
from tests.support.posix.places import ALICE, Place, User
from tests.support.posix.real import mounted_place

LONGEST: Final = 3 << 20
"""Three chunks and more."""
MOST: Final = 150_000
"""Bytes of one operation."""
ALL_AT_ONCE: Final = 1 << 22
WHOLE: Final = 100
"""After so many operations all bytes are compared, and not only those that were read."""
LONG: Final = 20_000
_tops: Final = itertools.count(1)


@pytest.fixture
def model(local: LocalPlace | str) -> LocalPlace:
    if isinstance(local, str):
        pytest.skip(f"no file system to compare with: {local}")
    return local


class Twin:
    """Two descriptors of one file: one writes and reads, one appends."""

    def __init__(self, model: LocalPlace, subject: Place, seed: int, *, mapped: bool = False) -> None:
        place = Both(model, subject)
        place.renew(f"/twin-{next(_tops)}")
        self.user = User(place, ALICE)
        self._rng = random.Random(seed)
        self._number = self.user.open("file", os.O_RDWR | os.O_CREAT)
        self._appending = self.user.open("file", os.O_WRONLY | os.O_APPEND)
        self._acts: list[Callable[[], object]] = [self._read, self._read, self._write, self._write, self._append]
        self._acts += [self._truncate, self._punch, self._zero, self._again]
        self._acts += [self._map_read, self._map_write] if mapped else []

    def act(self) -> None:
        self._rng.choice(self._acts)()
        size = self.user.fstat(self._number).size
        if size > LONGEST:
            self.user.ftruncate(self._number, self._rng.randrange(LONGEST))

    def compare(self) -> None:
        self.user.pread(self._number, ALL_AT_ONCE, 0)

    def close(self) -> None:
        self.compare()
        self.user.close(self._appending)
        self.user.close(self._number)
        self.user.read("file")

    def _range(self) -> tuple[int, int]:
        """Often small, and around where chunks begin."""
        rng = self._rng
        size = rng.choice([1, rng.randrange(1, 100), rng.randrange(1, 5000), rng.randrange(1, MOST)])
        near = rng.choice([0, 1 << 16, 1 << 20, 2 << 20]) + rng.randrange(-100, 100)
        return max(0, rng.choice([near, rng.randrange(LONGEST)])), size

    def _bytes(self, size: int) -> bytes:
        return self._rng.randbytes(size)

    def _read(self) -> None:
        offset, size = self._range()
        self.user.pread(self._number, size, offset)

    def _write(self) -> None:
        offset, size = self._range()
        self.user.pwrite(self._number, self._bytes(size), offset)

    def _append(self) -> None:
        self.user.write(self._appending, self._bytes(self._range()[1]))

    def _truncate(self) -> None:
        self.user.ftruncate(self._number, self._range()[0])

    def _punch(self) -> None:
        self.user.fallocate(self._number, 3, *self._range())

    def _zero(self) -> None:
        self.user.fallocate(self._number, self._rng.choice([16, 17]), *self._range())

    def _again(self) -> None:
        self.user.close(self._number)
        self._number = self.user.open("file", os.O_RDWR)

    def _inside(self) -> tuple[int, int]:
        offset, size = self._range()
        length = self.user.fstat(self._number).size
        return min(offset, length), max(0, min(size, length - offset))

    def _map_read(self) -> None:
        offset, size = self._inside()
        if size:
            self.user.map_read(self._number, size, offset)

    def _map_write(self) -> None:
        offset, size = self._inside()
        if size:
            self.user.map_write(self._number, self._bytes(size), offset)


def work(twin: Twin, steps: int, between: Callable[[int], None] = lambda _: None) -> None:
    for step in range(steps):
        twin.act()
        between(step)
        if step % WHOLE == WHOLE - 1:
            twin.compare()
    twin.close()


def test_on_chunks_in_memory(model: LocalPlace) -> None:
    work(Twin(model, CorePlace(), 1), 500)


@pytest.mark.slow
def test_on_chunks_in_memory_for_long(model: LocalPlace) -> None:
    work(Twin(model, CorePlace(), 5), 5000)


@pytest.mark.slow
@pytest.mark.processes
def test_through_a_client(model: LocalPlace, client: ClientPlace) -> None:
    work(Twin(model, client, 2), 1500)


@pytest.mark.slow
@pytest.mark.processes
def test_on_a_mount(model: LocalPlace, mount: LocalPlace) -> None:
    work(Twin(model, mount, 3, mapped=True), 1500)


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Whose nodes may be killed."""
    cluster = LocalCluster(tmp_path)
    try:
        cluster.ff("up", "--detach", "--failure-timeout", "2", "--targets-per-node", "2")
        yield cluster
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_on_a_mount_while_nodes_die(model: LocalPlace, own_cluster: LocalCluster, tmp_path: Path) -> None:
    with mounted_place(own_cluster, str(tmp_path / "mount")) as place:
        assert while_nodes_die(Twin(model, place, 4, mapped=True), own_cluster, 300, every=100) == 3


@pytest.mark.campaign(expected_s=600)
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [6, 7])
def test_for_long_on_a_mount_while_nodes_die(
    model: LocalPlace, own_cluster: LocalCluster, tmp_path: Path, seed: int
) -> None:
    with mounted_place(own_cluster, str(tmp_path / "mount")) as place:
        killed = while_nodes_die(Twin(model, place, seed, mapped=True), own_cluster, LONG, every=400)
        print(f"{LONG} operations, {killed} times a node was killed")


def while_nodes_die(twin: Twin, cluster: LocalCluster, steps: int, *, every: int) -> int:
    """How often one was killed; each comes back by itself."""
    killed = 0

    def kill(step: int) -> None:
        nonlocal killed
        if step % every == every // 2:
            cluster.wait(cluster.whole)  # two replicas: one may be away at a time
            os.kill(cluster.process(f"node-{1 + killed % 3}"), signal.SIGKILL)
            killed += 1

    work(twin, steps, kill)
    return killed
