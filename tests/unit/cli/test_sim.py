"""`ff sim` writes a trace, replays it, and says what is wrong with one in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fireflyer.cli.main import main


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = str(tmp_path / "trace.csv")
    assert main(["sim", path, "--generate", "--nodes", "12", "--days", "1", "--demand", "1.2"]) == 0
    assert "43 tasks, work of 1.2" in capsys.readouterr().out
    return path


def test_four_policies_stand_beside_each_other(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["sim", trace, "--nodes", "12", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    for word in ("time sharing", "FIFO with backfill", "priority preemption", "Utilisation", "Goodput", "ETTR"):
        assert word in out
        assert word in page.read_text()
    assert page.read_text().count("<svg") == 2
    assert "<script" not in page.read_text()


def test_the_same_trace_gives_the_same_numbers(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for _ in range(2):
        assert main(["sim", trace, "--nodes", "12", "--policy", "sharing", "--policy", "preemption", "--json"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    policies = json.loads(shown[0])["policies"]
    assert [one["policy"] for one in policies] == ["time sharing", "priority preemption"]
    assert all(one["tasks"] == 43 for one in policies)


def test_a_bad_row_is_one_line_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("submit_s,nodes,work_s\n0,1,60\n1,2,x\n")
    assert main(["sim", str(path), "--nodes", "4"]) == 2
    expected = f"error: {path}: row 3: work_s 'x' is no number of seconds, such as 3600 or 0.250\n"
    assert capsys.readouterr().err == expected


def test_a_task_that_is_larger_than_the_cluster_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.csv"
    path.write_text("submit_s,nodes,work_s\n0,8,60\n")
    assert main(["sim", str(path), "--nodes", "4"]) == 2
    assert "asks for 8 nodes, and the cluster has 4; give it more nodes" in capsys.readouterr().err
