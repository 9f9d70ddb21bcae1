"""A local search for chains in which every two nodes meet about equally often.

State: chains as rows of node indices, and n(x, y), in how many of them x and y meet. The cost of a table is the sum
over pairs of weight · n² + penalty · max(0, n - cap)²: with equal nodes the sum of squares is least exactly where every
n is one of two neighbouring whole numbers. A *move* exchanges node a of chain A with node b of chain B, so the number
of targets of a node never changes.

Each step takes a pair that meets too often, a chain A where it does, and one of the two as a; it then looks at all
(B, b) at once, and makes the best exchange, worse than what is there or not. What left a chain may not come back for
some steps (tabu search), unless the table would become the best so far. A pair that meets too rarely is brought
together in a chain of one of them. The search ends when no pair is out of its range, or after a given number of steps:
no clock, so the same seed gives the same table. All costs are integers, so it gives the same on all machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fireflyer.fs.core.placement.measure import Counts, bound_of, count_pairs
from fireflyer.fs.core.placement.seeded_random import SeededRandom

__all__ = ["Goal", "Search", "Stay", "goal_of"]

WEIGHT: Final = 16
PENALTY: Final = 64
NEVER: Final = 1 << 40
"""The cost of what is not allowed; no sum of costs comes near it."""
WINDOW: Final = 768
"""Chains that one step looks at, where there are more."""
MOVE_COST: Final = WEIGHT
PATIENCE_STEPS: Final = 4000
"""So many without a better table end a search."""
NOBODY: Final = -1
TABU_STEPS: Final = 6
TABU_SPREAD: Final = 10


class Goal(NamedTuple):
    """What is asked of the pairs of nodes; each (v, v) int64."""

    weights: Counts
    caps: Counts
    floors: Counts
    allowed: npt.NDArray[np.bool_]
    """Whether the two may meet."""


def goal_of(quotas: Sequence[int], domains: Sequence[int], replicas: int) -> Goal:
    """With caps at the bound of the worst ratio, and weights that want pairs in proportion to their nodes' targets."""
    numbers = np.asarray(domains)
    allowed = numbers[:, None] != numbers[None, :]
    caps = bound_of(replicas - 1, quotas, domains, symmetric=True)[1]
    held = np.asarray(quotas, dtype=np.int64)
    of_domain = np.bincount(numbers, weights=held).astype(np.int64)[numbers]
    mean = int(held.sum()) // max(1, len(held))
    products = held[:, None] * held[None, :]
    weights = np.maximum(1, WEIGHT * mean * mean // np.maximum(1, products))
    room = np.maximum(1, held.sum() - of_domain)
    floors = products * (replicas - 1) // np.maximum(room[:, None], room[None, :])
    used = held > 0
    if len(np.unique(held[used])) > 1 or len(np.unique(of_domain[used])) > 1:
        floors -= 1
    return Goal(weights, caps, np.where(allowed, np.maximum(floors, 0), 0), allowed)


class Stay(NamedTuple):
    """Where targets lie already, for a search that moves few of them."""

    kept: npt.NDArray[np.bool_]
    """(b, v): the chain has a target on the node that may stay there at no cost."""
    disks: npt.NDArray[np.int64]
    """(b, v): on which disk."""

    def moved(self, chains: Counts) -> int:
        """How many targets of these chains are not where they were."""
        return int((~np.take_along_axis(self.kept, chains, axis=1)).sum())


class Search:
    """Improves a table in place; `best` is the best seen. `chains`: (b, k), quotas as the goal's."""

    def __init__(
        self, chains: Counts, goal: Goal, rng: SeededRandom, stay: Stay | None = None, most_moved: int = 0
    ) -> None:
        """With `stay`, at most `most_moved` targets will not be where they were."""
        self.chains = chains.copy()
        self.best = chains.copy()
        self._goal = goal
        self._rng = rng
        nodes = len(goal.caps)
        self._pairs = count_pairs(self.chains, nodes)
        self._more = np.empty_like(self._pairs)
        self._less = np.empty_like(self._pairs)
        self._both = np.empty_like(self._pairs)
        self._refresh(np.arange(nodes))
        self._tabu = np.zeros((len(chains), nodes), dtype=np.int32)
        self._step = self._improved = 0
        self._stay, self._most_moved = stay, most_moved
        self._moved = 0 if stay is None else stay.moved(chains)
        self.cost = self.best_cost = int(self._costs(np.arange(nodes)).sum()) // 2

    def run(self, steps: int, *, polish_steps: int) -> bool:
        """Until every pair is in its range, or so many steps, `polish_steps` of them with none above its cap. Whether
        the best table has no pair above its cap."""
        if self.chains.shape[1] < 2 or len(self.chains) < 2:
            return True
        upper = np.triu(self._goal.allowed)
        for _ in range(steps):
            self._step += 1
            if self._step - self._improved > PATIENCE_STEPS:
                break
            hot = np.flatnonzero((self._pairs > self._goal.caps) & upper)
            if len(hot):
                self._part(*self._pick_pair(hot))
                continue
            cold = np.flatnonzero((self._pairs < self._goal.floors) & upper)
            polish_steps -= 1
            if not len(cold) or polish_steps < 0:
                break
            self._join(*self._pick_pair(cold))
        pairs = count_pairs(self.best, len(self._goal.caps))
        return not bool(((pairs > self._goal.caps) & self._goal.allowed).any())

    def _part(self, x: int, y: int) -> None:
        """Takes x from a chain with y."""
        rows = np.flatnonzero((self.chains == x).any(axis=1) & (self.chains == y).any(axis=1))
        row = int(rows[self._rng.below(len(rows))])
        self._exchange(row, int(np.flatnonzero(self.chains[row] == x)[0]), NOBODY)

    def _join(self, x: int, y: int) -> None:
        """Brings y into a chain with x."""
        rows = np.flatnonzero((self.chains == x).any(axis=1) & ~(self.chains == y).any(axis=1))
        if len(rows):
            row = int(rows[self._rng.below(len(rows))])
            others = np.flatnonzero(self.chains[row] != x)
            self._exchange(row, int(others[self._rng.below(len(others))]), y)

    def _pick_pair(self, flat: npt.NDArray[np.int64]) -> tuple[int, int]:
        x, y = divmod(int(flat[self._rng.below(len(flat))]), len(self._goal.caps))
        return (x, y) if self._rng.below(2) else (y, x)

    def _exchange(self, row: int, at: int, only: int) -> None:
        """The best exchange of what `chains[row, at]` is, with node `only` if that is one."""
        chain = self.chains[row]
        a = int(chain[at])
        others = np.delete(chain, at)
        rows = self._window()
        seen = self.chains[rows]
        arrives = self._more[:, others].sum(axis=1)
        leaves = int(self._less[a, others].sum())
        there = self._more[a][seen]
        delta = arrives[seen] + (there.sum(axis=1, keepdims=True) - there)
        delta += self._sums_of_pairs(self._less, seen)
        # Whoever is in both chains meets a and b as often as before: what was added for that is taken back.
        shared = (seen[:, :, None] == others).any(axis=2)
        rows_shared = np.flatnonzero(shared.any(axis=1))
        if len(rows_shared):
            some, common = seen[rows_shared], shared[rows_shared]
            delta[rows_shared] -= (self._both[some[:, :, None], some[:, None, :]] * common[:, None, :]).sum(axis=2)
            delta[rows_shared] -= (self._both[a][some] * common).sum(axis=1, keepdims=True)
        delta[seen == a] = NEVER
        if only >= 0:
            delta[seen != only] = NEVER
        further = self._further(row, a, rows, seen)
        if self._stay is not None:
            delta += MOVE_COST * further
            delta[self._moved + further > self._most_moved] += NEVER
        tabu = (self._tabu[row][seen] > self._step) | (self._tabu[rows, a] > self._step)[:, None]
        delta[tabu & (delta + leaves + self.cost >= self.best_cost)] += NEVER >> 8
        noise = (self._rng.words(delta.size) & np.uint64(1023)).astype(np.int64).reshape(delta.shape)
        place = int((delta * 1024 + noise).argmin())
        if int(delta.flat[place]) >= NEVER >> 1:
            return
        self._moved += int(further.flat[place])
        self.cost += MOVE_COST * int(further.flat[place])
        other_row, other_at = int(rows[place // chain.size]), place % chain.size
        self._apply(row, at, other_row, other_at)

    @staticmethod
    def _sums_of_pairs(table: Counts, seen: Counts) -> Counts:
        """For each place of each row the sum of `table` over it and every place of the row; (rows, k)."""
        sums = np.empty_like(seen)
        for at in range(seen.shape[1]):
            sums[:, at] = table[seen[:, at, None], seen].sum(axis=1)
        return sums

    def _further(self, row: int, a: int, rows: npt.NDArray[np.int64], seen: Counts) -> Counts:
        """By how much each exchange changes the number of targets that are not where they were; (rows, k)."""
        if self._stay is None:
            return np.zeros_like(seen)
        kept, disks = self._stay
        a_here, a_there = bool(kept[row, a]), kept[rows, a]
        b_here, b_there = kept[row][seen], kept[rows[:, None], seen]
        # A node that takes one target back for another one is as full as before only if both lie on the same disk.
        a_other = a_here & a_there & (disks[rows, a] != disks[row, a])
        b_other = b_here & b_there & (disks[rows[:, None], seen] != disks[row][seen])
        of_a = int(a_here) - a_there.astype(np.int64) + a_other
        of_b = b_there.astype(np.int64) - b_here + b_other
        further: Counts = of_a[:, None] + of_b
        return further

    def _window(self) -> npt.NDArray[np.int64]:
        count = len(self.chains)
        if count <= WINDOW:
            return np.arange(count)
        return (self._rng.below(count) + np.arange(WINDOW)) % count

    def _apply(self, row: int, at: int, other_row: int, other_at: int) -> None:
        a, b = int(self.chains[row, at]), int(self.chains[other_row, other_at])
        both = np.array([a, b])
        before = int(self._costs(both).sum())
        for chain, leaves, comes, place in ((row, a, b, at), (other_row, b, a, other_at)):
            others = np.delete(self.chains[chain], place)
            self._pairs[leaves, others] -= 1
            self._pairs[others, leaves] -= 1
            self._pairs[comes, others] += 1
            self._pairs[others, comes] += 1
            self.chains[chain, place] = comes
            self._tabu[chain, leaves] = self._step + TABU_STEPS + self._rng.below(TABU_SPREAD)
        self._refresh(both)
        self.cost += int(self._costs(both).sum()) - before
        if self.cost < self.best_cost:
            self.best_cost, self._improved = self.cost, self._step
            self.best[:] = self.chains

    def _costs(self, nodes: npt.NDArray[np.int64]) -> Counts:
        pairs, goal = self._pairs[nodes], self._goal
        over = np.maximum(pairs - goal.caps[nodes], 0)
        cost: Counts = goal.weights[nodes] * pairs * pairs + PENALTY * over * over
        return cost

    def _refresh(self, nodes: npt.NDArray[np.int64]) -> None:
        """What one more and one less meeting of each pair with these nodes costs."""
        pairs, goal = self._pairs[nodes], self._goal
        weights, over = goal.weights[nodes], pairs - goal.caps[nodes]
        more = weights * (2 * pairs + 1) + PENALTY * np.maximum(2 * over + 1, 0)
        less = -weights * (2 * pairs - 1) - PENALTY * np.maximum(2 * over - 1, 0)
        allowed = goal.allowed[nodes]
        more[~allowed] = NEVER
        less[~allowed] = 0
        both = np.where(allowed, more + less, 0)
        self._both[nodes], self._both[:, nodes] = both, both.T
        self._more[nodes], self._less[nodes] = more, less
        self._more[:, nodes], self._less[:, nodes] = more.T, less.T
