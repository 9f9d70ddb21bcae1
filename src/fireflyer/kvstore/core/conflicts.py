"""What a transaction has read or written, as points and half-open ranges.

A `ConflictSetBuilder` collects while the transaction runs; `Conflicts` is its normal form: points sorted and in none
of the
ranges; ranges sorted, apart from each other, none empty. Two transactions that touched the same keys have equal normal
forms, so tests can assert them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from fireflyer.kvstore.core.keys import ENTRY_OVERHEAD_BYTES, KeyRange, key_after

__all__ = ["ConflictSetBuilder", "Conflicts", "merged"]


class Conflicts(NamedTuple):
    """See the module's text."""

    points: tuple[bytes, ...] = ()
    ranges: tuple[KeyRange, ...] = ()

    @property
    def entries(self) -> int:
        return len(self.points) + len(self.ranges)

    def holds(self, key: bytes) -> bool:
        if _has_point_in(self.points, KeyRange(key, key_after(key))):
            return True
        return _range_at(self.ranges, key) is not None

    def meets(self, wanted: KeyRange) -> bool:
        """Whether anything in it lies in `wanted`."""
        if wanted.empty:
            return False
        if _has_point_in(self.points, wanted):
            return True
        # The last range that begins before `wanted` may reach into it, or the next one begins in it.
        index = bisect.bisect_right(self.ranges, wanted.begin, key=_begin)
        return any(each.overlaps(wanted) for each in self.ranges[max(0, index - 1) : index + 1])


def _begin(each: KeyRange) -> bytes:
    return each.begin


def _has_point_in(points: tuple[bytes, ...], wanted: KeyRange) -> bool:
    index = bisect.bisect_left(points, wanted.begin)
    return index < len(points) and (wanted.end is None or points[index] < wanted.end)


def _range_at(ranges: tuple[KeyRange, ...], key: bytes) -> KeyRange | None:
    index = bisect.bisect_right(ranges, key, key=_begin) - 1
    return ranges[index] if index >= 0 and key in ranges[index] else None


def _outside(points: list[bytes], ranges: tuple[KeyRange, ...]) -> list[bytes]:
    """Those in none of the ranges; both are sorted."""
    kept, at = list[bytes](), 0
    for each in ranges:
        first = bisect.bisect_left(points, each.begin, at)
        kept += points[at:first]
        at = len(points) if each.end is None else bisect.bisect_left(points, each.end, first)
    return kept + points[at:]


def merged(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """Sorted, without empty ones, those that touch or overlap made one."""
    result: list[KeyRange] = []
    for each in sorted((each for each in ranges if not each.empty), key=_begin):
        last = result[-1] if result else None
        if last is None or (last.end is not None and last.end < each.begin):
            result.append(each)
        elif last.end is not None and (each.end is None or each.end > last.end):
            result[-1] = KeyRange(last.begin, each.end)
    return tuple(result)


class ConflictSetBuilder:
    """What has been touched so far; adding the same thing again costs nothing."""

    __slots__ = ("_points", "_ranges", "bytes_counted")

    def __init__(self) -> None:
        self._points: dict[bytes, None] = {}
        self._ranges: dict[KeyRange, None] = {}
        self.bytes_counted = 0

    def add_point(self, key: bytes) -> None:
        if key not in self._points:
            self._points[key] = None
            self.bytes_counted += len(key) + ENTRY_OVERHEAD_BYTES

    def add_range(self, added: KeyRange) -> None:
        if not added.empty and added not in self._ranges:
            self._ranges[added] = None
            self.bytes_counted += len(added.begin) + len(added.end or b"") + ENTRY_OVERHEAD_BYTES

    @property
    def entries(self) -> int:
        return len(self._points) + len(self._ranges)

    def normal(self) -> Conflicts:
        ranges = merged(self._ranges)
        return Conflicts(tuple(_outside(sorted(self._points), ranges)), ranges)
