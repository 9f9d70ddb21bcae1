"""The file of records: appended by several processes, bounded, and whole after a crash."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fireflyer.base.errors import Busy, NoSpace, UsageError
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.core.validation.reports import NodeReport, parse_node_report, report_line
from fireflyer.validators.stress import record_file
from fireflyer.validators.stress.record_file import append_record, read_records


def record(node: str, seen_ns: int = 1, *, model: str = "m") -> NodeRecord:
    return NodeRecord(node=node, model=model, seen_ns=seen_ns, figures={"gemm_flop_per_s": 100.0})


PEERS = [record(f"n{number}") for number in range(6)]


def test_records_are_appended_and_read(tmp_path: Path) -> None:
    path = str(tmp_path / "records.jsonl")
    for one in PEERS:
        append_record(path, one)
    assert read_records(path) == PEERS


def test_releases_that_do_not_know_repetitions_read_records_without(tmp_path: Path) -> None:
    class Older(msgspec.Struct, forbid_unknown_fields=True):
        version: int
        node: str
        model: str
        seen_ns: int
        figures: dict[str, float]
        digests: dict[str, str]

    path = tmp_path / "records.jsonl"
    append_record(str(path), PEERS[0])
    assert msgspec.json.decode(path.read_bytes(), type=Older).node == "n0"
    report = NodeReport(events=(), record=PEERS[0])
    line = report_line(report)
    assert parse_node_report(line) == report
    assert "repeated" not in line
    repeated = msgspec.structs.replace(PEERS[1], repeated={"gemm_flop_per_s": (1.0, 100.0, 100.0)})
    append_record(str(path), repeated)
    assert read_records(str(path)) == [PEERS[0], repeated]


def test_of_a_file_that_has_grown_for_years_the_newest_records_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.jsonl"
    for one in PEERS:
        append_record(str(path), one)
    *_, last = path.read_bytes().splitlines(keepends=True)
    newest = sum(map(len, path.read_bytes().splitlines(keepends=True)[-2:]))
    for size, found in ((newest, 2), (newest + 1, 2), (newest - 1, 1), (len(last), 1), (len(last) - 1, 0)):
        monkeypatch.setattr(record_file, "MAX_RECORD_BYTES", size)
        assert read_records(str(path)) == PEERS[len(PEERS) - found :], size
    monkeypatch.undo()
    monkeypatch.setattr(record_file, "MAX_RECORDS", 3)
    assert read_records(str(path)) == PEERS[-3:]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"node":"n"}', '{"node":"n","model":"m","seen_ns":1,"figures":{"x":-1}}', "\xff"]
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    append_record(str(path), PEERS[0])
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(UsageError, match="line 2"):
        read_records(str(path))


# --- bounded ---


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a file that may have ten records."""
    append_record(str(tmp_path / "probe"), record("n0"))
    monkeypatch.setattr(record_file, "MAX_RECORD_BYTES", 10 * (tmp_path / "probe").stat().st_size)
    return str(tmp_path / "records.jsonl")


def told(path: str) -> list[tuple[str, int]]:
    return [(one.node, one.seen_ns) for one in read_records(path)]


def test_a_file_that_is_full_keeps_the_newest_record_of_each_node_and_the_newest_others(path: str) -> None:
    for node, seen_ns in (("n0", 1), ("n1", 1), ("n1", 2), ("n0", 3), *(("n2", time) for time in range(1, 7))):
        append_record(path, record(node, seen_ns))
    assert len(told(path)) == 10
    append_record(path, record("n3", 9))
    assert told(path) == [("n1", 2), ("n0", 3), ("n2", 5), ("n2", 6), ("n3", 9)], "five: half of what it may have"


def test_the_same_node_of_another_model_is_another(path: str) -> None:
    append_record(path, record("n0", 1, model="x"))
    for time in range(1, 12):
        append_record(path, record("n0", time))
    assert told(path)[0] == ("n0", 1)
    assert len(told(path)) <= 6


def test_where_nodes_are_more_than_half_of_it_their_newest_records_are_kept_up_to_three_quarters(path: str) -> None:
    for number in range(10):
        append_record(path, record(f"n{number}"))
    append_record(path, record("n0", 2))
    assert told(path) == [("n4", 1), ("n5", 1), ("n6", 1), ("n7", 1), ("n8", 1), ("n9", 1), ("n0", 2)]


def test_a_file_never_grows_beyond_its_bound_by_more_than_a_record(path: str) -> None:
    sizes = []
    for number in range(200):
        append_record(path, record(f"n{number % 7}", number % 9))
        sizes.append(os.stat(path).st_size)
    assert max(sizes) <= record_file.MAX_RECORD_BYTES
    assert {node for node, _ in told(path)} == {f"n{number}" for number in range(7)}


def test_a_file_keeps_its_mode_and_a_link_leads_to_it(path: str, tmp_path: Path) -> None:
    append_record(path, record("n0"))
    os.chmod(path, 0o660)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    for time in range(1, 12):
        append_record(str(link), record("n1", time))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    assert link.is_symlink()
    assert told(path)[0] == ("n0", 1)


