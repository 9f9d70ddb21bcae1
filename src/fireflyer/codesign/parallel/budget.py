"""Which blocks, or which operators, a rank computes again in backward so that its activations fit a budget.

Each item (a block, or one operator in it) has choices: what forward keeps, what backward holds beside it while it works
on the item, and the seconds that computing it again costs. Kept bytes add up over items; working bytes are those of the
largest, as backward works on one item at a time. The choice is the cheapest that fits, found exactly: for each bound on
working bytes, the undominated pairs of (kept bytes, seconds) item by item.

Deterministic: equal costs give equal choices, so that ranks of a tensor group that have the same figures repeat the
same collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["RecomputeChoice", "RecomputeSelection", "choose_recompute"]

MAX_PAIRS: Final = 1 << 12
"""Undominated pairs of one item at most; beyond, kept bytes are rounded up to a multiple of budget / `MAX_PAIRS`."""


class RecomputeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to treat an item."""

    name: str
    kept_bytes: int
    """What forward keeps, of all micro-batches in flight."""
    working_bytes: int = 0
    """What backward holds beside it while it works on the item."""
    seconds: float = 0.0
    """To compute again what is not kept, in one step."""


class RecomputeSelection(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed again."""

    names: tuple[str, ...]
    """Name of the choice for each item."""
    total_bytes: int
    """Kept bytes, and the largest working bytes."""
    seconds: float
    exact: bool
    """No other selection that fits costs less; false: none does if each item keeps up to budget / `MAX_PAIRS` more."""


def choose_recompute(items: Sequence[Sequence[RecomputeChoice]], budget_bytes: int) -> RecomputeSelection:
    """The cheapest selection of one choice for each item that needs at most `budget_bytes`; of equal costs the one with
    the fewest bytes. Raises `UsageError` for a figure that cannot be, and if nothing fits, with what is needed.

    >>> block = [RecomputeChoice(name="none", kept_bytes=10), RecomputeChoice(name="blocks", kept_bytes=2, seconds=1.0)]
    >>> choose_recompute([block, block], 13).names
    ('none', 'blocks')
    """
    _check(items)
    if not items:
        return RecomputeSelection(names=(), total_bytes=0, seconds=0.0, exact=True)
    found = _cheapest(items, budget_bytes, 1)
    if found is None:
        found = _cheapest(items, budget_bytes, max(2, math.ceil(budget_bytes / MAX_PAIRS)))
        found = None if found is None else msgspec.structs.replace(found, exact=False)
    if found is None or not found.names:
        raise UsageError(
            f"activations need at least {_least(items)} bytes with everything computed again, the budget is "
            f"{budget_bytes}; use smaller micro-batches, or divide the model further"
        )
    return found


def _check(items: Sequence[Sequence[RecomputeChoice]]) -> None:
    for number, choices in enumerate(items):
        if not choices:
            raise UsageError(f"item {number} has no choice; give it one that keeps everything")
        for one in choices:
            if one.kept_bytes < 0 or one.working_bytes < 0 or not 0 <= one.seconds < math.inf:
                raise UsageError(f"item {number}: {one} has a negative figure, or one that is not finite")


def _least(items: Sequence[Sequence[RecomputeChoice]]) -> int:
    bounds = {one.working_bytes for choices in items for one in choices}
    return min(
        bound + sum(min(one.kept_bytes for one in choices if one.working_bytes <= bound) for choices in items)
        for bound in bounds
        if all(any(one.working_bytes <= bound for one in choices) for choices in items)
    )


def _cheapest(items: Sequence[Sequence[RecomputeChoice]], budget: int, quantum: int) -> RecomputeSelection | None:
    """None if there are too many pairs; without names if nothing fits."""
    best: tuple[float, int, tuple[int, ...]] | None = None
    for bound in sorted({one.working_bytes for choices in items for one in choices}):
        front = _front(items, budget - bound, bound, quantum)
        if front is None:
            return None
        if front:
            _, seconds, taken = front[-1]  # the most bytes, the fewest seconds
            total = _total_bytes(items, taken)
            if best is None or (seconds, total) < best[:2]:
                best = (seconds, total, taken)
    if best is None:
        return RecomputeSelection(names=(), total_bytes=0, seconds=0.0, exact=True)
    seconds, total, taken = best
    names = tuple(choices[index].name for choices, index in zip(items, taken, strict=True))
    return RecomputeSelection(names=names, total_bytes=total, seconds=seconds, exact=True)


def _total_bytes(items: Sequence[Sequence[RecomputeChoice]], taken: Sequence[int]) -> int:
    chosen = [choices[index] for choices, index in zip(items, taken, strict=True)]
    return sum(one.kept_bytes for one in chosen) + max(one.working_bytes for one in chosen)


def _front(
    items: Sequence[Sequence[RecomputeChoice]], room: int, bound: int, quantum: int
) -> list[tuple[int, float, tuple[int, ...]]] | None:
    """Undominated (kept bytes, seconds, index of the choice of each item) within `room`: ascending bytes, descending
    seconds. Empty if nothing fits, None if there are too many."""
    front: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for choices in items:
        allowed = [
            (-(-one.kept_bytes // quantum) * quantum, one.seconds, index)
            for index, one in enumerate(choices)
            if one.working_bytes <= bound
        ]
        candidates = sorted(
            (kept + more, seconds + cost, (*taken, index))
            for kept, seconds, taken in front
            for more, cost, index in allowed
            if kept + more <= room
        )
        front = []
        for one in candidates:
            if not front or one[1] < front[-1][1]:
                front.append(one)
        if len(front) > MAX_PAIRS and quantum == 1:
            return None
    return front
