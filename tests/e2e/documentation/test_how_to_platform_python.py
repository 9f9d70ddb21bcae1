"""What docs/how-to/platform-python.md says, run literally."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.support.how_to import Shell
from tests.support.jobs.cleanup import cleaned_up_at_exit

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "platform-python.md"


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_PLATFORM", raising=False)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (start,) = [block.split() for language, block in fenced if not language]
    (tmp_path / "page.py").write_text("".join(block for language, block in fenced if language == "python"))
    shell = Shell(tmp_path)
    place = ("--dir", str(tmp_path / "platform"))
    with cleaned_up_at_exit((sys.executable, "-P", "-m", "fireflyer", "down", "--force", *place)):
        shell.run(*start)
        try:
            said = shell.run("python", "page.py")
        finally:
            shell.run("ff", "down")
    assert "I am admin" in said
    assert "test: it can start now" in said
    assert "exit code 0" in said
    assert "finished succeeded" in said
    assert re.search(r"^limits: \[\(1, [0-2]\)\]$", said, re.MULTILINE), (
        "the nodes of the first task may not be free yet"
    )
    assert "why: user admin may use 1 nodes of default at a time" in said
    assert "is stopped" in said
