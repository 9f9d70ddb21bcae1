"""Each page of docs/how-to is named by a test that does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]
PAGES: Final = sorted(path.name for path in (ROOT / "docs" / "how-to").glob("*.md"))
TESTS: Final = {
    path: text
    for path in (ROOT / "tests").rglob("test_*.py")
    if path != Path(__file__) and "how-to" in (text := path.read_text())
}


def naming(page: str) -> list[Path]:
    """Modules of tests that name a page of docs/how-to."""
    named = re.compile(rf"(?<![\w.-]){re.escape(page)}(?!\w)")
    return [path for path, text in TESTS.items() if named.search(text)]


@pytest.mark.parametrize("page", PAGES)
def test_a_test_does_what_the_page_says(page: str) -> None:
    assert naming(page), f"no test names docs/how-to/{page}; let one do what it says, and name it"


def test_names_are_compared_whole() -> None:
    assert [path.name for path in naming("mount.md")] == ["test_how_to_mount.py"]
    assert not naming("managers.md"), "run-managers.md is another page"
    assert not naming("nothing.md")
