"""Data sets in 3FS: packed, read in batches, read on while storage nodes die; with the records of a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.patience import allowed_s

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.data import MixtureSampler, RecordLoader, RecordSet, RecordSetWriter, ResumableSampler, Source
from fireflyer.data.concatenation import Concatenation
from fireflyer.data.packing import Encoding, PackOptions, pack
from fireflyer.fs.tools import connections
from fireflyer.fs.tools.addresses import Address

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

RECORDS = [np.random.default_rng(at).bytes(at * 37 % 3000) for at in range(1500)]


class Silent:
    def begun(self, total_bytes: int, done_bytes: int, records: int) -> None: ...
    def advanced(self, source_bytes: int, records: int) -> None: ...
    def skipped(self, problem: str) -> None: ...


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Of its own: its nodes are killed."""
    found = LocalCluster(tmp_path_factory.mktemp("records"))
    try:
        found.ff("up", "--detach", "--relaxed", "--targets-per-node", "2")
        yield found
    finally:
        connections.close_all()
        found.close()


@pytest.fixture(scope="module")
def url(cluster: LocalCluster) -> str:
    prefix = Address(directory=str(cluster.directory)).prefix
    connections.at(prefix + "/").files.makedirs("/records")
    with RecordSetWriter(f"{prefix}/records", shard_bytes=64 << 10) as writer:
        for record in RECORDS:
            writer.add(record)
    return f"{prefix}/records"


@pytest.fixture
def whole(cluster: LocalCluster) -> None:
    cluster.wait(cluster.whole)


def test_a_set_in_3fs_has_the_bytes_and_records_of_one_in_a_directory(whole: None, url: str, tmp_path: Path) -> None:
    with RecordSetWriter(str(tmp_path), shard_bytes=64 << 10) as writer:
        for record in RECORDS:
            writer.add(record)
    location = connections.at(url)
    for path in tmp_path.iterdir():
        with closing(location.files.open(f"{location.path}/{path.name}", "rb")) as file:
            assert file.read() == path.read_bytes()
    indices = np.random.default_rng(1).integers(-1500, 1500, 700)
    with RecordSet(url, max_open_shards=3) as remote, RecordSet(str(tmp_path)) as local:
        assert remote.shards == local.shards
        assert [bytes(one) for one in remote.read_batch(indices)] == [RECORDS[at] for at in indices]
        assert [bytes(one) for one in remote] == [bytes(one) for one in local] == RECORDS
        assert remote.lengths().tolist() == local.lengths().tolist()


