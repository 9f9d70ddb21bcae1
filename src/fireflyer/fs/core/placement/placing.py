"""A new chain table: quotas, then who shares a chain with whom, then the order in each chain, then disks.

Several tables are begun with (`starts`), each improved (`search`), until one reaches the bound of the worst peer-load
ratio; otherwise the best of them is taken. The same arguments always give the same table.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import msgspec
import numpy as np

from fireflyer.base.errors import UsageError
from fireflyer.fs.core.placement.disks import assign_disks
from fireflyer.fs.core.placement.measure import Counts, Quality, bound_of, caps_below, count_pairs, measure, ratio_of
from fireflyer.fs.core.placement.model import Cluster, DiskLocation, Table, check_cluster, check_table
from fireflyer.fs.core.placement.quotas import chain_count, domain_numbers, share_among_nodes
from fireflyer.fs.core.placement.roles import order_chains
from fireflyer.fs.core.placement.search import Search, goal_of
from fireflyer.fs.core.placement.seeded_random import SeededRandom
from fireflyer.fs.core.placement.starts import affine_plane, cyclic, fill_up

__all__ = ["Placement", "make_table", "place", "quality_of", "role_steps"]

SEARCH_STEPS: Final = 8000
REFINEMENTS: Final = 5
"""How often a ratio above the bound is lowered."""
POLISH_STEPS: Final = 500
GREEDY_STARTS: Final = 2
ROLE_STEPS: Final = 2000
ROLE_STEPS_OF_CHAIN: Final = 100
MOST_ROLE_STEPS: Final = 20_000


class Placement(msgspec.Struct, frozen=True):
    """A table and how good it is."""

    table: Table
    quality: Quality


def place(
    cluster: Cluster, replicas: int, *, chains: int | None = None, seed: int = 0, steps: int = SEARCH_STEPS
) -> Placement:
    """A table with so many chains, by default as many as the slots allow. Seconds for 200 nodes; `steps` bounds each
    of its searches. Raises `UsageError`: one line that says what is missing."""
    check_cluster(cluster, replicas)
    rng = SeededRandom(seed)
    domains = domain_numbers(cluster)
    most = chain_count(cluster, replicas)
    count = most if chains is None else chains
    if not 1 <= count <= most:
        raise UsageError(f"{count} chains requested; the targets of these nodes allow 1 to {most}")
    quotas = share_among_nodes(cluster, count, replicas)
    members = _members(quotas.nodes, domains, count, replicas, rng, steps)
    ordered = order_chains(members, len(cluster), rng, steps=role_steps(count))
    disks = assign_disks(ordered, quotas.disks, rng)
    return Placement(make_table(cluster, ordered, disks), measure(ordered, quotas.nodes, domains))


def quality_of(cluster: Cluster, table: Table) -> Quality:
    """Quality of any table whose places are all in the cluster. Raises `UsageError`."""
    check_table(table)
    index = {node.id: i for i, node in enumerate(cluster)}
    unknown = sorted({place.node for chain in table.chains for place in chain} - index.keys())
    if unknown:
        raise UsageError(f"the table has targets on node {unknown[0]}, which is not in the cluster")
    chains = np.array([[index[place.node] for place in chain] for chain in table.chains], dtype=np.int64)
    quotas = np.bincount(chains.ravel(), minlength=len(cluster)).tolist()
    return measure(chains, quotas, domain_numbers(cluster))


def role_steps(chains: int) -> int:
    return min(MOST_ROLE_STEPS, ROLE_STEPS + ROLE_STEPS_OF_CHAIN * chains)


def make_table(cluster: Cluster, chains: Counts, disks: Counts) -> Table:
    """From (b, k) indices of nodes and of their disks."""
    ids = [node.id for node in cluster]
    rows = zip(chains.tolist(), disks.tolist(), strict=True)
    return Table(tuple(tuple(DiskLocation(ids[x], disk) for x, disk in zip(*row, strict=True)) for row in rows))


def _members(
    quotas: Sequence[int], domains: Sequence[int], count: int, replicas: int, rng: SeededRandom, steps: int
) -> Counts:
    """Which nodes share a chain; (b, k)."""
    goal = goal_of(quotas, domains, replicas)
    bound = bound_of(replicas - 1, quotas, domains, symmetric=True)[0]
    best: tuple[Fraction, int, Counts] | None = None
    for number in range(GREEDY_STARTS + 2):
        start = _start(number, quotas, domains, replicas, rng)
        if start is None:
            continue
        search = Search(fill_up(start, count, quotas, domains, goal, rng), goal, rng)
        search.run(steps, polish_steps=POLISH_STEPS)
        ratio = ratio_of(count_pairs(search.best, len(quotas)), quotas, domains) or Fraction(0)
        if best is None or (ratio, search.best_cost) < best[:2]:
            best = ratio, search.best_cost, search.best
        if bound is None or ratio <= bound:
            return best[2]
    assert best is not None  # noqa: S101 - the last starts are never left out
    ratio, _, found = best
    begin = found
    for _ in range(REFINEMENTS):
        caps = caps_below(ratio, replicas - 1, quotas, domains)
        lower = goal._replace(caps=caps, weights=np.ones_like(caps))
        search = Search(begin, lower, rng)
        if search.run(steps, polish_steps=0):
            begin = found = search.best
            ratio = ratio_of(count_pairs(found, len(quotas)), quotas, domains) or Fraction(0)
        else:
            begin = fill_up([], count, quotas, domains, lower, rng)
    return found


def _start(
    number: int, quotas: Sequence[int], domains: Sequence[int], replicas: int, rng: SeededRandom
) -> list[list[int]] | None:
    """The chains to begin with; None where there is no such construction."""
    nodes, least = len(quotas), min(quotas)
    if number >= 2:
        return []
    if len(set(domains)) < nodes or max(quotas) - least > 1 or replicas < 2 or nodes <= replicas:
        return None
    if number == 0:
        return affine_plane(nodes, replicas) * (least // (replicas + 1)) or None
    return cyclic(nodes, replicas, least // replicas, rng) if least >= replicas else None
