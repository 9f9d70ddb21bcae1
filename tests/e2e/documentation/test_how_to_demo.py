"""What docs/how-to/demo.md says. `make demo` runs the whole demonstration, first in continuous integration; here the
short one is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.how_to import Shell

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "demo.md"


def commands() -> tuple[str, str]:
    """The whole demonstration, and the short one."""
    whole, short = re.findall(r"^```\n(.*?)\n```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return whole, short


def test_continuous_integration_runs_the_whole_demonstration_of_the_page() -> None:
    assert f"$(BIN)/{commands()[0]}" in (ROOT / "Makefile").read_text()
    assert "make demo" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("command", [pytest.param(commands()[1], marks=rotating(expected_s=45), id="short")])
def test_the_short_demonstration_of_the_page(command: str, tmp_path: Path) -> None:
    """The whole one shows the same of three tasks: bits of the undisturbed run after a node was killed."""
    said = Shell(tmp_path).run(*command.split())
    assert "are bitwise those of the undisturbed run" in said
    assert (tmp_path / "build" / "demo" / "report.html").is_file()
