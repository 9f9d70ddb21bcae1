"""Which campaigns and slow files are in turn: a part that changes with each commit, so that some commits see all."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

__all__ = ["campaign", "changed_lately", "commit_count", "expected_s", "in_turn", "parts", "rotating"]

REPOSITORY: Final = Path(__file__).parents[3]


def campaign(*, expected_s: float) -> list[pytest.MarkDecorator]:
    """Of a test that `make test-campaigns` runs to its end. `expected_s`: the processor time that it takes."""
    return [pytest.mark.slow, pytest.mark.campaign(expected_s=expected_s), pytest.mark.timeout(60 + 20 * expected_s)]


def rotating(*, expected_s: float) -> list[pytest.MarkDecorator]:
    """Of a campaign of processes that may run beside other tests: for cases of a family of which others are slow or
    fast, so that each mechanism is in every commit. `expected_s`: the processor time that it takes."""
    return [*campaign(expected_s=expected_s), pytest.mark.rotates]


def parts(costs_s: Sequence[float], most_s: float) -> list[list[int]]:
    """The positions of the tests in each part: in order, at most `most_s` of processor time in each.

    A test that takes longer by itself is in no part.
    """
    found: list[list[int]] = []
    room_s = 0.0
    for position, cost_s in enumerate(costs_s):
        if cost_s > most_s:
            continue
        if not found or cost_s > room_s:
            found.append([])
            room_s = most_s
        found[-1].append(position)
        room_s -= cost_s
    return found


def expected_s(item: pytest.Item) -> float:
    """The processor time that the campaign states. ValueError: it states none."""
    marker = item.get_closest_marker("campaign")
    stated = None if marker is None else marker.kwargs.get("expected_s")
    if not stated:
        raise ValueError(f"{item.nodeid}: a campaign states its processor time: campaign(expected_s=...)")
    return float(stated)


def in_turn(path: str, number: int, turns: int) -> bool:
    """Whether the file (POSIX path in the repository) is in the part of commit `number`, of `turns` parts.

    The part of a file depends on its path alone, so that a new file moves no other one.
    """
    return (zlib.crc32(path.encode()) - number) % turns == 0


def changed_lately(hours: float) -> frozenset[str]:
    """POSIX paths of what commits changed within `hours` before the last one; none outside a repository."""
    newest = _git("log", "-1", "--format=%ct").strip()
    if not newest:
        return frozenset()
    since = int(newest) - int(hours * 3600)
    return frozenset(_git("log", f"--since={since}", "--name-only", "--format=", "-m", "--first-parent").split("\n"))


def commit_count() -> int:
    """How many commits lead to this one; 0 outside a repository."""
    return int(_git("rev-list", "--count", "HEAD") or 0)


def _git(*arguments: str) -> str:
    try:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
