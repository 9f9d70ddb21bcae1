"""The modules and functions that `docs/walks` names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = next(one for one in Path(__file__).resolve().parents if (one / "pyproject.toml").is_file())
BELOW = {
    "one-write.md": ("src/fireflyer/fs", "cpp/src/storage"),
    "one-allreduce.md": ("src/fireflyer/collectives", "cpp/src/collectives"),
    "one-crash.md": ("src/fireflyer", "cpp/src"),
}
ROW = re.compile(r"\| `(?P<module>[\w/]+\.(?P<kind>py|cpp))` \| `(?P<function>\w+)` \|")


@pytest.mark.parametrize("page", BELOW)
def test_every_function_of_a_walk_is_in_its_module(page: str) -> None:
    rows = list(ROW.finditer((ROOT / "docs/walks" / page).read_text()))
    assert len(rows) > 10
    for row in rows:
        module = ROOT / BELOW[page][row["kind"] == "cpp"] / row["module"]
        assert module.is_file(), f"{page} names {row['module']}, which is not there"
        called = rf"def {row['function']}\b" if row["kind"] == "py" else rf"\b{row['function']}\("
        assert re.search(called, module.read_text()), f"{page} names {row['function']}, which {module} has not"
