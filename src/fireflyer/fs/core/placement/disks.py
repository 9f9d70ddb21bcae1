"""On which disk of its node each target lies.

Disks of a node get their quotas, and the chains of a disk should have their other targets on as many different nodes as
possible, so that the loss of one disk spreads, too. Greedy, then exchanges of two targets of a node while that helps;
nodes do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fireflyer.fs.core.placement.measure import Counts
from fireflyer.fs.core.placement.seeded_random import SeededRandom

__all__ = ["NO_DISK", "assign_disks"]

NO_DISK: Final = -1
EXCHANGES: Final = 6
"""Tried per target."""


def assign_disks(
    chains: Counts, quotas: Sequence[Sequence[int]], rng: SeededRandom, kept: Counts | None = None
) -> Counts:
    """(b, k) numbers of disks for `chains` (b, k) of node indices; `quotas[node][disk]` is how many each gets. `kept`:
    (b, k), the disk where a target lies already, or `NO_DISK`; it stays there while its disk's quota lasts."""
    found = np.full(chains.shape, NO_DISK, dtype=np.int64)
    members: list[list[tuple[int, int]]] = [[] for _ in quotas]
    for row, chain in enumerate(chains.tolist()):
        for at, node in enumerate(chain):
            members[node].append((row, at))
    for node, own in enumerate(members):
        if len(quotas[node]) == 1:
            for row, at in own:
                found[row, at] = 0
        elif own:
            _assign_of_node(chains, found, own, quotas[node], rng, kept)
    return found


def _assign_of_node(
    chains: Counts,
    found: Counts,
    own: list[tuple[int, int]],
    quotas: Sequence[int],
    rng: SeededRandom,
    kept: Counts | None,
) -> None:
    left = list(quotas)
    met: list[dict[int, int]] = [{} for _ in quotas]
    others = [[int(x) for i, x in enumerate(chains[row]) if i != at] for row, at in own]
    free = []
    for i, (row, at) in enumerate(own):
        disk = NO_DISK if kept is None else int(kept[row, at])
        if disk != NO_DISK and left[disk] > 0:
            found[row, at] = disk
            left[disk] -= 1
            _count(met[disk], others[i], 1)
        else:
            free.append(i)
    for i in free:
        disk = min((d for d, n in enumerate(left) if n > 0), key=lambda d: (_cost(met[d], others[i]), -left[d], d))
        found[own[i]] = disk
        left[disk] -= 1
        _count(met[disk], others[i], 1)
    for _ in range(EXCHANGES * len(free) if len(free) > 1 else 0):
        i, j = free[rng.below(len(free))], free[rng.below(len(free))]
        here, there = int(found[own[i]]), int(found[own[j]])
        if here == there:
            continue
        _count(met[here], others[i], -1)
        _count(met[there], others[j], -1)
        stays = _cost(met[here], others[i]) + _cost(met[there], others[j])
        changes = _cost(met[here], others[j]) + _cost(met[there], others[i])
        if changes < stays:
            found[own[i]], found[own[j]] = there, here
            _count(met[there], others[i], 1)
            _count(met[here], others[j], 1)
        else:
            _count(met[here], others[i], 1)
            _count(met[there], others[j], 1)


def _cost(met: dict[int, int], others: Sequence[int]) -> int:
    return sum(met.get(node, 0) for node in others)


def _count(met: dict[int, int], others: Sequence[int], by: int) -> None:
    for node in others:
        met[node] = met.get(node, 0) + by
