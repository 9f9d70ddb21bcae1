"""`ff reliability import` and `report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.reliability.published_logs import log_of_days

from fireflyer.analytics.reliability.published_failures import LINK_FAILURES
from fireflyer.analytics.reliability.tables import import_lock, table_names
from fireflyer.cli.main import main

Capture = pytest.CaptureFixture[str]

SACCT = """JobID|State|Start|End|NNodes|NodeList|AllocTRES
1|FAILED|1690000000|1690100000|1|<b>gpu</b>|gres/gpu=8
wrong|line
"""


def test_logs_become_a_report_on_the_terminal_as_json_and_as_a_page(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kern.log").write_text("".join(log_of_days(LINK_FAILURES)))
    Path("sacct.txt").write_text(SACCT)
    assert main(["reliability", "import", "t", "--kernel-log", "kern.log", "--sacct", "sacct.txt"]) == 0
    told = capsys.readouterr().out
    assert "kern.log: 213 events of 213 lines" in told
    assert "1 lines not used: it has another number of columns" in told
    assert main(["reliability", "report", "t", "--nodes", "1250", "--html", "page.html"]) == 0
    assert "InfiniBand link        213" in capsys.readouterr().out
    page = Path("page.html").read_text()
    assert "<svg" in page
    assert "script" not in page
    assert main(["reliability", "report", "t", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(day["incidents"] for day in found["days"]) == 213
    assert found["symptoms"][0]["rate"]["failures"] < 10, "those of the day on which the only known job ran"
    assert "incidents were before or after the jobs that are known" in found["notes"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import", "t"], "nothing to import"),
        (["import", "--platform", "t"], "give it first, before --platform, which took t for its PATH"),
        (["import", "--sacct", "t"], "DIRECTORY is missing, that of the tables; give it first"),
        (["import", "t", "--kernel-log", "absent"], "absent"),
        (["import", "t", "--health", "a/b=c"], "is not NODE=FILE"),
        (["import", "t", "--sacct", "."], "is a directory"),
        (["import", "t", "--run", "."], "is not the directory of a run"),
        (["report", "absent"], "absent"),
        (["report", "."], "ff reliability import"),
    ],
)
def test_what_is_not_there_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reliability", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_second_import_into_a_directory_is_refused_while_the_first_one_runs(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "sacct.txt").write_text(SACCT)
    words = ["reliability", "import", str(tmp_path / "t"), "--sacct", str(tmp_path / "sacct.txt")]
    with import_lock(str(tmp_path / "t")):
        assert main(words) != 0
    error = capsys.readouterr().err
    assert "another `ff reliability import` writes into" in error
    assert error.count("\n") == 1
    assert table_names(str(tmp_path / "t")) == []
    assert main(words) == 0, "the lock ends with the import that had it"
    assert main(words) == 0
