"""Who is head, middle and tail: the order inside each chain, once it is decided which nodes share it.

Two aims. *Positions*: every node has each of the k positions equally often, give or take one. That is always possible.
Take two positions p and q; each chain is an arrow from its node at p to its node at q. A node with more arrows out than
in by 2 or more can reach one with more in than out (the nodes that it reaches have no arrow out of their set), and
exchanging p and q along that path moves the surplus there. Each such exchange lowers the sum of squares of how often a
node has a position, so going on over all p and q ends, with every difference at most 1.

*Successors*: when x is lost, no other should be the source of many of its recoveries, nor become head in many of its
chains (`measure` has both exactly). That is a local search over exchanges that leave positions as they are: chains in
which p and q are exchanged form a cycle of arrows. It accepts what is not worse than now or than some steps ago (late
acceptance, Burke and Bykov 2017).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fireflyer.fs.core.placement.measure import Counts
from fireflyer.fs.core.placement.seeded_random import SeededRandom

__all__ = ["balance_positions", "order_chains"]

SOURCE_WEIGHT: Final = 3
HEAD_WEIGHT: Final = 1
LATE_STEPS: Final = 16
HEAT: Final = 2
LOOKS: Final = 8
MOST_REACHED: Final = 400
"""Nodes that the way back may touch; beyond, the cycle is too long to be of use."""


def balance_positions(chains: Counts, nodes: int) -> None:
    """Reorders rows of `chains` (b, k) in place until no node has one position more than once more than another."""
    replicas = chains.shape[1]
    changed = True
    while changed:
        changed = False
        for p in range(replicas):
            for q in range(replicas):
                if p != q:
                    changed |= _balance_two(chains, nodes, p, q)


def _balance_two(chains: Counts, nodes: int, p: int, q: int) -> bool:
    surplus = np.bincount(chains[:, p], minlength=nodes) - np.bincount(chains[:, q], minlength=nodes)
    changed = False
    for start in range(nodes):
        while surplus[start] >= 2:
            end = _exchange_along_path(chains, surplus, start, p, q)
            surplus[start] -= 2
            surplus[end] += 2
            changed = True
    return changed


def _exchange_along_path(chains: Counts, surplus: Counts, start: int, p: int, q: int) -> int:
    """Breadth first from `start` to a node with a deficit; exchanges p and q in the chains on the way; that node."""
    outgoing: dict[int, list[int]] = {}
    for row, node in enumerate(chains[:, p].tolist()):
        outgoing.setdefault(node, []).append(row)
    came_by = {start: -1}
    queue = [start]
    for node in queue:
        if surplus[node] < 0:
            end = node
            while came_by[node] >= 0:
                row = came_by[node]
                node = int(chains[row, p])
                chains[row, [p, q]] = chains[row, [q, p]]
            return end
        for row in outgoing.get(node, ()):
            reached = int(chains[row, q])
            if reached not in came_by:
                came_by[reached] = row
                queue.append(reached)
    raise AssertionError("a surplus has a deficit that it reaches")


class _Orders:
    """Chains, which of them have a node at a position, and the counts that the cost is made of: who follows whom as
    source and as head."""

    def __init__(self, chains: Counts, nodes: int) -> None:
        self.chains: list[list[int]] = chains.tolist()
        self._last = chains.shape[1] - 1
        self._sources = [[0] * nodes for _ in range(nodes)]
        self._heads = [[0] * nodes for _ in range(nodes)]
        self._rows: list[list[list[int]]] = [[[] for _ in range(nodes)] for _ in range(self._last + 1)]
        self.cost = 0
        for row, chain in enumerate(self.chains):
            for at, node in enumerate(chain):
                self._rows[at][node].append(row)
            self._count(chain, 1)
        self.least = self._least(nodes)

    def _least(self, nodes: int) -> int:
        """No order costs less: every node's successors as even as whole numbers are."""
        least = 0
        for counts, weight in ((self._sources, SOURCE_WEIGHT), (self._heads, HEAD_WEIGHT)):
            for row in counts:
                low, rest = divmod(sum(row), nodes - 1)
                least += weight * (rest * (low + 1) ** 2 + (nodes - 1 - rest) * low**2)
        return least

    def overloaded_chain(self, rng: SeededRandom) -> int:
        """One in which somebody has a source that it has in another chain too, if a few looks find one."""
        row = 0
        for _ in range(LOOKS):
            row = rng.below(len(self.chains))
            chain = self.chains[row]
            source = chain[self._last]
            if any(self._sources[node][source] > 1 for node in chain):
                break
        return row

    def cycle(self, first: int, p: int, q: int, rng: SeededRandom) -> list[int]:
        """Chains such that exchanging p and q in all of them leaves every node as often at p and q as it was: arrows
        from p to q that lead from `first` back to it. Empty where there is no short one."""
        home, start = self.chains[first][p], self.chains[first][q]
        came_by = {start: -1}
        queue = [start]
        for node in queue:
            rows = self._rows[p][node]
            turn = rng.below(len(rows)) if rows else 0
            for at in range(len(rows)):
                row = rows[at - turn]
                reached = self.chains[row][q]
                if reached == home:
                    found = [first, row]
                    while came_by[node] >= 0:
                        found.append(came_by[node])
                        node = self.chains[came_by[node]][p]
                    return found
                if reached not in came_by:
                    came_by[reached] = row
                    queue.append(reached)
            if len(queue) > MOST_REACHED:
                break
        return []

    def exchange(self, rows: list[int], p: int, q: int) -> None:
        for row in rows:
            chain = self.chains[row]
            self._count(chain, -1)
            self._rows[p][chain[p]].remove(row)
            self._rows[q][chain[q]].remove(row)
            chain[p], chain[q] = chain[q], chain[p]
            self._rows[p][chain[p]].append(row)
            self._rows[q][chain[q]].append(row)
            self._count(chain, 1)

    def _count(self, chain: list[int], by: int) -> None:
        last = self._last
        tail = chain[last]
        for at, node in enumerate(chain):
            sources, source = self._sources[node], tail if at < last else chain[last - 1]
            self.cost += SOURCE_WEIGHT * (2 * by * sources[source] + 1)
            sources[source] += by
        heads = self._heads[chain[0]]
        self.cost += HEAD_WEIGHT * (2 * by * heads[chain[1]] + 1)
        heads[chain[1]] += by


def order_chains(chains: Counts, nodes: int, rng: SeededRandom, *, steps: int) -> Counts:
    """The same chains, each in an order that spreads the roles; (b, k)."""
    found = chains.copy()
    balance_positions(found, nodes)
    count, replicas = found.shape
    if replicas < 2 or not count:
        return found
    orders = _Orders(found, nodes)
    past = [orders.cost + HEAT] * LATE_STEPS
    best, best_cost = found, orders.cost
    for step in range(steps):
        p = rng.below(replicas)
        q = (p + 1 + rng.below(replicas - 1)) % replicas
        rows = orders.cycle(orders.overloaded_chain(rng), p, q, rng)
        if not rows:
            continue
        before = orders.cost
        orders.exchange(rows, p, q)
        slot = step % LATE_STEPS
        if orders.cost > max(before, past[slot]):
            orders.exchange(rows, p, q)
        elif orders.cost < best_cost:
            best, best_cost = np.array(orders.chains, dtype=np.int64), orders.cost
            if best_cost <= orders.least:
                break
        past[slot] = orders.cost
    return best
