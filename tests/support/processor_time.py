"""Which tests take most processor time: their own, and that of processes which they started and waited for.

Where tests run beside each other, and mostly wait, it is this that says what the suite costs.
"""

from __future__ import annotations

import collections
import resource
from collections.abc import Iterable
from typing import Final

import pytest

__all__ = ["begin", "note", "summary"]

_NAME: Final = "processor_s"
_BEGAN: Final = pytest.StashKey[float]()
_MOST: Final = 30
"""Tests and files that are shown."""


def begin(item: pytest.Item) -> None:
    """Before the setup of a test."""
    item.stash[_BEGAN] = _processor_s()


def note(item: pytest.Item, report: pytest.TestReport) -> None:
    """In the report of the teardown, which is the last one."""
    if report.when == "teardown":
        report.user_properties.append((_NAME, _processor_s() - item.stash[_BEGAN]))


def summary(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Lines for people: the dearest tests and the dearest files, and all of them together."""
    spent = {
        report.nodeid: float(value)
        for report in reports
        for name, value in report.user_properties
        if name == _NAME and isinstance(value, float)
    }
    files: dict[str, float] = collections.defaultdict(float)
    for nodeid, value_s in spent.items():
        files[nodeid.partition("::")[0]] += value_s
    lines = [f"{sum(spent.values()):.0f} s of processor time in {len(spent)} tests"]
    for table in (spent, files):
        ordered = sorted(table.items(), key=lambda entry: -entry[1])[:_MOST]
        lines += [f"{value_s:8.1f} s  {name}" for name, value_s in ordered]
    return lines


def _processor_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
