"""What docs/how-to/demo.md says. `make demo` runs the whole demonstration, first in continuous integration; here the
short one is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.how_to import Shell

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "demo.md"


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    whole, short = re.findall(r"^```\n(.*?)\n```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert f"$(BIN)/{whole}" in (ROOT / "Makefile").read_text()
    assert "make demo" in (ROOT / ".ci" / "run").read_text()
    said = Shell(tmp_path).run(*short.split())
    assert "are bitwise those of the undisturbed run" in said
    assert (tmp_path / "build" / "demo" / "report.html").is_file()
