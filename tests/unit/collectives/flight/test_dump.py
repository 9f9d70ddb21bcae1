"""Dumps of the flight recorder: what comes back, what is refused, and what the recorder itself tells."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import msgspec
import pytest
from tests.support.collectives.flight_dumps import Call, World, dump_with, dumps_of, message

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.collectives.flight import (
    decode_dump,
    dump_path,
    encode_dump,
    fault_from_native,
    find_dumps,
    plan_digest,
    read_dumps,
    snapshot_from_native,
    write_dump,
)
from fireflyer.collectives.flight.dump import MAX_DUMP_BYTES, Fault
from fireflyer.collectives.flight.recorder import how_far
from fireflyer.collectives.planning.plan import make_plan
from fireflyer.native import Recorder

CALLS: list[Call] = [("allreduce", "f32", "sum", 1000, -1)] * 4


def test_a_dump_comes_back_as_it_was() -> None:
    for dump in dumps_of(World([0, 0, 1], CALLS, "stalled", rank=1, at=2, raised=True)):
        assert decode_dump(encode_dump(dump), name="it") == dump
    with_messages = dump_with(0, 2, [message("send", 1, tag=-7), message("recv", 1, state="done")])
    assert decode_dump(encode_dump(with_messages), name="it") == with_messages


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 9}, "of format 9; this version reads format 1"),
        ({"rank": 2}, "rank 2 is not a rank of 2"),
        ({"world_size": 1 << 20}, "world_size"),
        ({"group": ""}, "group"),
        ({"group": "x" * 1000}, "group"),
        ({"reason": "\x1b[31mred"}, "reason"),
        ({"labels": {"0": "rank 0", "1": "two\nlines"}}, "labels"),
        ({"labels": {"0": "", "1": "", "2": ""}}, "not a rank|too many"),
        ({"fault": ["peer_failed", 7, 0, "rank 7"]}, "fault"),
        ({"fault": {"code": "peer_failed", "rank": 7, "seq": 0, "text": "rank 7"}}, "rank 7 is not a rank of 2"),
        ({"snapshot": {}}, "snapshot"),
        ({"snapshot": None}, "snapshot"),
        ({"timeout_ns": -1}, "timeout_ns"),
        ({"timeout_ns": 1 << 70}, "timeout_ns"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], said: str) -> None:
    plain = json.loads(encode_dump(dump_with(0, 2, [])))
    with pytest.raises((DataCorruption, UsageError), match=said) as caught:
        decode_dump(json.dumps({**plain, **change}).encode(), name="flight-0.json")
    assert "flight-0.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, b'{"format": 1}', b'{"format": "1"}']
)
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(DataCorruption, match="not a flight recorder dump"):
        decode_dump(data, name="it")


def test_a_file_that_is_too_long_is_not_even_parsed() -> None:
    with pytest.raises(DataCorruption, match="longer than any dump"):
        decode_dump(b" " * (MAX_DUMP_BYTES + 1), name="it")


def test_files_are_found_by_directory_pattern_and_name(tmp_path: Path) -> None:
    dumps = dumps_of(World([0, 0], CALLS))
    paths = [write_dump(str(tmp_path / "flight"), dump) for dump in dumps]
    assert paths == [dump_path(str(tmp_path / "flight"), dumps[0].group, rank) for rank in (0, 1)]
    folder = os.path.dirname(paths[0])
    assert sorted(os.listdir(folder)) == ["flight-0.json", "flight-1.json", "torch_rank_0", "torch_rank_1"]
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    for places in (
        [str(tmp_path)],
        [folder],
        [f"{folder}/*.json"],
        paths,
        [paths[1], folder],
        [f"{tmp_path}/**/flight-*"],
    ):
        assert sorted(find_dumps(places)) == paths
    assert [dump for _, dump in read_dumps(paths)] == dumps
    write_dump(str(tmp_path / "flight"), dumps[0])  # again: replaces
    assert len(os.listdir(folder)) == 4


def test_places_without_dumps_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="contains no dumps"):
        find_dumps([str(tmp_path)])
    with pytest.raises(NotFound, match="nowhere' does not exist"):
        find_dumps([str(tmp_path / "nowhere")])
    with pytest.raises(NotFound, match="gone"):
        read_dumps([str(tmp_path / "gone.json")])


@pytest.mark.parametrize("group", ["../../etc", "/abs/olute", "..", "a b\tc", "attempt-0/collectives/world/1"])
def test_the_name_of_a_group_does_not_leave_the_directory(tmp_path: Path, group: str) -> None:
    path = dump_path(str(tmp_path), group, 0)
    assert os.path.dirname(os.path.dirname(path)) == str(tmp_path)
    assert os.path.basename(os.path.dirname(path)) not in ("", ".", "..")


def test_the_native_recorder_tells_what_a_dump_holds() -> None:
    recorder = Recorder(capacity=8)
    entry = recorder.begin(seq=3, kind="reduce", count=10, dtype="bf16", op="max", root=1, bytes=20, submitted_ns=5)
    entry.route("pipeline", recorder.algorithm("ring"), chunks=4)
    entry.started(1000)
    entry.progress(2, 4000)
    entry.saturated(3)
    recorder.begin_message(
        direction="recv", peer=2, tag=9, seq=0, count=4, dtype="u8", bytes=4, submitted_ns=6
    ).started(7)
    now_ns = time.monotonic_ns()
    snapshot = snapshot_from_native(recorder.snapshot())
    reduce, receive = snapshot.records
    assert reduce.call() == "reduce of 10 bf16 (max), root 1"
    assert (reduce.path, reduce.algorithm, reduce.state, reduce.saturated) == ("pipeline", "ring", "running", 3)
    assert (reduce.chunks_done, reduce.chunks, reduce.samples) == (2, 4, ((2, 4000),))
    assert receive.call() == "recv of 4 u8 from rank 2, tag 9"
    assert receive.message
    assert (snapshot.submitted, snapshot.finished, snapshot.dropped) == (4, 0, 0)
    assert abs(snapshot.monotonic_ns - now_ns) < 10**9
    assert abs(snapshot.realtime_ns - time.time_ns()) < 10**9
    entry.finish("peer_failed", 9000)
    assert snapshot_from_native(recorder.snapshot()).records[0].state == "failed"
    with pytest.raises(ValueError, match="no such path"):
        entry.route("magic")


def test_failures_are_put_into_words_that_can_be_printed() -> None:
    assert fault_from_native((0, -1, 0, "")) is None
    fault = fault_from_native((1, 2, 17, "rank 2 hung\nbadly\x1b[0m" + "x" * 3000))
    assert fault is not None
    assert (fault.code, fault.rank, fault.seq) == ("peer_failed", 2, 17)
    assert fault.text.isprintable()
    assert len(fault.text) == 1024


def test_a_plan_has_a_digest_of_its_own() -> None:
    assert plan_digest(make_plan((0, 0))) == plan_digest(make_plan((0, 0))) != plan_digest(make_plan((0, 1)))


def test_a_failure_says_how_far_the_operation_came_on_this_rank() -> None:
    dump = dumps_of(World([0, 0, 1], CALLS, "stalled", rank=1, at=2, raised=True))[0]
    started, number = next((one, one.seq) for one in dump.snapshot.records if one.inside and one.state != "done")
    waits = msgspec.structs.replace(started, id=number + 1, seq=number + 1, started_ns=0, chunks=0, chunks_done=0)
    records = msgspec.structs.replace(dump.snapshot, records=(started, waits))

    def said(seq: int) -> str:
        return how_far(records, Fault("peer_failed", 1, seq, f"rank 1 died during allreduce #{seq}"))

    assert said(number).startswith(f"allreduce #{number} had completed ")
    assert said(number + 1) == f"allreduce #{number + 1} had not begun on this rank"
    assert not said(number + 2)
