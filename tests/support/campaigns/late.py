"""Slow tests that are not begun once the time of a commit has passed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import pytest

__all__ = ["CHANGED_LATELY", "NOT_BEGUN", "patience_s"]

REPOSITORY: Final = Path(__file__).parents[3]
CHANGED_LATELY: Final = pytest.StashKey[frozenset[str]]()
NOT_BEGUN: Final = "the time for slow tests of this commit had passed; `make test-slow` runs all"
_MORE_S: Final = 600.0


def patience_s(item: pytest.Item, changed: frozenset[str]) -> float:
    """Seconds after the stated time within which the test may still begin: none if it is slow, some if it is of one of
    the files (POSIX paths in the repository) that were changed lately, any number if it is fast."""
    if item.get_closest_marker("slow") is None:
        return math.inf
    return _MORE_S if item.path.relative_to(REPOSITORY).as_posix() in changed else 0.0
