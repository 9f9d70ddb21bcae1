"""Which files can have slow tests, without importing them: to import all test files takes every worker many seconds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["can_have_slow_tests"]

_WORDS: Final = re.compile(rb"slow|campaign", re.IGNORECASE)


def can_have_slow_tests(path: Path, root: Path) -> bool:
    """Whether the file, or a conftest.py in a folder between it and `root`, names one of the markers."""
    folders = [folder for folder in path.parents if folder.is_relative_to(root) and folder != root]
    return any(_names_a_marker(file) for file in (path, *(folder / "conftest.py" for folder in folders)))


@cache
def _names_a_marker(file: Path) -> bool:
    try:
        return _WORDS.search(file.read_bytes()) is not None
    except FileNotFoundError:
        return False
