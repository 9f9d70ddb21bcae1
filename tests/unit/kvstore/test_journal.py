"""The embedded store after power cuts: of what LMDB had not synced any pages may have reached the disk, in any mix."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import lmdb
import pytest

from fireflyer.base.errors import Busy, DataCorruption, FireflyerError, PermanentError
from fireflyer.kvstore import lmdb_file
from fireflyer.kvstore.core.keys import KeyRange
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.journal import NAME, Journal
from fireflyer.kvstore.lmdb_file import LmdbFile
from fireflyer.runtime.disk import RealDisk

PAGE_BYTES = 4096
Records = dict[bytes, bytes]


class SmallJournal(Journal):
    def __init__(self, path: str) -> None:
        super().__init__(path, segment_bytes=1 << 18)


class Watched(LmdbFile):
    """Remembers LMDB's file as it was when it was last synced."""

    def _sync_all(self) -> None:
        self._env.sync(True)
        self.synced = Path(self._data).read_bytes()
        super()._sync_all()


class CutWhileOpening(Watched):
    """The power goes when the records have been done again, before anything of that is synced."""

    into: Path
    rng: random.Random

    def _open(self, map_bytes: int, disk: RealDisk) -> None:
        assert self._journal.pages is not None
        lmdb_file._restore(self._data, self._journal.pages)
        self.synced = Path(self._data).read_bytes()
        super()._open(map_bytes, disk)

    def _checkpoint(self) -> None:
        power_cut(self, self.into, self.rng)
        raise PermanentError("the power is gone")


def power_cut(store: Watched, into: Path, rng: random.Random) -> None:
    """What a disk may have afterwards."""
    shutil.copytree(store.path, into)
    now = Path(store.path, "data.mdb").read_bytes()
    synced = store.synced.ljust(len(now), b"\0")
    share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    mixed = bytearray(now)
    for at in range(0, len(now), PAGE_BYTES):
        if rng.random() >= share:
            mixed[at : at + PAGE_BYTES] = synced[at : at + PAGE_BYTES]
    into.joinpath("data.mdb").write_bytes(mixed)


def some_batch(rng: random.Random, records: Records) -> list[Mutations]:
    batch = []
    for _ in range(rng.randrange(1, 4)):
        cleared: tuple[KeyRange, ...] = ()
        if rng.random() < 0.2:
            begin, end = sorted(b"%03d" % rng.randrange(300) for _ in range(2))
            cleared = (KeyRange(begin, end),)
            for key in [one for one in records if begin <= one < end]:
                del records[key]
        writes: dict[bytes, bytes | None] = {}
        for _ in range(rng.randrange(6)):
            value = (
                rng.randbytes(300_000 if rng.random() < 0.01 else rng.choice([10, 500, 9000]))
                if rng.random() < 0.8
                else None
            )
            writes[b"%03d" % rng.randrange(300)] = value
        for key, value in writes.items():
            records.pop(key, None)
            if value is not None:
                records[key] = value
        batch.append(Mutations(cleared, tuple(sorted(writes.items()))))
    return batch


def contents(store: LmdbFile) -> tuple[int, Records]:
    snapshot = store.snapshot()
    page = snapshot.scan(KeyRange(b"", None), 100_000, reverse=False)
    version = snapshot.version
    snapshot.close()
    return version, dict(page.items)


def small(patch: pytest.MonkeyPatch) -> None:
    """Many checkpoints, and commits that are too large for the journal."""
    patch.setattr(lmdb_file, "CHECKPOINT_EVERY", 20)
    patch.setattr(lmdb_file, "Journal", SmallJournal)


def cut_again_and_again(path: Path, seed: int, *, rounds: int = 2, batches: int = 60) -> None:
    rng, records, version = random.Random(seed), Records(), 0
    for number in range(0, 2 * rounds, 2):
        store = Watched(str(path / f"{number}"), map_bytes=1 << 27)
        assert contents(store) == (version, records)
        for _ in range(rng.randrange(batches)):
            version += 1
            store.write(version, some_batch(rng, records))
        power_cut(store, path / f"{number + 1}", rng)
        store.close()
        CutWhileOpening.into, CutWhileOpening.rng = path / f"{number + 2}", rng
        with pytest.raises(PermanentError, match="the power is gone"):
            CutWhileOpening(str(path / f"{number + 1}"), map_bytes=1 << 27)


