"""A table that obeys new quotas after as few moves as possible: where a search for a better one begins.

A target that has to go leaves a *vacancy* in its chain; a node below its quota takes it. If every such node is in that
chain already (or its domain is), somebody else comes from another chain, whose vacancy is filled instead: the shortest
such detour is taken, breadth first.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import UsageError
from fireflyer.fs.core.placement.disks import NO_DISK
from fireflyer.fs.core.placement.measure import Counts, count_pairs
from fireflyer.fs.core.placement.quotas import Quotas
from fireflyer.fs.core.placement.search import NEVER, Goal
from fireflyer.fs.core.placement.seeded_random import SeededRandom

__all__ = ["fewest_moves"]

OVER_CAP: Final = 1024
"""What one meeting above the cap costs more; a search's weights are far below."""


def fewest_moves(
    chains: Counts, disks: Counts, quotas: Quotas, goal: Goal, any_disk: npt.NDArray[np.bool_], rng: SeededRandom
) -> Counts:
    """`chains` (b, k) with some nodes replaced so that each has its quota. `disks` (b, k): where each target lies, or
    `NO_DISK` where it cannot stay. `any_disk` (v,): nodes of which any target may go, whatever the disks' quotas.
    Raises `UsageError` where domains leave no way."""
    table = _Vacancies(chains, goal)
    for row, at in _conflicts(chains, goal):
        table.vacate(row, at)
    givers = []
    for node, quota in enumerate(quotas.nodes):
        own = [(int(row), int(at)) for row, at in np.argwhere(table.chains == node)]
        surplus = len(own) - quota
        if surplus <= 0:
            continue
        homeless = [place for place in own if disks[place] == NO_DISK]
        if surplus >= len(homeless):
            for row, at in homeless:
                table.vacate(row, at)
            excess = [0 if any_disk[node] else -limit for limit in quotas.disks[node]]
            pool = [place for place in own if disks[place] != NO_DISK]
            for place in pool:
                excess[int(disks[place])] += 1
            givers.append(_Donor(node, surplus - len(homeless), pool, excess))
        else:
            givers.append(_Donor(node, surplus, homeless, []))
    wanted = np.asarray(quotas.nodes) - np.bincount(table.filled(), minlength=len(goal.caps))
    wanted = np.maximum(wanted, 0)
    while table.vacant:
        wanted[table.settle(*table.vacant[0], wanted)] -= 1
    rng.shuffle(givers)
    for giver in givers:
        for _ in range(giver.surplus):
            row, at = _choose(table, giver, wanted, disks)
            table.vacate(row, at)
            wanted[table.settle(row, at, wanted)] -= 1
    return table.chains


class _Donor(NamedTuple):
    """A node that has to give targets away, and may choose which."""

    node: int
    surplus: int
    pool: list[tuple[int, int]]
    excess: list[int]
    """By disk, how many targets it has above its quota; empty if that does not matter."""


def _choose(table: _Vacancies, giver: _Donor, wanted: Counts, disks: Counts) -> tuple[int, int]:
    """The target whose replacement makes the chains meet most evenly; it leaves the giver's pool."""
    pool = [place for place in giver.pool if not giver.excess or giver.excess[int(disks[place])] > 0] or giver.pool
    costs = [table.cheapest(row, wanted, without=giver.node)[1] for row, _ in pool]
    place = pool[int(np.argmin(costs))]
    giver.pool.remove(place)
    if giver.excess:
        giver.excess[int(disks[place])] -= 1
    return place


def _conflicts(chains: Counts, goal: Goal) -> list[tuple[int, int]]:
    """Targets that share a domain with one before them in their chain: domains were named anew."""
    return [
        (row, at)
        for row, chain in enumerate(chains)
        for at in range(1, len(chain))
        if not goal.allowed[chain[at], chain[:at]].all()
    ]


