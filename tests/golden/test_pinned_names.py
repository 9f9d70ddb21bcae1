"""Names that other programs know, and what is laid out by hand, are as they were when they were recorded.

A name that was renamed or removed is put back: who uses it is not in this repository. A new one is added with
`python -m tests.golden.pinned.record --add`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tests.golden.pinned.cases import CASES
from tests.golden.pinned.names import KINDS, LISTS, recorded_names
from tests.golden.pinned.recorded import case_lines, read_cases


@cache
def names_now(kind: str) -> set[str]:
    return KINDS[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_is_changed_or_removed(kind: str) -> None:
    lost = sorted(recorded_names(kind) - names_now(kind))
    assert not lost, f"{kind}: recorded, and not in the code any more: {lost}"


@pytest.mark.parametrize("kind", KINDS)
def test_new_names_are_recorded(kind: str) -> None:
    new = sorted(names_now(kind) - recorded_names(kind))
    assert not new, f"{kind}: run python -m tests.golden.pinned.record --add for {new}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_laid_out_by_hand_stays(name: str, tmp_path: Path) -> None:
    recorded, now = read_cases().get(name), case_lines(name, CASES[name](tmp_path))
    assert recorded, f"{name} is not recorded; run python -m tests.golden.pinned.record --add"
    assert now.splitlines() == recorded.splitlines()


def test_all_that_is_recorded_is_tested() -> None:
    assert {path.stem for path in LISTS.iterdir()} == set(KINDS)
    assert set(read_cases()) == set(CASES)
