"""Logs as people read them: pages, following, searching; and their way from a file on a node."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.objects.memory import MemoryObjects
from tests.support.patience import allowed_s

from fireflyer.base.errors import DataCorruption, NotFound, Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.log_shipper import LogShipper
from fireflyer.cluster.objects import LogAnswer, LogChunk, LogEnd, LogStore, RunKey, ship_logs
from fireflyer.cluster.objects.log_store import Found, SearchPage

RUN = RunKey(12, 3)


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def store(tmp_path: Path, objects: MemoryObjects) -> LogStore:
    return LogStore(str(tmp_path / "logs"), objects, segment_bytes=32)


def write(store: LogStore, data: bytes, stream: str = "rank-0", run: RunKey = RUN) -> LogAnswer:
    end = {info.stream: info.end for info in store.streams(run)}.get(stream, 0) if run in store.runs() else 0
    return store.append(run, LogChunk(stream, end, data))


def whole(store: LogStore, stream: str = "rank-0") -> bytes:
    data = b""
    while (page := store.read(RUN, stream, len(data))).data:
        data += page.data
    return data


def test_a_segment_becomes_a_blob_and_is_durable(store: LogStore, objects: MemoryObjects) -> None:
    assert write(store, b"x" * 31) == LogAnswer(31, 0)
    assert not objects.blobs
    assert write(store, b"yy") == LogAnswer(33, 33)
    assert list(objects.blobs.values()) == [b"x" * 31 + b"yy"]
    assert list(store.references()) == list(objects.blobs)


def test_a_repetition_changes_nothing_and_a_gap_is_refused_with_the_end(store: LogStore) -> None:
    write(store, b"abc")
    assert store.append(RUN, LogChunk("rank-0", 0, b"abc")).end == 3
    assert store.append(RUN, LogChunk("rank-0", 1, b"bcd")).end == 4
    assert store.append(RUN, LogChunk("rank-0", 9, b"x")).end == 4
    assert whole(store) == b"abcd"


def test_a_page_says_where_bytes_were_lost_and_where_the_next_one_begins(store: LogStore) -> None:
    write(store, b"abc")
    store.append(RUN, LogChunk("rank-0", 10, b"xyz", lost_bytes=7))
    assert store.read(RUN, "rank-0", 0) == (0, b"abc", 3, False, False)
    assert store.read(RUN, "rank-0", 3) == (10, b"xyz", 13, False, False)
    store.append(RUN, LogChunk("rank-0", 20, lost_bytes=7))
    assert store.read(RUN, "rank-0", 13) == (20, b"", 20, False, False)


def test_many_small_pieces_are_read_as_one_page(store: LogStore) -> None:
    for number in range(50):
        write(store, b"%d " % number)
    assert store.read(RUN, "rank-0", 0).data == b"".join(b"%d " % number for number in range(50))
    assert store.read(RUN, "rank-0", 5, 7).data == whole(store)[5:12]


def test_a_log_ends_when_all_of_it_is_there(store: LogStore) -> None:
    write(store, b"abc")
    assert store.close(RUN, LogEnd("rank-0", 5)) == LogAnswer(3, 0)
    assert store.close(RUN, LogEnd("rank-0", 3)) == LogAnswer(3, 3, closed=True)
    assert store.append(RUN, LogChunk("rank-0", 3, b"more")) == LogAnswer(3, 3, closed=True)
    assert store.read(RUN, "rank-0", 0).closed
    assert not store.read(RUN, "rank-0", 0, 2).closed, "there is more to read"


def test_the_quota_is_of_the_run_and_of_all_its_logs(tmp_path: Path, objects: MemoryObjects) -> None:
    store = LogStore(str(tmp_path / "logs"), objects, max_run_bytes=10, segment_bytes=32)
    write(store, b"123456", "rank-0")
    assert write(store, b"abcdef", "rank-1") == LogAnswer(4, 4, cut=True)
    assert write(store, b"x", "rank-0").cut
    assert store.read(RUN, "rank-1", 0) == (0, b"abcd", 4, True, False)
    assert LogStore(str(tmp_path / "logs"), objects, max_run_bytes=10).append(RUN, LogChunk("launcher", 0, b"x")).cut


def test_who_follows_wakes_up_when_there_is_more(store: LogStore) -> None:
    write(store, b"abc")
    woken: list[bytes] = []

    def follow() -> None:
        store.wait(RUN, "rank-0", 3, 60 * SECOND)
        woken.append(store.read(RUN, "rank-0", 3).data)

    thread = threading.Thread(target=follow)
    thread.start()
    write(store, b"def")
    thread.join(allowed_s(30))
    assert woken == [b"def"]
    store.wait(RUN, "rank-0", 6, 1)  # comes back when its time is up


def test_what_grew_is_told_without_a_lock(tmp_path: Path, objects: MemoryObjects) -> None:
    told: list[tuple[RunKey, str, bytes]] = []
    stores: list[LogStore] = []

    def grew(run: RunKey, stream: str) -> None:
        told.append((run, stream, stores[0].read(run, stream, 0).data))

    kept = LogStore(str(tmp_path / "logs"), objects, on_growth=grew)
    stores.append(kept)
    write(kept, b"abc")
    kept.append(RUN, LogChunk("rank-0", 0, b"abc"))
    assert told == [(RUN, "rank-0", b"abc")]


def test_lines_are_found_with_their_offsets_and_in_bounded_steps(store: LogStore) -> None:
    write(store, b"step 1 loss 3\nWarning: slow\nstep 2 loss 2\nstep 3 loss")
    assert store.search(RUN, "rank-0", "LOSS", max_found=2) == SearchPage(
        (Found(0, "step 1 loss 3"), Found(28, "step 2 loss 2")), 42
    )
    assert store.search(RUN, "rank-0", "loss", 42) == SearchPage((Found(42, "step 3 loss"),), None)
    assert store.search(RUN, "rank-0", "none") == SearchPage((), None)
    for text, most in (("", 1), ("x" * 5000, 1), ("x", 0), ("x", 10_000)):
        with pytest.raises(UsageError):
            store.search(RUN, "rank-0", text, max_found=most)


@settings(max_examples=40)
@given(parts=st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\r", b"e")), max_size=8))
def test_what_is_found_is_what_grep_would_find(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    data = b"e\n".join(parts)
    store = LogStore(str(tmp_path_factory.mktemp("logs")), MemoryObjects(), segment_bytes=8)
    for start in range(0, len(data), 5):
        write(store, data[start : start + 5])
    if not data:
        return
    expected, at = [], 0
    for line in data.split(b"\n"):
        if b"e" in line.lower():
            expected.append(Found(at, line.decode(errors="replace")))
        at += len(line) + 1
    assert store.search(RUN, "rank-0", "E") == SearchPage(tuple(expected), None)


def test_what_is_not_there_is_said(store: LogStore) -> None:
    with pytest.raises(NotFound, match="run 3 of task 12 has no logs"):
        store.streams(RUN)
    write(store, b"x")
    with pytest.raises(NotFound, match="no log 'rank-1'"):
        store.read(RUN, "rank-1", 0)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "A", "rank_1", "x" * 64, "a\n", "-a"])
def test_a_name_of_a_log_is_never_a_path(store: LogStore, name: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, NotFound)):
        store.append(RUN, LogChunk(name, 0, b"x"))
    assert [path.name for path in (tmp_path / "logs").rglob("*") if path.is_file()] == []


def test_a_removed_run_is_gone_and_its_blobs_are_not_needed(store: LogStore, tmp_path: Path) -> None:
    write(store, b"x" * 40)
    write(store, b"y" * 40, run=RunKey(12, 4))
    assert store.runs() == [RUN, RunKey(12, 4)]
    before = list(store.references())
    store.remove(RUN)
    assert store.runs() == [RunKey(12, 4)]
    assert len(before) - len(list(store.references())) == 1
    store.remove(RUN)
    store.remove(RunKey(12, 4))
    assert not list((tmp_path / "logs").iterdir())


def test_a_damaged_log_leaves_the_others_readable_and_stops_a_collection(
    tmp_path: Path, objects: MemoryObjects, store: LogStore
) -> None:
    for stream in ("rank-0", "rank-1"):
        write(store, b"x" * 40, stream)
    (index,) = (tmp_path / "logs" / "12" / "3").glob("rank-0@*")
    index.write_bytes(b"\xc1")
    again = LogStore(str(tmp_path / "logs"), objects)
    assert whole(again, "rank-1") == b"x" * 40
    with pytest.raises(DataCorruption, match="this log is lost"):
        again.read(RUN, "rank-0", 0)
    with pytest.raises(DataCorruption):
        list(again.references())


def test_runs_that_are_not_used_are_unloaded(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.cluster.objects.log_store.MAX_RUNS_LOADED", 3)
    for task in range(8):
        write(store, b"%d" % task, run=RunKey(task, 0))
    assert len(store._runs) <= 3
    assert [store.read(RunKey(task, 0), "rank-0", 0).data for task in range(8)] == [b"%d" % task for task in range(8)]


class Folder:
    """Logs in files of one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sizes(self) -> dict[str, int]:
        return {path.stem: path.stat().st_size for path in sorted(self.path.glob("*.log"))}

    def read(self, stream: str, offset: int, length: int) -> bytes:
        return (self.path / f"{stream}.log").read_bytes()[offset : offset + length]

    def print_line(self, stream: str, text: str) -> None:
        with open(self.path / f"{stream}.log", "a", encoding="ascii") as file:
            file.write(text)


