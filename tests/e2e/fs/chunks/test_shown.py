"""What a cluster shows of itself: figures of every service, bars of long work, questions before repairs."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.clusters.managers import ManagerProcess
from tests.support.patience import allowed_s
from tests.support.platform.running import wait_for

import fireflyer.fs
from fireflyer.fs.client import ChunkId, open_ring_to
from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.schema.inodes import FileDetails

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]
FF = [sys.executable, "-P", "-m", "fireflyer", "fs"]


@contextmanager
def cluster_in(directory: Path) -> Iterator[LocalCluster]:
    found = LocalCluster(directory)
    try:
        found.ff("up", "--detach", "--relaxed", "--nodes", "2", "--targets-per-node", "1")
        found.wait(found.whole)
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def cluster(module_path: Path) -> Iterator[LocalCluster]:
    with cluster_in(module_path) as found:
        yield found


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """For a test that stops it."""
    with cluster_in(tmp_path) as found:
        yield found


def figures(config: Path) -> dict[str, float]:
    """Of the process with this configuration: all samples of a name together."""
    said = Path(f"{config}.log").read_text()
    [address] = re.findall(r"metrics at (http://\S+)", said)
    with urllib.request.urlopen(address, timeout=allowed_s(60)) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def on_a_terminal(*command: str) -> str:
    """What it writes to one."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*FF, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # its end is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait(allowed_s(60)) == 0, said
    return said.decode()


def test_long_work_shows_how_far_it_is_where_somebody_looks(cluster: LocalCluster, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / str(number)).write_bytes(os.urandom(2_000_000))
    where = ["--dir", str(cluster.directory)]
    for command, shown in (
        (["put", "-r", str(source), "/tree"], r"Putting .* 5\.7/5\.7 MiB"),
        (["get", "-r", "/tree", str(tmp_path / "back")], r"Getting .* 5\.7/5\.7 MiB"),
        (["rm", "-r", "/tree"], r"4 names"),
    ):
        said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_a_terminal(*command, *where))
        assert re.search(shown, said), said[-400:]
    assert (tmp_path / "back" / "2").read_bytes() == (source / "2").read_bytes()


def test_nothing_is_repaired_before_somebody_has_said_so(cluster: LocalCluster) -> None:
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        with files.open("/file", "wb") as file:
            file.write(b"bytes")
        inode = files.stat("/file").inode
        assert isinstance(inode.body, FileDetails)
        with open_ring_to(str(cluster.directory)) as ring:
            chain = order_of(inode.body.layout, ring.chains())[0]
            ring.prepare_write(1, chain, ChunkId(inode.id + 100, 0), b"nobody's")
            assert not ring.wait(1).errors
    command = [*FF, "fsck", "--repair", "--dir", str(cluster.directory)]
    for answer, said in (("n\n", "Nothing was removed."), ("y\n", "1 chunk removed.")):
        done = subprocess.run(
            command, input=answer, capture_output=True, text=True, timeout=allowed_s(120), check=False
        )
        assert "[y/N]" in done.stderr  # the second time as well: nothing was done
        assert said in done.stdout + done.stderr


def test_every_service_has_figures_for_prometheus(own_cluster: LocalCluster) -> None:
    """Its processes are not those of `up`."""
    own_cluster.ff("down")
    configs = [
        own_cluster.directory / name
        for name in ("manager-1/manager.toml", "node-1/storage.toml", "node-2/storage.toml")
    ]
    with ExitStack() as stack:
        for config in configs:
            config.write_text(config.read_text().replace('metrics_listen = ""', 'metrics_listen = "localhost:0"'))
            what = config.name.removesuffix(".toml")
            stack.enter_context(ManagerProcess(str(config), what))
        with fireflyer.fs.connect(f"ff://{own_cluster.directory}") as files:
            with files.open("/file", "wb") as file:
                file.write(bytes(3_000_000))
            assert len(files.open("/file", "rb").read()) == 3_000_000
            manager, *nodes = [figures(config) for config in configs]
        assert manager["fireflyer_meta_requests_total"] >= 2
        assert {"fireflyer_inodes", "fireflyer_unlinked_inodes", "fireflyer_sessions"} <= set(manager)
        wait_for(lambda: figures(configs[0])["fireflyer_nodes_alive"] == 2, "both report", limit_s=60)
        for node in nodes:
            assert node["fireflyer_target_total_bytes"] > 0
        assert sum(node["fireflyer_storage_reads"] for node in nodes) >= 1
