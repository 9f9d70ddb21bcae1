"""Batches of records: in order, checked, from few open shards; what is damaged is named with its shard."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.descriptors import only_free

from fireflyer.base.errors import DataCorruption, NotFound, PermanentError, PermissionDenied, UsageError
from fireflyer.data import RecordLoader, RecordSet, RecordSetWriter, ResumableSampler
from fireflyer.data.inspection import find_damage, measure_lengths
from fireflyer.data.places import ATTEMPTS
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.tools.trees import LocalTree

RECORDS = [b"%d" % number * (number % 40) for number in range(200)]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    with RecordSetWriter(str(tmp_path), shard_bytes=1024) as writer:
        for record in RECORDS:
            writer.add(record)
    return str(tmp_path)


def test_a_batch_has_the_records_in_the_order_in_which_they_were_asked_for(directory: str) -> None:
    wanted = np.random.default_rng(1).integers(-200, 200, 500)
    with RecordSet(directory) as records:
        assert [bytes(one) for one in records.read_batch(wanted)] == [RECORDS[at] for at in wanted]
        assert records.read_batch([]) == []
        assert all(one.readonly for one in records.read_batch([1, 1]))
        with pytest.raises(IndexError, match="record 200 is out of range"):
            records.read_batch([3, 200])


def test_no_more_shards_and_indexes_stay_open_than_agreed(directory: str) -> None:
    """Also where one batch needs more: they are closed as soon as it is there."""
    before = len(os.listdir("/proc/self/fd"))
    with RecordSet(directory, max_open_shards=2) as records:
        assert [bytes(one) for one in records.read_batch(range(200))] == RECORDS
        assert len(os.listdir("/proc/self/fd")) == before + 2
    assert len(os.listdir("/proc/self/fd")) == before
    with RecordSet(directory, max_index_bytes=1) as records:
        assert [bytes(one) for one in records.read_batch(range(200))] == RECORDS
        assert len(os.listdir("/proc/self/fd")) == before + 1


@pytest.mark.parametrize("bounds", [{"max_open_shards": 16}, {"max_index_bytes": 16 * 16}])
def test_a_batch_from_many_shards_opens_no_more_of_them_than_agreed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, Any]
) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    wanted = [b"%08d" % number for number in range(300)]
    with RecordSetWriter(str(tmp_path), shard_bytes=100) as writer:
        for record in wanted:
            writer.add(record)
    order = np.random.default_rng(2).permutation(300)
    with RecordSet(str(tmp_path), **bounds) as records:
        assert len(records.shards) == 300
        with only_free(18):
            assert [bytes(one) for one in records.read_batch(order)] == [wanted[at] for at in order]


def flip(path: Path, record: bytes) -> None:
    content = path.read_bytes()
    place = content.index(record)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


def test_a_corrupted_record_of_a_batch_is_named_with_its_shard(directory: str) -> None:
    with RecordSet(directory) as records:
        shard, number = records.locate(150)
        name = records.shards[shard].name
        flip(Path(directory, name), RECORDS[150])
        with pytest.raises(DataCorruption, match=f"{name}: record {number} has CRC32C"):
            records.read_batch(range(200))
        assert [bytes(one) for one in records.read_batch(range(150))] == RECORDS[:150]


def test_a_record_that_was_right_the_second_time_is_right(
    directory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bits may flip on the way, too."""
    real, spoilt = LocalTree.read_batch, [True]

    def flipping(self: LocalTree, reads: Sequence[tuple[Any, int, memoryview]]) -> list[int]:
        counts = real(self, reads)
        if spoilt and len(reads[0][2]) > 20:
            spoilt.clear()
            reads[0][2][15] ^= 1
        return counts

    with RecordSet(directory) as records:
        records.read_batch(range(200))
        monkeypatch.setattr(LocalTree, "read_batch", flipping)
        assert bytes(records[38]) == RECORDS[38]
        assert "does not match its CRC32C, reading it again" in caplog.text


def test_a_shard_that_became_shorter_is_named(directory: str) -> None:
    with RecordSet(directory) as records:
        records.read_batch([0])
        os.truncate(Path(directory, "shard-00000.ffr"), 100)
        with pytest.raises(DataCorruption, match=r"shard-00000\.ffr: it ends at 100"):
            records.read_batch(range(20))


