"""Several managers, one after another: each finds the logs by their indexes, and one that hangs spoils nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.objects.memory import MemoryObjects

from fireflyer.base.errors import DataCorruption, FireflyerError, NotFound
from fireflyer.cluster.objects import LogAnswer, LogChunk, LogEnd, LogStore, RunKey
from fireflyer.cluster.objects.log_indexes import Index, Segment, says_most
from fireflyer.cluster.objects.named_files import DirectoryFiles, NamedFile, NamedFiles

RUN = RunKey(12, 3)


class CountedFiles(NamedFiles):
    """Of a directory that all managers reach; counts what is read, and fails when it is told to."""

    def __init__(self, root: Path) -> None:
        self._files = DirectoryFiles(str(root))
        self.read: list[str] = []
        self.listed: list[str] = []
        self.fails: Callable[[str, str], bool] = lambda _what, _name: False

    def put(self, name: str, data: bytes) -> None:
        self._files.put(name, data)
        self._check("put", name)

    def get(self, name: str, max_bytes: int) -> bytes:
        self.read.append(name)
        return self._files.get(name, max_bytes)

    def list(self, folder: str) -> list[NamedFile]:
        self.listed.append(folder)
        return self._files.list(folder)

    def remove(self, name: str) -> None:
        self._check("remove", name)
        self._files.remove(name)

    def _check(self, what: str, name: str) -> None:
        if self.fails(what, name):
            raise FireflyerError("the object store fails")


class Site:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = MemoryObjects()
        self.files = CountedFiles(root / "indexes")

    def manager(self, name: str) -> LogStore:
        """With a directory of its own."""
        return LogStore(str(self.root / name), self.objects, index_files=self.files, segment_bytes=64)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def send(store: LogStore, data: bytes, *, run: RunKey = RUN, stream: str = "rank-0", close: bool = False) -> LogAnswer:
    """All of `data`, of which a node has everything, as a node sends it."""
    answer = store.append(run, LogChunk(stream, 0, b""))
    while answer.end < len(data):
        answer = store.append(run, LogChunk(stream, answer.end, data[answer.end : answer.end + 7]))
    return store.close(run, LogEnd(stream, len(data))) if close else answer


def whole(store: LogStore, stream: str = "rank-0") -> bytes:
    data = b""
    while (page := store.read(RUN, stream, len(data))).data:
        data += page.data
    return data


TEXT = bytes(range(65, 91)) * 20


def test_the_next_manager_has_what_was_durable_and_gets_the_rest_again(site: Site) -> None:
    first = site.manager("m1")
    answer = send(first, TEXT[:310])
    second = site.manager("m2")
    assert whole(second) == TEXT[: answer.durable]
    assert 0 < answer.durable < 310
    assert send(second, TEXT, close=True) == LogAnswer(len(TEXT), len(TEXT), closed=True)
    assert whole(second) == TEXT
    assert whole(site.manager("m1")) == TEXT, "the first one leads again, and has older bytes of its own"
    assert second.changed_ns(RUN) > 0


def test_it_reads_the_indexes_of_the_run_that_is_asked_for_and_no_others(site: Site) -> None:
    first = site.manager("m1")
    for task in range(5):
        send(first, TEXT[:60], run=RunKey(task, 0), close=True)
    send(first, TEXT, close=True)
    site.files.read.clear()
    site.files.listed.clear()
    second = site.manager("m2")
    assert whole(second) == TEXT
    assert len(site.files.read) == 1
    assert set(site.files.listed) == {"12/3"}


def test_each_log_has_one_version_of_its_index_and_old_ones_go(site: Site) -> None:
    for name in ("m1", "m2", "m1"):
        send(site.manager(name), TEXT * (2 if name == "m2" else 3))
    assert len(site.files.list("12/3")) == 1


def test_a_manager_that_hangs_and_writes_late_spoils_nothing(site: Site) -> None:
    hung = site.manager("m1")
    send(hung, TEXT[:200])
    second = site.manager("m2")
    send(second, TEXT, close=True)
    hung.append(RUN, LogChunk("rank-0", 200, TEXT[200:400]))  # it leads no more, and its node was not answered
    third = site.manager("m3")
    assert whole(third) == TEXT
    assert third.read(RUN, "rank-0", len(TEXT)).closed
    assert set(third.references()) <= set(site.objects.blobs)


@pytest.mark.parametrize("seed", range(6))
def test_whoever_leads_and_is_killed_or_hangs_the_log_is_what_was_written(site: Site, seed: int) -> None:
    """Managers begin at any time with what is there, and older ones go on for a while. What was said to be durable to a
    node by the one that leads stays."""
    rng = random.Random(seed)
    written = bytes(rng.randrange(97, 123) for _ in range(1500))
    managers = [site.manager("m0")]
    durable = 0
    for step in range(40):
        site.files.fails = lambda what, _name: rng.random() < (0.2 if what == "remove" else 0.05)
        if rng.random() < 0.15:
            managers = [*managers[-2:], site.manager(f"m{rng.randrange(3)}-{step}")]
        leader = rng.random() < 0.7
        store = managers[-1] if leader else rng.choice(managers)
        try:
            answer = store.append(RUN, LogChunk("rank-0", 0, b""))
            answer = store.append(
                RUN, LogChunk("rank-0", answer.end, written[answer.end : answer.end + rng.randrange(100)])
            )
        except FireflyerError:
            continue
        if store is managers[-1]:
            durable = max(durable, answer.durable)
        site.files.fails = lambda _what, _name: False
        found = whole(site.manager("reader")) if site.files.list("12/3") else b""
        assert written.startswith(found)
        assert len(found) >= durable, (seed, step)
    assert durable > 200
    assert len(site.files.list("12/3")) < 30


def test_removed_runs_have_no_index_and_a_sweep_keeps_what_others_wrote(site: Site) -> None:
    first, second = site.manager("m1"), site.manager("m2")
    send(first, TEXT, close=True)
    send(first, TEXT[::-1], run=RunKey(13, 0), close=True)
    assert second.runs() == [RUN, RunKey(13, 0)]
    assert second.collect(1 << 62) == 0, "both are named"
    second.remove(RunKey(13, 0))
    assert second.runs() == [RUN]
    assert second.collect(1 << 62) > 0
    assert whole(second) == TEXT
    with pytest.raises(NotFound):
        second.streams(RunKey(13, 0))


def test_a_damaged_index_is_said_and_stops_a_collection(site: Site) -> None:
    send(site.manager("m1"), TEXT)
    site.files.put("12/3/rank-0@ffff-0000000001", b"\xc1")
    second = site.manager("m2")
    with pytest.raises(DataCorruption, match="remove it: this log is lost"):
        second.read(RUN, "rank-0", 0)
    with pytest.raises(DataCorruption):
        second.collect(1 << 62)


def test_an_index_of_the_release_before_is_read_where_it_says_more(site: Site, tmp_path: Path) -> None:
    """It lies beside `open`, in a directory that managers shared."""
    first = site.manager("shared")
    send(first, TEXT[:200])
    (shared,) = (tmp_path / "indexes" / "12" / "3").iterdir()
    older = tmp_path / "shared" / "12" / "3" / "rank-0" / "index"
    shared.rename(older)
    assert whole(site.manager("shared"))[:150] == TEXT[:150]
    send(site.manager("shared"), TEXT)
    assert len(whole(site.manager("elsewhere"))) > 300, "from now on all have it"


def test_of_several_versions_the_one_that_says_most_counts() -> None:
    segment = Segment(0, 10, "0" * 64)
    short, long = Index(1, (segment,)), Index(1, (segment, Segment(10, 5, "1" * 64)))
    lost, closed = Index(1, (segment,), ((10, 30),)), Index(1, (segment,), closed=True)
    assert says_most([]) == Index(1)
    assert says_most([long, short]) == says_most([short, long]) == long
    assert says_most([long, lost]) == lost
    assert says_most([lost, closed, long]) == closed