class _Vacancies:
    """Chains with holes (-1)."""

    def __init__(self, chains: Counts, goal: Goal) -> None:
        self.chains = chains.copy()
        self._before = chains
        self.vacant: list[tuple[int, int]] = []
        self._goal = goal
        self._pairs = count_pairs(chains, len(goal.caps))
        self._added = self._cost_of_one_more(np.arange(len(goal.caps)))

    def _cost_of_one_more(self, nodes: Counts) -> Counts:
        pairs, goal = self._pairs[nodes], self._goal
        cost: Counts = goal.weights[nodes] * (2 * pairs + 1) + OVER_CAP * (pairs >= goal.caps[nodes])
        return cost

    def filled(self) -> Counts:
        return self.chains[self.chains >= 0]

    def vacate(self, row: int, at: int) -> None:
        node = int(self.chains[row, at])
        self.chains[row, at] = -1
        self._meet(row, node, -1)
        self.vacant.append((row, at))

    def fill(self, row: int, at: int, node: int) -> None:
        self._meet(row, node, 1)
        self.chains[row, at] = node
        self.vacant.remove((row, at))

    def _meet(self, row: int, node: int, by: int) -> None:
        others = self._others(row)
        self._pairs[node, others] += by
        self._pairs[others, node] += by
        self._added[node] = self._cost_of_one_more(np.array([node]))[0]
        self._added[:, node] = self._added[node]

    def _others(self, row: int) -> Counts:
        chain: Counts = self.chains[row]
        return chain[chain >= 0]

    def _allowed(self, row: int, without: int = -1) -> Counts:
        """Nodes that may come into the chain once node `without` has left it."""
        others = self._others(row)
        return np.flatnonzero(self._goal.allowed[others[others != without]].all(axis=0))

    def cheapest(self, row: int, wanted: Counts, without: int = -1) -> tuple[int, int]:
        """The node below its quota that makes meetings most even, with the change in cost; -1 if none may come."""
        others = self._others(row)
        others = others[others != without]
        cost = self._added[others].sum(axis=0)
        if without >= 0:
            cost = cost - self._added[without, others].sum()
        possible = np.zeros(len(wanted), dtype=bool)
        possible[self._allowed(row, without)] = True
        cost = np.where(possible & (wanted > 0), cost * 4096 - wanted, NEVER)
        node = int(cost.argmin())
        return (node, int(cost[node])) if cost[node] < NEVER else (-1, NEVER)

    def settle(self, row: int, at: int, wanted: Counts) -> int:
        """Fills a vacancy, directly or by a detour; whose quota that serves."""
        node = self.cheapest(row, wanted)[0]
        if node >= 0:
            self.fill(row, at, node)
            return node
        for only_moved in (True, False):
            node = self._detour(row, at, wanted, only_moved=only_moved)
            if node >= 0:
                return node
        raise UsageError("no moves keep each chain on different nodes and domains; free some slots in each domain")

    def _detour(self, row: int, at: int, wanted: Counts, *, only_moved: bool) -> int:
        """Fills the vacancy by a chain of replacements that ends with a node below its quota; that node, -1 if there is
        none. `only_moved`: only targets that are not where they were are replaced, so that no more have to move."""
        came_by: dict[int, tuple[int, int]] = {}
        queue = [row]
        seen = np.zeros(len(self.chains), dtype=bool)
        seen[row] = True
        movable = (self.chains != self._before) if only_moved else np.ones(self.chains.shape, dtype=bool)
        for here in queue:
            leaves = came_by[here][1] if here != row else -1
            allowed = self._allowed(here, leaves)
            allowed = allowed[allowed != leaves]
            below = allowed[wanted[allowed] > 0]
            if len(below):
                return self._follow(here, int(below[0]), came_by, (row, at))
            for node in allowed:
                for other in np.flatnonzero(((self.chains == node) & movable).any(axis=1) & ~seen):
                    came_by[int(other)] = here, int(node)
                    seen[other] = True
                    queue.append(int(other))
        return -1

    def _follow(self, end: int, last: int, came_by: dict[int, tuple[int, int]], start: tuple[int, int]) -> int:
        """Each chain on the way back gives its node to the one before and takes what the one after it gives."""
        comes, here = last, end
        while here != start[0]:
            before, gives = came_by[here]
            at = int(np.flatnonzero(self.chains[here] == gives)[0])
            self.vacate(here, at)
            self.fill(here, at, comes)
            comes, here = gives, before
        self.fill(start[0], start[1], comes)
        return last