@pytest.mark.parametrize("seed", range(4))
def test_all_that_was_answered_is_there_after_a_power_cut(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    cut_again_and_again(tmp_path, seed)


def lost_seed(path: Path) -> int:
    for seed in range(20):
        path.joinpath(f"s{seed}").mkdir()
        try:
            cut_again_and_again(path / f"s{seed}", seed)
        except (AssertionError, FireflyerError):
            return seed
    return -1


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["pages are used again", "the file does not go back", "the journal is not read"])
def test_mutants_lose_something(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    if mutant == "pages are used again":
        original = LmdbFile._sync_all

        def without_pin(self: LmdbFile) -> None:
            original(self)
            assert self._pin is not None
            self._pin.abort()
            self._pin = None

        monkeypatch.setattr(LmdbFile, "_sync_all", without_pin)
    elif mutant == "the file does not go back":
        monkeypatch.setattr(lmdb_file, "_restore", lambda *_: None)
    else:
        monkeypatch.setattr(Journal, "records", lambda _: [])
    assert lost_seed(tmp_path) >= 0


def test_a_torn_record_is_none_and_what_is_taken_back_as_well(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.switch(b"pages" * 100)
    kept, gone = (Journal.encode([Mutations((), ((b"k", value),))]) for value in (b"kept", b"gone"))
    journal.append(1, kept)
    journal.append(2, gone)
    journal.undo(2)
    end = journal._segment * journal._segment_bytes + journal._at
    journal.append(2, gone)
    os.pwrite(journal._fd, b"\xff", end + 30)
    journal.close()
    again = Journal(str(tmp_path))
    assert again.pages == b"pages" * 100
    assert [(one.version, one.batch[0].writes) for one in again.records()] == [(1, ((b"k", b"kept"),))]
    again.append(2, gone)
    again.close()
    last = Journal(str(tmp_path))
    assert [one.version for one in last.records()] == [1, 2]
    last.switch(b"other")
    assert last.records() == []
    last.close()


def test_a_store_whose_journal_is_lost_is_refused(tmp_path: Path) -> None:
    store = LmdbFile(str(tmp_path / "s"), map_bytes=1 << 27)
    store.write(1, [Mutations((), ((b"a", b"1"),))])
    store.copy(str(tmp_path / "copy"))
    store.close()
    copy = LmdbFile(str(tmp_path / "copy"), map_bytes=1 << 27)
    assert contents(copy) == (1, {b"a": b"1"})
    copy.close()
    (tmp_path / "s" / NAME).unlink()
    with pytest.raises(DataCorruption, match="its journal is missing"):
        LmdbFile(str(tmp_path / "s"), map_bytes=1 << 27)


def test_a_store_of_the_format_before_is_taken_over(tmp_path: Path) -> None:
    value = b"1"
    env = lmdb.open(str(tmp_path / "s"), max_dbs=2)
    records, state = env.open_db(b"records"), env.open_db(b"state")
    with env.begin(write=True) as txn:
        txn.put(b"a", value + lmdb_file._crc(b"a", value), db=records)
        txn.put(b"format", b"fireflyer kvstore 1", db=state)
        txn.put(b"version", (5).to_bytes(8, "big"), db=state)
    env.close()
    for version in range(6, 9):
        store = LmdbFile(str(tmp_path / "s"), map_bytes=1 << 27)
        assert contents(store) == (version - 1, {b"a": value})
        store.write(version, [Mutations((), ((b"a", value := b"%d" % version),))])
        store.close()


def test_names_are_durable_before_anything_counts_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new store's, and those of the format before."""
    durable: set[str] = set()
    sync_dir, switch = RealDisk.sync_dir, Journal.switch

    def syncs(disk: RealDisk, path: str) -> None:
        sync_dir(disk, path)
        if path.endswith("/s"):
            durable.update(os.listdir(path))

    def switches(journal: Journal, pages: bytes) -> None:
        assert {NAME, "data.mdb"} <= durable
        switch(journal, pages)

    monkeypatch.setattr(RealDisk, "sync_dir", syncs)
    monkeypatch.setattr(Journal, "switch", switches)
    LmdbFile(str(tmp_path / "s"), map_bytes=1 << 27).close()


def test_any_number_of_snapshots_leaves_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    monkeypatch.setattr(lmdb_file, "MAX_READERS", 4)
    store = LmdbFile(str(tmp_path / "s"), map_bytes=1 << 27)
    open_ = [store.snapshot() for _ in range(4)]
    for _ in range(20):
        with pytest.raises(Busy, match="4 transactions are open"):
            store.snapshot()
    for version in range(1, 50):
        store.write(version, [Mutations((), ((b"a", b"%d" % version),))])
    for one in open_:
        one.close()
        one.close()
    assert contents(store) == (49, {b"a": b"49"})
    assert len([store.snapshot() for _ in range(4)]) == 4
    store.close()


@pytest.mark.parametrize("journal", ["of the store", "of the backup", "none"])
def test_a_backup_beside_the_journal_of_another_store_is_refused(journal: str, tmp_path: Path) -> None:
    store = LmdbFile(str(tmp_path / "s"), map_bytes=1 << 27)
    for version in range(1, 20):
        store.write(version, [Mutations((), ((b"%d" % version, bytes(5000)),))])
    store.copy(str(tmp_path / "backup"))
    for version in range(20, 30):
        store.write(version, [Mutations((), ((b"%d" % version, bytes(5000)),))])
    store.close()
    shutil.copy(tmp_path / "backup" / "data.mdb", tmp_path / "s" / "data.mdb")
    if journal == "of the backup":
        shutil.copy(tmp_path / "backup" / NAME, tmp_path / "s" / NAME)
        store = LmdbFile(str(tmp_path / "s"), map_bytes=1 << 27)
        assert contents(store) == (19, {b"%d" % version: bytes(5000) for version in range(1, 20)})
        store.close()
        return
    if journal == "none":
        (tmp_path / "s" / NAME).unlink()
    with pytest.raises(
        DataCorruption, match="its journal is missing" if journal == "none" else "older than its journal"
    ):
        LmdbFile(str(tmp_path / "s"), map_bytes=1 << 27)


def test_a_store_whose_newest_header_is_damaged_does_not_go_back_to_the_older_one(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    body = Journal.encode([Mutations((), ((b"k", b"v"),))])
    for number in range(1, 4):
        journal.switch(b"pages %d" % number)
        journal.append(number, body)
    place = journal._segment * journal._segment_bytes
    os.pwrite(journal._fd, b"?", place + 24)
    with pytest.raises(DataCorruption, match="the journal header"):
        Journal(str(tmp_path))
    os.pwrite(journal._fd, b"p", place + 24)
    journal.switch(b"pages 4")
    os.pwrite(journal._fd, b"?", journal._segment * journal._segment_bytes + 24)  # was cut off
    journal.close()
    journal = Journal(str(tmp_path))
    assert journal.pages == b"pages 3"
    assert [one.version for one in journal.records()] == [3]
    journal.close()
