"""`ff validate history`: a measurement that was too low once leaves a trace."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cli import main
from fireflyer.cli.health.validate_cluster import check_is_of_links, links_command
from fireflyer.validators.core.validation.link_measurements import LINK_MODEL
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.stress.record_file import append_record

Capture = pytest.CaptureFixture[str]
GEMM, LINK = "cpu_gemm_flop_per_s", "link_bytes_per_s"
NO_OPTIONS: Final[dict[str, Any]] = {"client": None, "each": 1, "names": (), "at_once": 1, "limit": 1, "as_json": False}


@pytest.fixture
def records(tmp_path: Path) -> str:
    path = str(tmp_path / "records.jsonl")
    well = NodeRecord(node="a", model="m", seen_ns=1, figures={GEMM: 101.0})
    once = NodeRecord(node="b", model="m", seen_ns=2, figures={GEMM: 99.0}, repeated={GEMM: (40.0, 99.0, 100.0)})
    link = NodeRecord(node="a b", model="link", seen_ns=3, figures={LINK: 9e9}, repeated={LINK: (1e9, 9e9, 9.5e9)})
    for record in (well, once, link):
        append_record(path, record)
    return path


def test_all_measurements_of_a_figure_that_was_too_low_once_are_shown(records: str, capsys: Capture) -> None:
    assert main(["validate", "history", "--records", records]) == 0
    first, second, low, link, slow = capsys.readouterr().out.splitlines()
    assert first.startswith(("1970-01-01 ", "1969-12-31 "))
    assert first.endswith(" a: 1 figure, m")
    assert second.endswith(" b: 1 figure, m")
    assert low == f"  {GEMM} was too low at first: 40, 99, 100; 99 counts"
    assert link.endswith(" a b: 1 figure, link")
    assert slow == f"  {LINK} was too low at first: 1e+09, 9e+09, 9.5e+09; 9e+09 counts"


def test_records_of_a_node_and_its_links_and_of_low_figures_are_chosen(records: str, capsys: Capture) -> None:
    for options, nodes in ((["--node", "a"], ["a", "a b"]), (["--low"], ["b", "a b"]), (["--node", "c"], [])):
        assert main(["validate", "history", "--records", records, "--json", *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [msgspec.json.decode(line, type=NodeRecord).node for line in lines] == nodes


def test_the_newest_records_are_shown_and_how_many_older_there_are(records: str, capsys: Capture) -> None:
    assert main(["validate", "history", "--records", records, "--json", "--last", "1"]) == 0
    said = capsys.readouterr()
    assert [msgspec.json.decode(line, type=NodeRecord).node for line in said.out.splitlines()] == ["a b"]
    assert said.err == "2 older records not shown; --last shows more\n"
    for last in ("3", "4"):
        assert main(["validate", "history", "--records", records, "--last", last]) == 0
        said = capsys.readouterr()
        assert (len(said.out.splitlines()), said.err) == (5, "")


def test_links_are_not_recorded_in_a_file_of_nodes(records: str, tmp_path: Path) -> None:
    links_of_platform = inspect.unwrap(links_command.callback or links_command)
    for refuses in (check_is_of_links, lambda path: links_of_platform(**NO_OPTIONS, records=path)):
        with pytest.raises(UsageError, match=f"{records} has records of nodes.*give another file"):
            refuses(records)
    links = tmp_path / "links.jsonl"
    check_is_of_links(str(links))
    links.touch()
    check_is_of_links(str(links))
    append_record(str(links), NodeRecord(node="a b", model=LINK_MODEL, seen_ns=3, figures={LINK: 9e9}))
    check_is_of_links(str(links))


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert main(["validate", "history", "--records", str(tmp_path / "none")]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1
