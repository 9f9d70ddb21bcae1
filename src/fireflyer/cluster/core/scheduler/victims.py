"""Which running tasks make room for one that waits: of all sets that leave enough nodes, the one that loses the fewest
node-seconds.

Exact, by dynamic programming over the number of nodes that are gained: `least[j]` is the least loss of a set that gains
at least j nodes, where everything above what is needed counts as what is needed. Only tasks that can be of use are
looked at: of those that gain g nodes each, the cheapest ones, as many as are needed, whatever the others cost. Time and
memory are those tasks times nodes needed. Once for each zone, and once over all zones for a gang
that may run in several.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Victim", "cheapest"]

_NEVER: Final = (1 << 62) - 1
"""More than any loss; and the sum of one and a loss is an int64, too."""


class Victim(NamedTuple):
    """A task that may be interrupted, what that loses, and how many of the nodes in question it would leave."""

    task: int
    loss: int
    gains: int


def cheapest(victims: Sequence[Victim], needed: int) -> tuple[int, tuple[int, ...]] | None:
    """(loss, tasks) of a set that gains at least `needed` nodes; of equal ones, what comes first in `victims` goes
    first. None where all together gain too few."""
    if needed <= 0:
        return 0, ()
    if sum(victim.gains for victim in victims) < needed:
        return None
    import numpy as np  # here, so that what only has tasks and nodes in memory starts without it

    useful = _useful(victims, needed)
    least: npt.NDArray[Any] = np.full(needed + 1, _NEVER, np.int64)
    least[0] = 0
    taken: list[npt.NDArray[Any]] = []
    before_all: list[int] = []
    for victim in useful:
        gains = min(victim.gains, needed)
        with_it = np.minimum(least + victim.loss, _NEVER)
        after = least.copy()
        after[gains:needed] = np.minimum(least[gains:needed], with_it[: needed - gains])
        last = needed - gains + int(np.argmin(with_it[needed - gains :]))
        after[needed] = min(int(least[needed]), int(with_it[last]))
        taken.append(after < least)
        before_all.append(last)
        least = after
    chosen: list[int] = []
    at = needed
    for victim, took, last in zip(reversed(useful), reversed(taken), reversed(before_all), strict=True):
        if took[at]:
            chosen.append(victim.task)
            at = last if at == needed else at - victim.gains
    return int(least[needed]), tuple(reversed(chosen))


def _useful(victims: Sequence[Victim], needed: int) -> list[Victim]:
    """Of those who gain enough alone the cheapest, and of those with equal gain the cheapest, as many as are needed:
    a set with another of them would lose no less with one of these in its place."""
    alike: dict[int, list[tuple[int, int]]] = {}
    alone: Victim | None = None
    for place, (_, loss, gains) in enumerate(victims):
        if gains >= needed:
            if alone is None or loss < alone.loss:
                alone = victims[place]
        elif gains > 0:
            alike.setdefault(gains, []).append((loss, place))
    places = [place for gains, those in alike.items() for _, place in nsmallest(-(-needed // gains), those)]
    found = [victims[place] for place in sorted(places)]
    return found if alone is None else [alone, *found]