# --- crashes, and others ---


class Died(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_after_a_crash_while_it_is_compacted_nothing_is_lost(
    path: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for time in range(1, 11):
        append_record(path, record("n0", time % 10))

    def die(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(os, call, die)
        with pytest.raises(Died):
            append_record(path, record("n1", 5))
    assert len(Path(path).read_bytes().splitlines()) == 11, "the old file, with what was appended"
    append_record(path, record("n2", 6))
    assert told(path)[-2:] == [("n1", 5), ("n2", 6)]
    assert len(told(path)) == 5
    assert not os.path.exists(f"{path}.new")


def test_a_new_file_is_on_the_disk_before_it_has_the_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(name)
            return function(*given)

        return call

    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    for time in range(1, 12):
        append_record(path, record("n0", time % 10))
    assert calls == ["fsync", "rename", "fsync"], "of the file, then of its directory"


def test_a_line_that_a_dying_process_has_begun_is_cut_off(path: str) -> None:
    append_record(path, record("n0"))
    with open(path, "ab") as file:
        file.write(b'{"node":"n1","mo')
    append_record(path, record("n2"))
    assert told(path) == [("n0", 1), ("n2", 1)]


@pytest.mark.parametrize("text", ['{"kind": "notes", "of": [1, 2]}', "my notes", "{}\n[1, 2]"])
def test_a_file_of_something_else_loses_nothing(path: str, text: str) -> None:
    Path(path).write_text(text)
    with pytest.raises(UsageError, match="ends with a line that is no record"):
        append_record(path, PEERS[0])
    assert Path(path).read_text() == text


def test_a_whole_record_without_its_end_stays(path: str) -> None:
    append_record(path, PEERS[0])
    Path(path).write_bytes(Path(path).read_bytes()[:-1])
    append_record(path, PEERS[1])
    assert read_records(path) == PEERS[:2]


def test_who_reads_leaves_out_a_line_that_a_dying_process_has_begun(path: str) -> None:
    append_record(path, record("n0"))
    with open(path, "ab") as file:
        file.write(b'{"node":"n1","mo')
    assert told(path) == [("n0", 1)]


@pytest.mark.parametrize("call", ["fchown", "fsync", "rename"])
def test_a_file_that_cannot_be_compacted_grows_on(path: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fchown`: the file is of another user, and the writer of its group."""
    for time in range(1, 11):
        append_record(path, record("n0", time % 10))

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        patch.setattr(os, "getegid", lambda: -1)
        append_record(path, record("n1", 5))
    assert told(path)[-1] == ("n1", 5)
    assert len(Path(path).read_bytes().splitlines()) == 11
    assert not os.path.exists(f"{path}.new")


def test_a_full_disk_leaves_no_part_of_a_line(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append_record(path, record("n0"))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(NoSpace):
            append_record(path, record("n1"))
    assert told(path) == [("n0", 1)]


def test_who_waits_for_a_file_that_is_replaced_appends_to_the_new_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process has opened the file, and gets its lock when the first has compacted it."""
    for time in range(1, 11):
        append_record(path, record("n0", time % 10))
    waits = threading.Event()
    locked = record_file._locked

    def told_that_it_waits(name: str, fd: int, ends_s: float) -> bool:
        if threading.current_thread() is not threading.main_thread():
            waits.set()
        return locked(name, fd, ends_s)

    compact = record_file._compact

    def when_the_other_waits(name: str, fd: int) -> None:
        second.start()
        assert waits.wait(60)
        compact(name, fd)

    second = threading.Thread(target=append_record, args=(path, record("n2", 7)))
    monkeypatch.setattr(record_file, "_locked", told_that_it_waits)
    monkeypatch.setattr(record_file, "_compact", when_the_other_waits)
    append_record(path, record("n1", 6))
    second.join()
    assert told(path)[-2:] == [("n1", 6), ("n2", 7)]


def test_records_of_several_writers_are_all_there(tmp_path: Path) -> None:
    path = str(tmp_path / "records.jsonl")

    def write(node: str) -> None:
        for time in range(1, 21):
            append_record(path, record(node, time))

    writers = [threading.Thread(target=write, args=(node,)) for node in ("n0", "n1", "n2")]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert sorted(told(path)) == [(node, time) for node in ("n0", "n1", "n2") for time in range(1, 21)]


def test_a_lock_that_is_held_without_end_is_said(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append_record(path, record("n0"))
    monkeypatch.setattr(record_file, "_LOCK_S", 0.0)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Busy, match=r"another process holds the lock of .*records\.jsonl; the record was not"):
            append_record(path, record("n1"))
    assert told(path) == [("n0", 1)]


def test_without_locks_a_file_is_appended_to_and_never_compacted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_fd: int, _what: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for time in range(1, 16):
        append_record(path, record("n0", time % 10))
    assert os.stat(path).st_size > record_file.MAX_RECORD_BYTES
