"""Tables to begin with: exact constructions where they are cheap, and a greedy one that always works.

- *Greedy*: chain by chain, node by node, the node with targets left that has met the others of the chain least. A node
  or domain that has as many targets left as there are chains left must be in each of them, so it goes first.
- *Cyclic* (equal nodes without domains): a base block {a, b, c} stands for the v chains {a + i, b + i, c + i} mod v.
  Two nodes meet as often as their distance occurs in the base blocks, so v/2 numbers have to be equal instead of v²/2:
  a cyclic difference family, where one is found. Each node comes once in each position of an orbit.
- *Affine planes* (Bose): q² nodes, replication q, for q = 2, 3, 4, 5: the q² + q lines of the plane over the field of q
  elements; any two nodes meet exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fireflyer.fs.core.placement.measure import Counts
from fireflyer.fs.core.placement.search import NEVER, Goal
from fireflyer.fs.core.placement.seeded_random import SeededRandom

__all__ = ["affine_plane", "cyclic", "fill_up"]

TRIES: Final = 12
TRY_STEPS: Final = 400
_TIMES_4: Final = ((0, 0, 0, 0), (0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))
"""Multiplication in the field of 4 elements 0, 1, x, x + 1; addition there is exclusive or."""


def fill_up(
    chains: Sequence[Sequence[int]],
    total: int,
    quotas: Sequence[int],
    domains: Sequence[int],
    goal: Goal,
    rng: SeededRandom,
) -> Counts:
    """Adds chains to the given ones until there are `total`, and every node has its quota of targets; (b, k)."""
    nodes, replicas = len(quotas), sum(quotas) // total
    found = np.empty((total, replicas), dtype=np.int64)
    found[: len(chains)] = np.array(chains, dtype=np.int64).reshape(-1, replicas)
    left = np.asarray(quotas) - np.bincount(found[: len(chains)].ravel(), minlength=nodes)
    numbers = np.asarray(domains)
    left_of_domain = np.bincount(numbers, weights=left).astype(np.int64)
    pairs = np.zeros((nodes, nodes), dtype=np.int64)
    for chain in found[: len(chains)]:
        pairs[np.ix_(chain, chain)] += 1
    for row in range(len(chains), total):
        cost = np.where(left > 0, 0, NEVER)
        for at in range(replicas):
            urgent = left_of_domain[numbers] >= total - row
            key = (cost - np.where(urgent & (cost < NEVER), NEVER >> 4, 0)) * 4096 - left * 8
            key += (rng.words(nodes) & np.uint64(7)).astype(np.int64)
            node = int(key.argmin())
            found[row, at] = node
            cost = cost + goal.weights[node] * (2 * pairs[node] + 1)
            cost[~goal.allowed[node]] = NEVER
            np.minimum(cost, NEVER, out=cost)
            left[node] -= 1
            left_of_domain[numbers[node]] -= 1
        pairs[np.ix_(found[row], found[row])] += 1
    return found


def cyclic(nodes: int, replicas: int, blocks: int, rng: SeededRandom) -> list[list[int]]:
    """The orbits of `blocks` base blocks mod `nodes` whose differences occur as evenly as could be found."""
    best, best_cost = None, NEVER
    total = blocks * replicas * (replicas - 1)
    low, rest = divmod(total, nodes - 1)
    least = rest * (low + 1) ** 2 + (nodes - 1 - rest) * low**2
    for _ in range(TRIES):
        base, cost = _base_blocks(nodes, replicas, blocks, least, rng)
        if cost < best_cost:
            best, best_cost = base, cost
        if best_cost <= least:
            break
    assert best is not None  # noqa: S101 - there is at least one try
    return [[(int(x) + i) % nodes for x in block] for block in best for i in range(nodes)]


def _base_blocks(nodes: int, replicas: int, blocks: int, least: int, rng: SeededRandom) -> tuple[Counts, int]:
    """Steepest descent on the sum of squares of how often each difference occurs, with a walk where it stops."""
    base = np.empty((blocks, replicas), dtype=np.int64)
    counts = np.zeros(nodes, dtype=np.int64)
    for block in range(blocks):
        members = list(range(nodes))
        rng.shuffle(members)
        base[block] = members[:replicas]
        _add(counts, base[block], 1)
    best, best_cost = base.copy(), int((counts[1:] ** 2).sum())
    every = np.arange(nodes)
    for _ in range(TRY_STEPS):
        if best_cost <= least:
            break
        block, at = rng.below(blocks), rng.below(replicas)
        others = np.delete(base[block], at)
        _add(counts, base[block], -1)
        _add(counts, others, 1)
        away = (every[:, None] - others[None, :]) % nodes
        costs = (2 * counts[away] + 1).sum(axis=1)
        # Differences d and -d are the same pair, and so is one that comes twice from different members.
        same = (away[:, :, None] == away[:, None, :]) | ((away[:, :, None] + away[:, None, :]) % nodes == 0)
        costs += same.sum(axis=(1, 2))
        costs[others] = NEVER
        costs[base[block, at]] += 1
        noise = (rng.words(nodes) & np.uint64(255)).astype(np.int64)
        base[block, at] = int((costs * 256 + noise).argmin())
        _add(counts, others, -1)
        _add(counts, base[block], 1)
        cost = int((counts[1:] ** 2).sum())
        if cost < best_cost:
            best, best_cost = base.copy(), cost
    return best, best_cost


def _add(counts: Counts, block: Counts, by: int) -> None:
    away = (block[:, None] - block[None, :]) % len(counts)
    np.add.at(counts, away[~np.eye(len(block), dtype=bool)], by)


def affine_plane(nodes: int, replicas: int) -> list[list[int]]:
    """The lines of the plane with `nodes` points and `replicas` of them on a line; empty where none is known here."""
    q = replicas
    if q not in (2, 3, 4, 5) or nodes != q * q:
        return []

    def on_line(slope: int, x: int, start: int) -> int:
        return _TIMES_4[slope][x] ^ start if q == 4 else (slope * x + start) % q

    sloped = [[x * q + on_line(slope, x, start) for x in range(q)] for slope in range(q) for start in range(q)]
    return sloped + [[x * q + y for y in range(q)] for x in range(q)]