def test_logs_reach_the_store_while_they_are_written_and_over_a_network_that_fails(
    store: LogStore, tmp_path: Path
) -> None:
    folder = Folder(tmp_path)
    requests = 0
    seen = asyncio.Event()

    async def send(message: LogChunk | LogEnd) -> LogAnswer:
        nonlocal requests
        requests += 1
        answer = store.append(RUN, message) if isinstance(message, LogChunk) else store.close(RUN, message)
        if message.stream == "rank-1":
            seen.set()
        if requests % 3 == 0:
            raise Unreachable("the manager is not reached")
        return answer

    async def main() -> None:
        ended = asyncio.Event()
        shipping = asyncio.create_task(ship_logs(folder, send, ended, shipper=LogShipper(chunk_bytes=1000)))
        for number in range(20):
            folder.print_line("rank-0", f"line {number}\n" * 100)
            folder.print_line("rank-1", f"line {number}\n" * 100)
            await asyncio.sleep(0)
        await asyncio.wait_for(seen.wait(), allowed_s(60))
        folder.print_line("rank-2", "at the very end")
        ended.set()
        await asyncio.wait_for(shipping, allowed_s(60))

    asyncio.run(main())
    infos = {info.stream: info for info in store.streams(RUN)}
    for stream in folder.sizes():
        assert whole(store, stream) == (tmp_path / f"{stream}.log").read_bytes()
        assert infos[stream].closed


