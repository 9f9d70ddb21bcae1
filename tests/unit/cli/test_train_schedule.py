"""`ff train schedule`: its table, picture, JSON and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fireflyer.cli.main import EXIT_USAGE, main
from fireflyer.codesign.schedule import SCHEDULES

Capture = pytest.CaptureFixture[str]
COMMAND = ("train", "schedule")
OF_8 = ("--stages", "8", "--micro-batches", "32")


def table(text: str) -> dict[str, list[str]]:
    lines = text.split("\n\n")[0].splitlines()[1:]
    return {name: cells for name, *cells in map(str.split, lines)}


def test_the_table_has_every_schedule(capsys: Capture) -> None:
    assert main([*COMMAND, *OF_8]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["1f1b"] == ["117", "96", "1.219", "21", "17.9%", "8", "1x"]
    assert rows["dualpipe"] == ["102", "96", "1.062", "6", "5.9%", "9", "2x"]
    assert list(rows) == list(SCHEDULES)


def test_times_of_overlapped_passes_and_messages_count(capsys: Capture) -> None:
    assert main([*COMMAND, "dualpipe", "dualpipev", "1f1b", *OF_8, "--overlapped", "2.5"]) == 0
    rows = table(capsys.readouterr().out)
    assert {name: cells[0] for name, cells in rows.items()} == {"dualpipe": "89", "dualpipev": "89.5", "1f1b": "117"}
    assert main([*COMMAND, "1f1b", *OF_8, "--send", "0.1"]) == 0
    assert table(capsys.readouterr().out)["1f1b"][0] == "123.8"


def test_a_schedule_that_cannot_be_built_has_its_reason_below_the_table(capsys: Capture) -> None:
    odd = ("--stages", "7", "--micro-batches", "32")
    assert main([*COMMAND, *odd]) == 0
    out = capsys.readouterr().out
    assert set(table(out)["dualpipe"]) == {"-"}
    assert "dualpipe: dualpipe needs an even number of ranks" in out
    assert main([*COMMAND, "dualpipe", *odd]) == EXIT_USAGE
    assert "error: dualpipe needs an even number of ranks P" in capsys.readouterr().err


def test_layers_are_cut_into_balanced_stages(capsys: Capture) -> None:
    assert main([*COMMAND, "1f1b", *OF_8, "--layers", "0.1,61x1,1.2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["schedules"]
    assert sum(row["layers"]) == 63
    assert row["ideal"] == pytest.approx(96)
    assert row["bubble"] > 21
    assert row["imbalance"] == pytest.approx(8 / (62.3 / 8))


def test_the_layout_of_pipelines_that_share_nics_is_explained(capsys: Capture) -> None:
    shared = (*OF_8, "--send", "0.1", "--replicas-per-nic", "8")
    assert main([*COMMAND, "1f1b", *shared]) == 0
    assert "1f1b: offset takes 1.06 of the time without messages (lockstep 1.46" in capsys.readouterr().out
    assert main([*COMMAND, "1f1b", *shared, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["schedules"]
    assert row["layout"] == "offset"
    assert {name: round(value, 2) for name, value in row["slowdowns"].items()} == {
        "lockstep": 1.46,
        "offset": 1.06,
        "rotated": 1.12,
        "one-node": 1.0,
    }
    assert sum(row["ranks"][0].values()) == pytest.approx(row["total"])


def test_a_picture_replaces_the_one_before_it(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.svg"
    path.write_text("before")
    assert main([*COMMAND, "zbv", "--stages", "4", "--micro-batches", "8", "--svg", str(path)]) == 0
    assert path.read_text().startswith("<svg ")
    assert f"Picture: {path}" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir()] == ["a.svg"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("2f2b", *OF_8), "there is no schedule '2f2b'; use gpipe, 1f1b,"),
        ((*OF_8, "--svg", "a.svg"), "--svg draws one schedule; give one NAME"),
        (("1f1b", *OF_8, "--layers", "61*1"), "--layers '61*1' is no cost; write costs as 1.2, or 61x1"),
        (("1f1b", *OF_8, "--layers", "9999x1"), "--layers has more than 4096 layers"),
        (("1f1b", *OF_8, "--layers", "9x0"), "--layers has no layer that costs more than 0"),
        (("1f1b", *OF_8, "--layers", "7x1"), "7 layers do not fill 8 stages"),
        (("1f1b", *OF_8, "--weights", "3"), "weights 3 is a part of backward 2; give at most that"),
        (("1f1b", *OF_8, "--overlapped", "4"), "give 2 to 3"),
        (("1f1b", *OF_8, "--forward", "nan"), "forward_s has nan"),
        (
            ("1f1b", "--stages", "64", "--micro-batches", "4096", "--replicas-per-nic", "8"),
            "8 pipelines have 4194304 passes, more than 262144; use fewer --micro-batches",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: tuple[str, ...], said: str, capsys: Capture) -> None:
    assert main([*COMMAND, *arguments]) == EXIT_USAGE
    assert said in capsys.readouterr().err


def test_passes_that_take_no_time_are_no_error(tmp_path: Path, capsys: Capture) -> None:
    nothing = ("--forward", "0", "--backward", "0", "--weights", "0", "--overlapped", "0")
    path = str(tmp_path / "a.svg")
    assert main([*COMMAND, "dualpipev", "--stages", "2", "--micro-batches", "4", *nothing, "--svg", path]) == 0
    assert table(capsys.readouterr().out)["dualpipev"][0] == "0"
