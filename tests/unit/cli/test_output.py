"""The report survives what can happen to its outputs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.jobs.job_logs import JobScript, example_log, make_log

from fireflyer.analytics.report import build_report
from fireflyer.base.errors import NoSpace, UsageError
from fireflyer.base.events import encode_log_line
from fireflyer.cli import main
from fireflyer.cli.output import show_report, write_report


def test_a_page_that_cannot_be_written_does_not_cost_the_table(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    out = io.StringIO()
    with pytest.raises(UsageError, match="it is a directory, a file is needed"):
        show_report(example_log(), html_path=str(tmp_path / "report.html"), console=Console(file=out, width=100))
    assert "Job demo · Succeeded" in out.getvalue()
    assert "Report:" not in out.getvalue()


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("the earlier page", encoding="utf-8")
    (tmp_path / "report.html.partial").symlink_to("/dev/full")
    with pytest.raises(NoSpace, match=r"write .*/report.html: no space left on the device; free some"):
        write_report(build_report(example_log()), str(page))
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == ["the earlier page"]


def test_report_of_a_run_that_a_kill_cut_in_the_middle_of_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b"".join(encode_log_line(entry) for entry in example_log())
    (tmp_path / "events.jsonl").write_bytes(lines[:-20])
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Job demo · Incomplete"
    assert shown[-1] == f"Report: {tmp_path / 'report.html'}"
    assert "Not finished" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_losses_of_another_run_are_drawn_beneath(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, log in (("broken", example_log()), ("whole", make_log(JobScript())[0])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_bytes(b"".join(encode_log_line(entry) for entry in log))
    page = tmp_path / "broken" / "report.html"
    assert main(["report", str(page.parent)]) == 0
    assert '<path class="undisturbed"' not in page.read_text(encoding="utf-8")
    assert main(["report", str(page.parent), "--undisturbed", str(tmp_path / "whole")]) == 0
    assert '<path class="undisturbed"' in page.read_text(encoding="utf-8")
    assert main(["report", str(page.parent), "--undisturbed", str(tmp_path / "none")]) == 1
    assert "run directory" in capsys.readouterr().err