def test_reads_that_3fs_gave_up_are_begun_again(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = LocalTree.read_batch, [errno.EIO, errno.ETIMEDOUT, errno.EIO]

    def failing(self: LocalTree, reads: Sequence[tuple[Any, int, memoryview]]) -> list[int]:
        if failures:
            raise file_error(failures.pop(), "no replica answers", "/x")
        return real(self, reads)

    with RecordSet(directory) as records:
        records.read_batch([0])
        monkeypatch.setattr(LocalTree, "read_batch", failing)
        assert bytes(records[7]) == RECORDS[7]
        failures += [errno.EIO] * 4
        with pytest.raises(PermanentError, match=r"shard-00000\.ffr: no replica answers"):
            records[7]
        failures[:] = [errno.EACCES]
        with pytest.raises(PermissionDenied):
            records[7]


def test_records_with_names(tmp_path: Path) -> None:
    with RecordSetWriter(str(tmp_path), shard_bytes=512, named=True) as writer:
        for at, record in enumerate(RECORDS[:50]):
            writer.add(record, f"files/{at}")
        with pytest.raises(UsageError, match="give a name to all or none"):
            writer.add(b"x")
    with RecordSet(str(tmp_path)) as records:
        assert [records.name(at) for at in range(50)] == [f"files/{at}" for at in range(50)]
        assert [bytes(one) for one in records] == RECORDS[:50]
    names = records.names[0].name
    (tmp_path / names).unlink()
    with RecordSet(str(tmp_path)) as records, pytest.raises(NotFound, match=names):
        records.name(0)


def test_lengths_are_measured_and_damage_is_found(directory: str) -> None:
    with RecordSet(directory) as records:
        lengths = measure_lengths(records)
        assert lengths is not None
        assert (lengths.smallest, lengths.largest) == (min(map(len, RECORDS)), max(map(len, RECORDS)))
        for one in lengths.ranges:
            inside = [len(record) for record in RECORDS if one.first <= len(record) <= one.last]
            assert (one.records, one.data_bytes) == (len(inside), sum(inside))
        assert sum(one.records for one in lengths.ranges) == len(RECORDS)
        read: list[tuple[int, int]] = []
        assert list(find_damage(records, lambda size, count: read.append((size, count)))) == []
        assert [sum(column) for column in zip(*read, strict=True)] == [sum(map(len, RECORDS)), len(RECORDS)]
        places = [records.locate(at) for at in (20, 21, 150)]
    for at, (shard, _) in zip((20, 21, 150), places, strict=True):
        flip(Path(directory, records.shards[shard].name), RECORDS[at])
    gone = next(at for at in range(len(records.shards)) if at not in {shard for shard, _ in places})
    Path(directory, records.shards[gone].name).unlink()
    with RecordSet(directory) as records:
        problems = list(find_damage(records))
    for shard, number in places:
        assert any(f"{records.shards[shard].name}: record {number} has" in one for one in problems)
    assert any(records.shards[gone].name in one for one in problems)
    assert len(problems) == 4


def test_a_shard_that_the_storage_does_not_give_is_asked_for_once(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt may take half a minute."""
    real, failed = LocalTree.read_batch, [0]
    with RecordSet(directory) as records:
        (wrong,) = (at for at in range(200) if records.locate(at) == (3, 1))
    flip(Path(directory, "shard-00003.ffr"), RECORDS[wrong])

    def failing(self: LocalTree, reads: Sequence[tuple[Any, int, memoryview]]) -> list[int]:
        file, offset, _ = reads[0]
        if os.readlink(f"/proc/self/fd/{file.fileno()}").endswith("shard-00001.ffr") and offset:
            failed[0] += 1
            raise file_error(errno.EIO, "no replica answers", "/x")
        return real(self, reads)

    monkeypatch.setattr(LocalTree, "read_batch", failing)
    with RecordSet(directory) as records:
        first, second = find_damage(records)
        last = records.shards[1].records - 1
    assert "shard-00001.ffr: no replica answers" in first
    assert first.endswith(f"; records 0 to {last} of shard-00001.ffr were not checked")
    assert "shard-00003.ffr: record 1 has CRC32C" in second
    assert failed == [ATTEMPTS]


def test_every_damaged_name_is_found(tmp_path: Path) -> None:
    with RecordSetWriter(str(tmp_path), named=True) as writer:
        for at, record in enumerate(RECORDS):
            writer.add(record, f"name-{at:03}")
    for at in (3, 4, 150):
        flip(tmp_path / "names-00000.ffr", b"name-%03d" % at)
    with RecordSet(str(tmp_path)) as records:
        problems = list(find_damage(records))
    assert [one.partition(" has CRC32C")[0] for one in problems] == [
        f"{tmp_path}/names-00000.ffr: record {at}" for at in (3, 4, 150)
    ]


def test_an_empty_set_has_no_lengths(tmp_path: Path) -> None:
    RecordSetWriter(str(tmp_path)).commit()
    with RecordSet(str(tmp_path)) as records:
        assert measure_lengths(records) is None
        assert list(find_damage(records)) == []


def test_batches_of_records_are_those_of_the_sampler_for_any_number_of_ranks(directory: str) -> None:
    sampler = ResumableSampler(200, global_batch=12, seed=4)
    with RecordSet(directory) as records:
        for ranks in (1, 2, 3):
            loaders = [
                RecordLoader(records, sampler, rank=rank, world_size=ranks, position=24) for rank in range(ranks)
            ]
            for step in range(20):
                batches = [next(loader) for loader in loaders]
                assert {batch.position for batch in batches} == {24 + 12 * step}
                found = [bytes(one) for batch in batches for one in batch.records]
                assert found == [RECORDS[at] for at in sampler.stream(24 + 12 * step, 12)]
            assert loaders[0].state() == sampler.state(24 + 12 * 20)
            for loader in loaders:
                loader.close()
