"""What a benchmark says of its figures: targets reached or not, cases chosen, tables with the right units."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.collectives.spans import covered
from bench.collectives.targets import Target, all_met, best_of, judged
from bench.report import (
    Bound,
    Figure,
    Measuring,
    Options,
    Result,
    measure,
    print_results,
    read_results,
    results_path,
    write_results,
)
from rich.console import Console

OURS = Figure(0.010, 0.009, 0.012, 9)
PEERS: dict[str, Figure | str] = {
    "gloo": Figure(0.055, 0.05, 0.06, 9),
    "openmpi": Figure(0.040, 0.039, 0.05, 9),
    "openmpi ring": Figure(0.030, 0.02, 0.04, 9),
    "openmpi han": "did not start",
}


def test_a_target_is_met_missed_or_not_decided() -> None:
    targets = (
        Target.times_faster("gloo", 5),
        Target.times_faster("gloo", 6),
        Target.times_faster("best openmpi", 2.5),
        Target.times_faster("openmpi han", 1),
        Target.within(1.3, "the floor"),
    )
    assert judged(targets, OURS, PEERS, Bound(0.007, "floor")) == {
        "5x faster than gloo": True,
        "6x faster than gloo": False,
        "2.5x faster than best openmpi": True,
        "faster than openmpi han": None,
        "at most 1.3 x the floor": False,
    }
    assert judged(targets[4:], OURS, PEERS, None) == {"at most 1.3 x the floor": None}


def test_the_best_setting_of_a_peer_is_the_one_with_the_smallest_median() -> None:
    assert best_of(PEERS, "openmpi") == PEERS["openmpi ring"]
    assert best_of({"openmpi": "missing"}, "openmpi") is None


@pytest.mark.parametrize(
    ("verdicts", "met"),
    [
        ({}, None),
        ({"a": True, "b": True}, True),
        ({"a": True, "b": False}, False),
        ({"a": None, "b": False}, False),
        ({"a": True, "b": None}, None),
    ],
)
def test_a_case_is_met_when_all_its_targets_are(verdicts: dict[str, bool | None], met: bool | None) -> None:
    assert all_met(verdicts) is met


def test_cases_are_chosen_by_a_part_of_the_name_or_a_pattern_for_all_of_it() -> None:
    case = "allreduce/1x4/private/fp32/186MiB"
    assert Options().selects(case)
    assert Options(only=("ddp", "1x4")).selects(case)
    assert Options(only=("allreduce/*/fp32/*",)).selects(case)
    assert not Options(only=("*/bf16/*", "1x8")).selects(case)


def test_overlapping_spans_are_counted_once() -> None:
    assert covered([[0, 2], [1, 3], [5, 6], [5.5, 5.7], [8, 7]]) == 4


def test_tables_show_units_ratios_and_verdicts() -> None:
    result = Result(
        suite="collectives",
        case="allreduce/1x4/private/fp32/1MiB",
        metric="time_s",
        better="lower",
        ours=OURS,
        peers=PEERS,
        bound=Bound(0.008, "floor"),
        target="5x faster than gloo",
        met=True,
        verdicts={"5x faster than gloo": True},
        more={"bus_bytes_per_s": 2.5e9},
    )
    console = Console(width=240)
    with console.capture() as captured:
        print_results([result], console, markdown=True)
    shown = captured.get()
    row = next(line for line in shown.splitlines() if line.startswith("| private"))
    assert row == (
        "| private/fp32/1MiB | 10.0 (9.00 to 12.0) ms "
        "| 55.0 (50.0 to 60.0) ms<br>5.5 x | 40.0 (39.0 to 50.0) ms<br>4.0 x | 30.0 (20.0 to 40.0) ms<br>3.0 x "
        "| 8.00 ms<br>ours 1.25 x | 2.50 GB/s | 5x faster than gloo: met |"
    )
    assert "missing openmpi han: did not start" in shown
    assert "targets of 1 cases: 1 met, 0 missed, 0 not decided" in shown


def test_parts_that_are_measured_one_after_the_other_are_kept_together(tmp_path: Path) -> None:
    path = results_path("fs", str(tmp_path / "bench"))
    assert read_results(path) == []
    reads, writes, again = (
        Result(suite="fs", case=case, metric="time_s", better="lower", ours=ours, peers=PEERS, bound=None, target="")
        for case, ours in (("read", OURS), ("write", OURS), ("read", Figure(0.02, 0.02, 0.02, 1)))
    )
    write_results(path, [reads])
    write_results(path, [writes], keep=True)
    write_results(path, [again], keep=True)
    assert read_results(path) == [writes, again]
    write_results(path, [reads])
    assert read_results(path) == [reads]


def test_each_result_is_told_and_written_before_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def measuring() -> Measuring:
        for number in range(2):
            assert len(read_results(results_path("fs"))) == number
            assert len(capsys.readouterr().err.splitlines()) == min(number, 1)
            yield Result(
                suite="fs", case=f"read/{number}", metric="time_s", better="lower", ours=OURS, peers=PEERS, bound=None,
                target="", note="warm",
            )  # fmt: skip
        return ("a remark",)

    suite = measure("fs", measuring(), Options())
    assert [one.case for one in suite.results] == ["read/0", "read/1"]
    assert suite.remarks == ("a remark",)
    assert capsys.readouterr().err == (
        "read/1: time 10.0 (9.00 to 12.0) ms; warm; gloo 55.0 ms, openmpi 40.0 ms, openmpi ring 30.0 ms, "
        "openmpi han missing\n"
    )


def test_a_run_that_is_ended_keeps_earlier_results_of_what_it_has_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def measuring(cases: tuple[str, ...], *, ended: bool = False) -> Measuring:
        for case in cases:
            yield Result(
                suite="fs", case=case, metric="time_s", better="lower", ours=OURS, peers={}, bound=None, target="",
            )  # fmt: skip
        if ended:
            raise KeyboardInterrupt
        return ()

    def cases() -> list[str]:
        return [one.case for one in read_results(results_path("fs"))]

    measure("fs", measuring(("read", "write", "old")), Options())
    with pytest.raises(KeyboardInterrupt):
        measure("fs", measuring(("read",), ended=True), Options())
    assert cases() == ["write", "old", "read"]
    measure("fs", measuring(("read", "write")), Options())
    assert cases() == ["read", "write"], "a whole run leaves nothing of earlier ones"
    measure("fs", measuring(("write",)), Options(only=("write",)))
    assert cases() == ["read", "write"]


def test_cases_of_checkpoints_can_be_limited_to_the_local_disk_or_to_3fs() -> None:
    disk, cluster = "save/disk/64x32MiB", "save/3FS/64x32MiB"
    for pattern, chosen in (("*/disk/64x32MiB", disk), ("3FS/", cluster), ("*/3FS/*", cluster)):
        options = Options(only=(pattern,))
        assert [case for case in (disk, cluster) if options.selects(case)] == [chosen]