def test_another_process_reads_by_the_same_name(whole: None, url: str) -> None:
    """Also a forked one, which must not use its parent's connection, and one that was sent a pickle."""
    program = f"""
import multiprocessing, os, pickle, sys
from fireflyer.data import RecordSet
records = RecordSet({url!r})
first = bytes(records[7])
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(records.__getitem__, []) == []
pid = os.fork()
if not pid:
    os._exit(0 if bytes(records[7]) == first else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert bytes(pickle.loads(pickle.dumps(records))[7]) == first
assert bytes(records[8])
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    subprocess.run(command, check=True, timeout=allowed_s(100))


def test_a_node_that_is_killed_costs_time_only(whole: None, cluster: LocalCluster, url: str) -> None:
    """While batches are read ahead; the order and every byte stay, and the loader never fails."""
    sampler = ResumableSampler(len(RECORDS), global_batch=50, seed=3)
    wanted = [RECORDS[at] for at in sampler.stream(0, 4500)]
    got: list[bytes] = []
    with RecordSet(url) as records, RecordLoader(records, sampler, depth=4, threads=2) as loader:
        for batch in loader:
            got += [bytes(one) for one in batch.records]
            if len(got) == 1000:
                os.kill(cluster.process("node-2"), signal.SIGKILL)
            if len(got) == 4500:
                break
    assert got == wanted


def test_a_node_that_is_killed_while_a_set_is_packed_costs_time_only(
    whole: None, cluster: LocalCluster, url: str, tmp_path: Path
) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b"".join(b'{"text":"%d %s"}\n' % (at, b"x" * (at % 900)) for at in range(3000)))
    target = url.replace("/records", "/packed")

    class Kills(Silent):
        records = 0

        def advanced(self, source_bytes: int, records: int) -> None:
            self.records += records
            if self.records == 1200:
                os.kill(cluster.process("node-1"), signal.SIGKILL)

    options = PackOptions(format="jsonl", field="text", shard_bytes=128 << 10)
    packed = pack([str(lines)], target, Encoding(), options, Kills())
    assert packed.records == 3000
    with RecordSet(target) as records:
        assert [bytes(one) for one in records] == [b"%d %s" % (at, b"x" * (at % 900)) for at in range(3000)]


def test_a_packer_that_is_killed_goes_on(whole: None, cluster: LocalCluster, url: str, tmp_path: Path) -> None:
    """`ff data pack`, killed when some shards are there; nobody sees a data set until it is whole."""
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b"".join(b'{"text":"%d"}\n' % at for at in range(40_000)))
    target = url.replace("/records", "/killed")
    command = [sys.executable, "-P", "-m", "fireflyer", "data", "pack", "-f", "jsonl", "--field", "text"]
    command += ["--shard-size", "32KiB", str(lines), target]
    location = connections.at(target)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as packer:
        while not location.files.exists(f"{location.path}/shard-00003.ffr"):  # type: ignore[attr-defined]
            assert packer.poll() is None
        packer.kill()
    with pytest.raises(NotFound):
        RecordSet(target)
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=allowed_s(200)).stdout
    assert "40000 records" in said
    assert "packed before" in said
    with RecordSet(target) as records:
        assert [bytes(one) for one in records] == [b"%d" % at for at in range(40_000)]
    left = {entry.name for entry in location.files.scandir(location.path)}
    assert left == {"dataset.json", *(shard.name for shard in records.shards)}


def test_a_mixture_of_3fs_and_a_directory(whole: None, url: str, tmp_path: Path) -> None:
    with RecordSetWriter(str(tmp_path)) as writer:
        for at in range(40):
            writer.add(b"local %d" % at)
    sources = [Source("remote", 1500, 0.25), Source("local", 40, 0.75)]
    sampler = MixtureSampler(sources, global_batch=16, seed=1)
    every = RECORDS + [b"local %d" % at for at in range(40)]
    parts = Concatenation([RecordSet(url), RecordSet(str(tmp_path))])
    with RecordLoader(parts, sampler, rank=1, world_size=2) as loader:
        for step, batch in zip(range(20), loader, strict=False):
            mine = sampler.batch(16 * step, 1, 2)
            assert [bytes(one) for one in batch.records] == [every[at] for at in mine]
            assert sum(one.startswith(b"local") for one in map(bytes, batch.records)) == 6


def test_damage_names_shard_and_record_also_through_ff_data_verify(
    whole: None, cluster: LocalCluster, url: str, tmp_path: Path
) -> None:
    target = url.replace("/records", "/damaged")
    location = connections.at(target)
    location.files.makedirs(location.path)
    with RecordSetWriter(target, shard_bytes=4096) as writer:
        for record in RECORDS[:60]:
            writer.add(record)
    with RecordSet(target) as records:
        at = next(number for number in range(20, 60) if len(RECORDS[number]) > 100)
        shard, number = records.locate(at)
        name = records.shards[shard].name
    with closing(location.files.open(f"{location.path}/{name}", "r+b")) as file:
        content = file.read() or b""
        place = content.index(RECORDS[at]) + 50
        file.seek(place)
        file.write(bytes([content[place] ^ 1]))
    said = rf"/damaged/{name}: record {number} has CRC32C"
    with RecordSet(target) as records, pytest.raises(DataCorruption, match=said):
        records.read_batch(range(60))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fireflyer", "data", "verify", target],
        capture_output=True, text=True, timeout=allowed_s(100), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{name}: record {number} has CRC32C" in done.stderr
    assert done.stderr.count("has CRC32C") == 1


def test_no_cluster_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_FS", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no cluster is named"):
        RecordSet("ff:///data/a")
