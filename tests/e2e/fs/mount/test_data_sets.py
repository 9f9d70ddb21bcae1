"""Data sets through a mount, as programs open them that know no `ff://`: the samples are the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import Mount, mounted, needs_fuse

from fireflyer.data import RecordLoader, RecordSet, RecordSetWriter, ResumableSampler
from fireflyer.fs.tools import connections
from fireflyer.fs.tools.addresses import Address

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]

RECORDS = [np.random.default_rng(at).bytes(at * 37 % 3000) for at in range(900)]
SHARD_BYTES = 64 << 10


@pytest.fixture(scope="module")
def mount(shared_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    place = str(tmp_path_factory.mktemp("place"))
    ff = [sys.executable, "-P", "-m", "fireflyer", "fs", "mount", place, "--dir", str(shared_cluster.directory)]
    with mounted(ff, place) as found:
        yield found


@pytest.fixture(scope="module")
def prefix(shared_cluster: LocalCluster) -> Iterator[str]:
    yield Address(directory=str(shared_cluster.directory)).prefix
    connections.close_all()


def write(path: str) -> None:
    with RecordSetWriter(path, shard_bytes=SHARD_BYTES) as writer:
        for record in RECORDS:
            writer.add(record)


def batches(records: RecordSet, position: int) -> list[list[bytes]]:
    """Ten, in the order of training, from a position on."""
    sampler = ResumableSampler(len(RECORDS), global_batch=32, seed=3)
    with RecordLoader(records, sampler, position=position, depth=3, threads=2) as loader:
        return [[bytes(one) for one in batch.records] for batch in islice(loader, 10)]


def test_a_set_that_was_written_by_its_address_has_the_same_samples_through_the_mount(
    mount: Mount, prefix: str, tmp_path: Path
) -> None:
    name = f"{tmp_path.name}-records"
    os.mkdir(f"{mount.path}/{name}")
    write(f"{prefix}/{name}")
    assert len(os.listdir(f"{mount.path}/{name}")) > 5, "several shards and the manifest"
    with RecordSet(f"{prefix}/{name}") as remote, RecordSet(f"{mount.path}/{name}", max_open_shards=3) as through:
        assert through.shards == remote.shards
        assert through.lengths().tolist() == remote.lengths().tolist()
        assert [bytes(one) for one in through] == [bytes(one) for one in remote] == RECORDS
        for position in (0, 640):
            assert batches(through, position) == batches(remote, position)


def test_a_program_in_the_mount_reads_the_set_as_a_directory(mount: Mount, prefix: str, tmp_path: Path) -> None:
    name = f"{tmp_path.name}-records"
    os.mkdir(f"{mount.path}/{name}")
    write(f"{prefix}/{name}")
    program = f"""
from hashlib import sha256
from fireflyer.data import RecordSet
with RecordSet({name!r}) as records:
    print(len(records), sha256(b"".join(records[at] for at in range(len(records)))).hexdigest())
"""
    assert mount.run(sys.executable, "-c", program).split() == ["900", sha256(b"".join(RECORDS)).hexdigest()]


def test_a_set_that_was_written_through_the_mount_is_read_by_its_address(
    mount: Mount, prefix: str, tmp_path: Path
) -> None:
    name = f"{tmp_path.name}-records"
    os.mkdir(f"{mount.path}/{name}")
    write(f"{mount.path}/{name}")
    with RecordSet(f"{prefix}/{name}") as remote:
        assert [bytes(one) for one in remote] == RECORDS