def test_bytes_of_a_file_that_its_owner_cut_are_said_to_be_lost(store: LogStore, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.print_line("rank-0", "x" * 100)

    async def send(message: LogChunk | LogEnd) -> LogAnswer:
        if isinstance(message, LogEnd):
            return store.close(RUN, message)
        if message.data:
            (tmp_path / "rank-0.log").write_bytes(b"")
        return store.append(RUN, message)

    async def main() -> None:
        ended = asyncio.Event()
        ended.set()
        async with asyncio.timeout(allowed_s(60)):
            await ship_logs(folder, send, ended, shipper=LogShipper(chunk_bytes=50))

    asyncio.run(main())
    (info,) = store.streams(RUN)
    assert (info.end, info.gaps, info.closed) == (100, ((50, 100),), True)
    assert whole(store) == b"x" * 50


def test_a_manager_that_takes_nothing_any_more_ends_the_sending(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.print_line("rank-0", "x")

    async def send(_: LogChunk | LogEnd) -> LogAnswer:
        raise NotFound("the logs of this task are not kept any more")

    async def main() -> None:
        async with asyncio.timeout(allowed_s(60)):
            await ship_logs(folder, send, asyncio.Event())

    with pytest.raises(NotFound):
        asyncio.run(main())


def test_blobs_that_no_log_names_go_when_they_are_old(store: LogStore, objects: MemoryObjects) -> None:
    other = RunKey(13, 0)
    write(store, b"a" * 40)
    write(store, b"b" * 40, run=other)
    assert store.changed_ns(other) > 0
    store.remove(other)
    assert store.changed_ns(other) == 0
    assert store.collect(0) == 0, "what is young stays: its log may not name it yet"
    assert store.collect(1 << 62) == 1
    assert list(objects.blobs.values()) == [b"a" * 40]
