"""The writes of one transaction before it commits, and what reads look like through them.

State: *cleared* ranges, sorted and apart, and *writes* of single keys (a value, or None for cleared), which count over
the ranges. Clearing a range forgets the single writes in it, so order within a transaction needs no log.

`through` lays the writes over part of what the store has: the caller reads a page, says which range that page covers,
and gets what the transaction sees of that range. `read_through` does so until a page is full.
"""

from __future__ import annotations

import bisect
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from fireflyer.kvstore.core.conflicts import Conflicts, ConflictSetBuilder
from fireflyer.kvstore.core.keys import (
    ENTRY_OVERHEAD_BYTES,
    MAX_PAGE_BYTES,
    MAX_PAGE_ITEMS,
    Item,
    KeyRange,
    Page,
    key_after,
)

__all__ = ["Mutations", "Overlay", "looked_at", "read_through"]

_ASK_AT_LEAST: Final = 64
"""Items asked of the source where own writes may hide some of them."""


class Mutations(NamedTuple):
    """What a commit does: first the ranges are cleared, then single keys written. Each key once, all sorted."""

    cleared: tuple[KeyRange, ...] = ()
    writes: tuple[tuple[bytes, bytes | None], ...] = ()
    """None: cleared."""
    frees_space: bool = False
    """It may use the room that is kept for clearing keys."""

    @property
    def empty(self) -> bool:
        return not self.cleared and not self.writes

    @property
    def bytes_counted(self) -> int:
        return sum(len(key) + len(value or b"") + ENTRY_OVERHEAD_BYTES for key, value in self.writes)

    def conflicts(self) -> Conflicts:
        """What others must not have read."""
        gathering = ConflictSetBuilder()
        for cleared in self.cleared:
            gathering.add_range(cleared)
        for key, _ in self.writes:
            gathering.add_point(key)
        return gathering.normal()


class Overlay:
    """See the module's text. Arguments are checked by the caller."""

    __slots__ = ("_cleared", "_order", "_writes", "bytes_counted")

    def __init__(self) -> None:
        self._cleared: list[KeyRange] = []
        self._writes: dict[bytes, bytes | None] = {}
        self._order: list[bytes] = []
        self.bytes_counted = 0

    @property
    def entries(self) -> int:
        return len(self._writes) + len(self._cleared)

    def write(self, key: bytes, value: bytes | None) -> None:
        """None clears."""
        writes = self._writes
        cost = len(key) + ENTRY_OVERHEAD_BYTES if value is None else len(key) + len(value) + ENTRY_OVERHEAD_BYTES
        if key in writes:
            cost -= self._cost(key)
        else:
            bisect.insort(self._order, key)
        writes[key] = value
        self.bytes_counted += cost

    def absorb(self, mutations: Mutations) -> None:
        """What lay above it."""
        for cleared in mutations.cleared:
            self.clear_range(cleared)
        for key, value in mutations.writes:
            self.write(key, value)

    def clear_range(self, cleared: KeyRange) -> None:
        if cleared.empty:
            return
        first, last = self._span(cleared)
        for key in self._order[first:last]:
            self.bytes_counted -= self._cost(key)
            del self._writes[key]
        del self._order[first:last]
        self._insert(cleared)

    def _insert(self, added: KeyRange) -> None:
        """Ranges that touch the new one become one with it."""
        ranges = self._cleared
        first = bisect.bisect_left(ranges, added.begin, key=lambda each: each.begin)
        if first and ((end := ranges[first - 1].end) is None or end >= added.begin):
            first -= 1
        last = first
        begin, end = added
        while last < len(ranges) and (end is None or ranges[last].begin <= end):
            begin = min(begin, ranges[last].begin)
            other = ranges[last].end
            end = None if end is None or other is None else max(end, other)
            last += 1
        for old in ranges[first:last]:
            self.bytes_counted -= _range_cost(old)
        ranges[first:last] = [KeyRange(begin, end)]
        self.bytes_counted += _range_cost(ranges[first])

    def find(self, key: bytes) -> tuple[bool, bytes | None]:
        """Whether this transaction has decided what `key` is, and if so its value."""
        if key in self._writes:
            return True, self._writes[key]
        return self._is_cleared(key), None

    def through(self, items: list[Item], covered: KeyRange, *, reverse: bool) -> list[Item]:
        """`items` are all that the store has in `covered`, in the order asked for; the result is what is seen there."""
        first, last = self._span(covered)
        if first == last and not self._cleared:
            return items
        seen = {key: value for key, value in items if not self._is_cleared(key)}
        for key in self._order[first:last]:
            value = self._writes[key]
            if value is None:
                seen.pop(key, None)
            else:
                seen[key] = value
        return sorted(seen.items(), reverse=reverse)

    def mutations(self) -> Mutations:
        return Mutations(tuple(self._cleared), tuple((key, self._writes[key]) for key in self._order))

    def _is_cleared(self, key: bytes) -> bool:
        if not self._cleared:
            return False
        index = bisect.bisect_right(self._cleared, key, key=lambda each: each.begin) - 1
        return index >= 0 and key in self._cleared[index]

    def _span(self, wanted: KeyRange) -> tuple[int, int]:
        first = bisect.bisect_left(self._order, wanted.begin)
        last = len(self._order) if wanted.end is None else bisect.bisect_left(self._order, wanted.end)
        return first, max(first, last)

    def _cost(self, key: bytes) -> int:
        return len(key) + len(self._writes[key] or b"") + ENTRY_OVERHEAD_BYTES


def _range_cost(each: KeyRange) -> int:
    return len(each.begin) + len(each.end or b"") + ENTRY_OVERHEAD_BYTES


def looked_at(wanted: KeyRange, page: Page, *, reverse: bool) -> KeyRange:
    """The part of `wanted` that `page` tells all about."""
    if not page.more:
        return wanted
    last = page.items[-1][0]
    return KeyRange(last, wanted.end) if reverse else KeyRange(wanted.begin, key_after(last))


async def read_through(
    overlay: Overlay,
    scan: Callable[[KeyRange, int], Awaitable[Page]],
    wanted: KeyRange,
    limit: int,
    *,
    reverse: bool,
) -> Page:
    """A page of `wanted`, of which what is below is asked with `scan(range, limit)`, as the writes make it."""
    items: list[Item] = []
    bytes_read = 0
    rest = wanted
    while True:
        left = limit - len(items)
        ask = min(MAX_PAGE_ITEMS, max(left, _ASK_AT_LEAST)) if overlay.entries else left
        page = await scan(rest, ask)
        covered = looked_at(rest, page, reverse=reverse)
        for item in overlay.through(page.items, covered, reverse=reverse):
            if len(items) == limit or bytes_read >= MAX_PAGE_BYTES:
                return Page(items, True)
            items.append(item)
            bytes_read += len(item[0]) + len(item[1])
        if not page.more:
            return Page(items, False)
        if len(items) == limit:
            return Page(items, True)
        # There are bounds: the page has a last item, so `covered` ends with it.
        rest = KeyRange(rest.begin, covered.begin) if reverse else KeyRange(covered.end or b"", rest.end)
