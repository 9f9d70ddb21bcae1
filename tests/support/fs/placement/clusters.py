"""Clusters for tests of placement, and what a table must fulfil, said again in the plainest way."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import strategies as st

from fireflyer.fs.core.placement import Cluster, DiskLocation, Move, StorageNode, Table

__all__ = ["apply_move", "clusters", "domain_of", "held_by_place", "plain_ratios", "replicas_apart", "slots_of"]


@st.composite
def clusters(draw: st.DrawFn, *, most_nodes: int = 12) -> tuple[Cluster, int]:
    """A cluster and a number of replicas that it has nodes and domains for."""
    replicas = draw(st.integers(1, 5))
    count = draw(st.integers(replicas, max(most_nodes, replicas)))
    disks = draw(st.integers(1, 3))
    equal = draw(st.booleans())
    slots = [draw(st.integers(1, 5)) if equal else 0] * count
    if not equal:
        slots = [draw(st.integers(1, 5)) for _ in range(count)]
    racks = draw(st.sampled_from([0, 0, replicas, replicas + 1, replicas + 2]))
    return tuple(
        StorageNode(i + 1, (slots[i],) * disks, f"rack-{i % racks}" if racks else "") for i in range(count)
    ), replicas


def domain_of(cluster: Cluster) -> dict[int, str]:
    return {node.id: node.domain or f"node-{node.id}" for node in cluster}


def apply_move(table: Table, move: Move) -> Table:
    chain = table.chains[move.chain]
    assert move.source in chain
    changed = tuple(move.to if place == move.source else place for place in chain)
    return Table((*table.chains[: move.chain], changed, *table.chains[move.chain + 1 :]))


def slots_of(cluster: Cluster) -> dict[DiskLocation, int]:
    return {DiskLocation(node.id, disk): count for node in cluster for disk, count in enumerate(node.slots)}


def held_by_place(table: Table) -> Counter[DiskLocation]:
    return Counter(place for chain in table.chains for place in chain)


def replicas_apart(chain: tuple[DiskLocation, ...], domains: dict[int, str]) -> bool:
    """`domains` need not have nodes that are no more: each of those is on its own."""
    return len({domains.get(place.node, f"node-{place.node}") for place in chain}) == len(chain)


def plain_ratios(cluster: Cluster, table: Table) -> tuple[Fraction, Fraction]:
    """The worst peer-load ratios of reads and of recovery, node by node and chain by chain."""
    domains = domain_of(cluster)
    held = Counter(place.node for chain in table.chains for place in chain)
    worst_read = worst_recovery = Fraction(0)
    for dead in held:
        read: Counter[int] = Counter()
        recovery: Counter[int] = Counter()
        for chain in table.chains:
            others = [place.node for place in chain if place.node != dead]
            if len(others) < len(chain) and others:
                read.update(others)
                recovery[others[-1]] += 1
        able = sum(count for node, count in held.items() if domains[node] != domains[dead])
        for loads in (read, recovery):
            for peer, load in loads.items():
                ratio = Fraction(load, loads.total()) / Fraction(held[peer], able)
                if loads is read:
                    worst_read = max(worst_read, ratio)
                else:
                    worst_recovery = max(worst_recovery, ratio)
    return worst_read, worst_recovery
