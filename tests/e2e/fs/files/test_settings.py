"""Quotas, defaults, the trash and the metadata of a cluster of this machine, by the commands of administrators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster

import fireflyer.fs

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    found = LocalCluster(tmp_path)
    try:
        found.ff("up", "--detach", "--relaxed", "--targets-per-node", "2")
        yield found
    finally:
        found.close()


def test_what_administrators_set_holds_and_metadata_comes_back(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(70_000))
    cluster.ff("mkdir", "/d", "/d/in")
    assert cluster.ff("quota", "/d", code=1) == (
        "error: /d: this directory has no quota; a quota of a directory above it may apply\n"
    )
    assert cluster.ff("quota", "--bytes", "100KiB", "/d") == "/d: 0 B of 100.0 KiB, 2 inodes\n"
    assert cluster.ff("quota", "--inodes", "4", "/d") == "/d: 0 B of 100.0 KiB, 2 of 4 inodes\n"
    cluster.ff("put", str(tmp_path / "file"), "/d/in/first")
    refused = cluster.ff("put", str(tmp_path / "file"), "/d/second", code=1)
    assert "is limited to 102400 bytes, 70000 are used, 70000 more were requested; see: ff fs quota /d\n" in refused
    assert cluster.ff("quota", "/d").startswith("/d: 68.4 KiB of 100.0 KiB, ")
    cluster.ff("mkdir", "/t")
    kept = cluster.ff("defaults", "--trash", "7d", "--chunk", "64KiB", "/t")
    assert kept == "/t: chunks of 64.0 KiB, default stripe, trash for 7 days\n"
    cluster.ff("put", str(tmp_path / "file"), "/t/f")
    cluster.ff("rm", "/t/f")
    [name] = cluster.ff("ls", f"/.trash/{os.getuid()}").split()
    cluster.ff("mv", f"/.trash/{os.getuid()}/{name}", "/t/f")
    assert len(cluster.ff("cat", "/t/f")) == 70_000
    listed = cluster.ff("find", "/")

    assert "the cluster is running already (process" in cluster.ff("admin", "fsck", code=1)
    (tmp_path / "later").write_bytes(b"made after the dump" * 4_000)
    cluster.ff("down")
    assert cluster.ff("admin", "fsck") == "no problems found\n"
    dump, store = tmp_path / "dump", cluster.directory / "manager-1" / "store"
    assert cluster.ff("admin", "dump", str(dump)).endswith(f" rows in {dump}\n")
    cluster.ff("up", "--detach", "--relaxed")
    for number in range(4):
        cluster.ff("put", str(tmp_path / "later"), f"/later{number}")
    cluster.ff("down")
    store.rename(tmp_path / "lost")
    cluster.ff("admin", "load", str(dump))
    cluster.ff("up", "--detach", "--relaxed")
    assert cluster.ff("find", "/") == listed
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as fs:
        for number in range(4):
            with fs.open(f"/new{number}", "wb") as file:
                file.seek(50_000)
                file.write(b"end")
            assert fs.open(f"/new{number}", "rb").read() == bytes(50_000) + b"end", (
                "bytes of what was made after the dump"
            )
        for number in range(4):
            fs.unlink(f"/new{number}")
    assert len(cluster.ff("cat", "/d/in/first")) == 70_000
