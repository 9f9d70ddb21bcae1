"""A mount of files of which some lie on chains that do not answer: the others are read as before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import Mount, mounted, needs_fuse
from tests.support.jobs.launching import wait_until
from tests.support.patience import allowed_s

from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.schema.inodes import Layout

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]
FF = [sys.executable, "-P", "-m", "fireflyer", "fs"]
MIB = 1 << 20
FRESH_S = 20
"""Less than a client tries."""
_READERS = """
import mmap, os, sys, threading
def read(path):
    fd = os.open(path, os.O_RDONLY | int(sys.argv[1]))
    memory = mmap.mmap(-1, os.fstat(fd).st_size)
    try:
        os.preadv(fd, [memory], 0)
    except OSError:
        pass
readers = [threading.Thread(target=read, args=(path,)) for path in sys.argv[2:]]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
"""
_PREADV = ("295", "327")
"""Numbers of the call, without and with flags."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.ff("up", "--detach", "--nodes", "2", "--targets-per-node", "2", "--replicas", "1", "--relaxed")
        cluster.wait(cluster.whole)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def mount(cluster: LocalCluster, tmp_path: Path) -> Iterator[Mount]:
    place = tmp_path / "place"
    place.mkdir()
    with ExitStack() as stack:
        yield stack.enter_context(mounted([*FF, "mount", str(place), "--dir", str(cluster.directory)], str(place)))


def files_of_nodes(mount: Mount, status: dict[str, Any], directory: str) -> dict[int, list[str]]:
    """Paths of files of one chunk, by the node that has it."""
    targets = [one for one in status["status"]["targets"] if one["chain"] is not None]
    node_of = {one["chain"]: one["node"] for one in targets}
    found: dict[int, list[str]] = {}
    for name in os.listdir(os.path.join(mount.path, directory)):
        path = os.path.join(mount.path, directory, name)
        (chain,) = order_of(Layout(1, MIB, 1, os.stat(path).st_ino), sorted(node_of))
        found.setdefault(node_of[chain], []).append(path)
    return found


def content_of(number: int, size: int) -> bytes:
    return bytes([number]) * size


def in_calls(process: subprocess.Popen[bytes]) -> int:
    """Threads of it that are within a read."""
    count = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            count += (task / "syscall").read_text().split()[0] in _PREADV
    return count


@pytest.mark.parametrize(
    ("how", "count", "size", "each"),
    [(os.O_DIRECT, 100, MIB, 8), (0, 100, 4 * MIB, 1)],
    ids=["direct", "through the page cache"],
)
def test_reads_of_chains_that_are_away_keep_no_others_waiting(
    cluster: LocalCluster, mount: Mount, how: int, count: int, size: int, each: int
) -> None:
    cluster.wait(cluster.whole)
    directory = os.path.join(mount.path, f"d{how}")
    os.mkdir(directory)
    cluster.ff("defaults", "--stripe", "1", f"/d{how}")
    for number in range(count):
        Path(directory, f"f{number}").write_bytes(content_of(number, size))
    by_node = files_of_nodes(mount, cluster.status(), f"d{how}")
    node, away = next(iter(by_node.items()))
    (others,) = [paths for other, paths in by_node.items() if other != node]
    stopped = cluster.process(f"node-{node}")
    with ExitStack() as stack:
        os.kill(stopped, signal.SIGSTOP)
        stack.callback(os.kill, stopped, signal.SIGCONT)
        command = [sys.executable, "-c", _READERS, str(how)]
        readers = stack.enter_context(subprocess.Popen([*command, *away * each]))
        # Before they are waited for: a process is there until its reads have ended, after a minute else.
        stack.callback(os.kill, stopped, signal.SIGCONT)
        stack.callback(readers.kill)
        wait_until(lambda: in_calls(readers) == len(away) * each, allowed_s(60), "reads that wait")
        for at in range(0, 30, 10):
            subprocess.run([*command, *others[at : at + 10]], check=True, timeout=FRESH_S)
            assert Path(others[at + 5]).read_bytes() == content_of(int(others[at + 5].rpartition("f")[2]), size)
        assert in_calls(readers) > len(away) * each // 2
