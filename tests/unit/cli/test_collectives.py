"""`ff collectives explain`: what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.support.collectives.flight_dumps import Call, Trouble, World, dumps_of, label

from fireflyer.base.units import SECOND
from fireflyer.cli import main
from fireflyer.cli.collectives.command import EXIT_UNDECIDED
from fireflyer.collectives.flight import LinkEnd, write_dump

Capture = pytest.CaptureFixture[str]
CALLS: list[Call] = [("allreduce", "f32", "sum", 1000, -1)] * 6


def written(directory: Path, world: World) -> str:
    for dump in dumps_of(world):
        write_dump(str(directory / "flight"), dump)
    return str(directory / "flight")


def test_names_the_culprit_first_and_shows_every_rank(tmp_path: Path, capsys: Capture) -> None:
    world = World([0, 0, 1, 1], CALLS, "stalled", rank=2, at=3, raised=True)
    assert main(["collectives", "explain", written(tmp_path, world)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "STALLED in group attempt-0/collectives/world/1"
    assert lines[1] == f"{label(world, 2)} stopped inside allreduce #3 of 1000 f32 after 20 of 40 chunks"
    assert lines[2].startswith("  - ranks 0, 1, 3 raised: ")
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["rank", "operation", "state", "chunks", "idle", "waits", "for", "late"]
    assert [line.split(" (")[0] for line in table[1:]] == ["rank 2", "rank 0", "rank 1", "rank 3"]
    assert "20/40" in table[1]


@pytest.mark.parametrize(("trouble", "verdict"), [("none", "nothing"), ("gone", "gone"), ("absent", "absent")])
def test_json_says_the_same(tmp_path: Path, capsys: Capture, trouble: Trouble, verdict: str) -> None:
    place = written(tmp_path, World([0, 0, 1, 1], CALLS, trouble, rank=2, at=3))
    assert main(["collectives", "explain", "--json", place]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["verdict"] == verdict
    assert [culprit["rank"] for culprit in found["culprits"]] == ([] if trouble == "none" else [2])
    assert [row["rank"] for row in found["ranks"]] == [0, 1, 2, 3]


def test_a_connection_on_which_bytes_got_lost_is_named(tmp_path: Path, capsys: Capture) -> None:
    """Neither end is certain to be to blame, but the verdict is clear."""
    at_ns, ago_ns = 100 * SECOND, 91 * SECOND
    ends = {
        0: LinkEnd(rank=1, channel=0, at_ns=at_ns, sent=5000, sent_ns=ago_ns),
        1: LinkEnd(rank=0, channel=0, at_ns=at_ns, received=3000, awaiting_since_ns=ago_ns),
    }
    for dump in dumps_of(World([0, 1], CALLS, "stalled", rank=1, at=3, raised=True)):
        snapshot = msgspec.structs.replace(dump.snapshot, links=(ends[dump.rank],))
        write_dump(str(tmp_path), msgspec.structs.replace(dump, snapshot=snapshot))
    assert main(["collectives", "explain", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("LINK in group")
    assert "5000 bytes sent, 3000 bytes received" in lines[1]
    assert main(["collectives", "explain", "--json", str(tmp_path)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [(link["sender"], link["receiver"], link["side"]) for link in found["links"]] == [(0, 1, "network")]


def test_an_unclear_verdict_has_an_exit_code_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    place = written(tmp_path, World([0, 0, 1, 1, 2, 2], CALLS, "absent", rank=3, at=2, lost={1, 2, 3, 4, 5}))
    assert main(["collectives", "explain", place]) == EXIT_UNDECIDED == 3
    assert "collect the others" in capsys.readouterr().out


def test_every_group_gets_a_verdict_in_the_order_of_time(tmp_path: Path, capsys: Capture) -> None:
    place = written(tmp_path, World([0, 0], CALLS, "absent", rank=1, at=2))
    for dump in dumps_of(World([0, 0], CALLS)):
        earlier = msgspec.structs.replace(dump.snapshot, realtime_ns=dump.snapshot.realtime_ns - 10**12)
        write_dump(place, msgspec.structs.replace(dump, group="first", snapshot=earlier))
    assert main(["collectives", "explain", place]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if " in group " in line]
    assert heads == ["NOTHING in group first", "ABSENT in group attempt-0/collectives/world/1"]


def test_bad_files_are_named_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    place = written(tmp_path, World([0, 0], CALLS))
    whole = next(Path(place).rglob("flight-1.json"))
    half = tmp_path / "half.json"
    half.write_bytes(whole.read_bytes()[:500])
    other = tmp_path / "other.json"
    other.write_bytes(whole.read_bytes().replace(b'"world_size": 2', b'"world_size": 3'))
    for argv, code, said in (
        ([str(tmp_path / "no")], 1, "no' does not exist; give the dumps of a job"),
        ([str(half)], 1, "half.json is not a flight recorder dump, or is damaged"),
        ([place, str(other)], 2, "are of different groups: world_size is 2 and 3"),
        ([], 2, "Missing argument 'DUMP...'"),
        ([""], 1, "'' does not exist"),
    ):
        assert main(["collectives", "explain", *argv]) == code
        shown = capsys.readouterr()
        assert shown.out == ""
        assert said in shown.err
        assert shown.err.count("\n") == 1


def test_the_torch_file_of_a_rank_is_not_taken_for_a_dump(tmp_path: Path, capsys: Capture) -> None:
    place = written(tmp_path, World([0, 0], CALLS))
    trace = next(Path(place).rglob("torch_rank_1"))
    assert main(["collectives", "explain", str(trace)]) == 1
    assert "not a flight recorder dump" in capsys.readouterr().err
