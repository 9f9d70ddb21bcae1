"""Many shards as one row of records, and a manifest that can be believed or is refused."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fireflyer.base.errors import DataCorruption, Exists, NotFound, UsageError
from fireflyer.data import RecordSet, RecordSetWriter
from fireflyer.native import crc32c
from fireflyer.sim.disk import Fault, FaultKind, MountedDisk, SimDisk
from fireflyer.sim.outcomes import enumerate_outcomes
from fireflyer.sim.world import SimCrash

RECORDS = [b"%d" % number * (number % 40) for number in range(200)]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    with RecordSetWriter(str(tmp_path), shard_bytes=1024, meta={"made": "here"}) as writer:
        assert [writer.add(record) for record in RECORDS] == list(range(len(RECORDS)))
    return str(tmp_path)


def test_records_are_numbered_through_all_shards(directory: str) -> None:
    with RecordSet(directory) as records:
        assert len(records.shards) > 5
        assert all(shard.file_bytes <= 1024 for shard in records.shards)
        assert len(records) == len(RECORDS)
        assert [bytes(record) for record in records] == RECORDS
        assert bytes(records[-1]) == RECORDS[-1]
        assert records.lengths().tolist() == [len(record) for record in RECORDS]
        assert records.meta == {"made": "here"}
        assert records.array(3, np.uint8).tobytes() == RECORDS[3]
        for index in (200, -201):
            with pytest.raises(IndexError, match=f"record {index} is out of range; there are 200"):
                records[index]


def test_few_shards_stay_open_and_views_outlive_them(directory: str) -> None:
    records = RecordSet(directory, max_open_shards=2)
    views = [records[number] for number in range(len(RECORDS))]
    assert [bytes(view) for view in views] == RECORDS


def test_threads_share_a_record_set(directory: str) -> None:
    records = RecordSet(directory, max_open_shards=3)
    seen: list[bool] = []

    def read(step: int) -> None:
        seen.append(all(bytes(records[k * step % 200]) == RECORDS[k * step % 200] for k in range(600)))

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 7, 31, 101)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


def test_an_empty_set_and_a_pickled_one(tmp_path: Path, directory: str) -> None:
    (tmp_path / "empty").mkdir()
    RecordSetWriter(str(tmp_path / "empty")).commit()
    empty = RecordSet(str(tmp_path / "empty"))
    assert (len(empty), list(empty), empty.lengths().tolist()) == (0, [], [])
    twin = pickle.loads(pickle.dumps(RecordSet(directory, verify="first")))
    assert (twin.verify, bytes(twin[7])) == ("first", RECORDS[7])


def test_a_set_is_written_once_and_not_halfway(tmp_path: Path, directory: str) -> None:
    with pytest.raises(Exists, match="holds a data set already"):
        RecordSetWriter(directory)
    with pytest.raises(NotFound, match="missing is not a directory; create it first"):
        RecordSetWriter(str(tmp_path / "missing"))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(TypeError), RecordSetWriter(str(other), shard_bytes=1024) as writer:
        list(map(writer.add, [*RECORDS, "no bytes"]))  # type: ignore[arg-type]
    assert list(other.iterdir()) == []
    with pytest.raises(UsageError, match="does not fit"), RecordSetWriter(str(other), shard_bytes=1024) as writer:
        writer.add(b"x" * 1024)
    with pytest.raises(NotFound):
        RecordSet(str(other))


def test_adding_a_record_looks_at_no_finished_shard(tmp_path: Path) -> None:
    """Of tens of thousands each would be looked at for every record."""
    looked = [0]

    class Counted:
        @property
        def records(self) -> int:
            looked[0] += 1
            return 2

    writer = RecordSetWriter(str(tmp_path), done=([Counted()] * 50, []))  # type: ignore[list-item]
    assert [writer.add(b"x") for _ in range(20)] == list(range(100, 120))
    writer.suspend()
    assert looked == [50]


def test_a_shard_of_another_set_is_refused(tmp_path: Path, directory: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with RecordSetWriter(str(other), shard_bytes=1024) as writer:
        for record in RECORDS:
            writer.add(record[::-1])
    (other / "shard-00001.ffr").replace(tmp_path / "shard-00001.ffr")
    records = RecordSet(directory)
    assert bytes(records[0]) == RECORDS[0]
    with pytest.raises(DataCorruption, match=r"shard-00001\.ffr: a valid shard, but not the one"):
        list(records)


def forge(directory: str, **changes: object) -> None:
    """The manifest with other content and a right checksum."""
    path = Path(directory, "dataset.json")
    body = msgspec.json.encode(msgspec.json.decode(path.read_bytes())["body"] | changes)
    path.write_bytes(msgspec.json.encode({"crc32c": crc32c(body), "body": msgspec.Raw(body)}))


def shard(**changes: object) -> dict[str, object]:
    return {"name": "shard-00000.ffr", "records": 1, "data_bytes": 1, "file_bytes": 1, "index_crc": 1} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": 2},
        {"shards": [shard(name="../../etc/passwd")]},
        {"shards": [shard(name="..")]},
        {"shards": [shard(name="")]},
        {"shards": [shard(records=-1)]},
        {"shards": [shard(records=1 << 62)]},
        {"shards": [shard(records="many")]},
        {"shards": 3},
    ],
)
def test_hostile_manifests_are_refused(directory: str, changes: dict[str, object]) -> None:
    forge(directory, **changes)
    with pytest.raises(DataCorruption, match=r"dataset\.json: ") as caught:
        RecordSet(directory)
    assert "\n" not in str(caught.value)


def test_an_edited_or_cut_manifest_is_refused(directory: str) -> None:
    path = Path(directory, "dataset.json")
    whole = path.read_bytes()
    for content in (whole.replace(b'"records":', b'"records": '), whole[:-1], b"", b"[]", b"{}"):
        path.write_bytes(content)
        with pytest.raises(DataCorruption, match=r"dataset\.json: "):
            RecordSet(directory)


def export(disk: MountedDisk, target: Path) -> None:
    target.mkdir()
    for name in disk.list("/set"):
        file = disk.open(f"/set/{name}")
        (target / name).write_bytes(file.pread(file.size(), 0))


def test_a_crash_anywhere_leaves_the_whole_set_or_none(tmp_path: Path) -> None:
    """Power loss before and after every operation of the writer, with each thing the disk may then have kept."""

    def program(disk: SimDisk) -> None:
        mount = disk.mount()
        mount.mkdir("/set")
        mount.sync_dir("/")
        with RecordSetWriter("/set", shard_bytes=256, disk=mount) as writer:
            for record in RECORDS[:12]:
                writer.add(record)

    untroubled = SimDisk()
    program(untroubled)
    whole = survivors = 0
    for index in range(len(untroubled.operations)):
        for kind in (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER):
            disk = SimDisk()
            disk.faults.append(Fault(kind=kind, index=index))
            with pytest.raises(SimCrash):
                program(disk)
            for outcome in enumerate_outcomes(disk.pending(), limit=16):
                survivor = disk.clone()
                survivor.crash(outcome)
                mount = survivor.mount()
                survivors += 1
                if mount.exists("/set/dataset.json"):
                    whole += 1
                    target = tmp_path / str(survivors)
                    export(mount, target)
                    assert [bytes(record) for record in RecordSet(str(target))] == RECORDS[:12]
    assert survivors > 50
    assert whole > 1
