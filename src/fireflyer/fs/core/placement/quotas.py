"""How many chains there are, and how many targets each node and disk gets.

A chain takes at most one target of a node and of a domain, so b chains can be made exactly where
sum over domains of min(b, slots of the domain, where a node counts at most b) >= b·k: the largest such b is taken.
Slots that are left over stay empty, fewer than k of them unless a node or domain is larger than the others can match.

Targets go to nodes one by one, each to the node that it fills least, (2·held + 1) / slots (Webster's method: equal
nodes differ by at most one), then in the same way from a node to its disks. Of nodes that are equally full, the one
goes first that holds more of them already: so the fewest have to move.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.fs.core.placement.model import Cluster

__all__ = ["Quotas", "chain_count", "domain_numbers", "share_among_nodes", "share_out"]


class Quotas(NamedTuple):
    """By index in the cluster."""

    nodes: tuple[int, ...]
    disks: tuple[tuple[int, ...], ...]


def domain_numbers(cluster: Cluster) -> tuple[int, ...]:
    """Of each node, the number of its domain; a node without one is a domain of its own."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(node.domain or f"\0{node.id}", len(numbers)) for node in cluster)


def chain_count(cluster: Cluster, replicas: int) -> int:
    """The largest number of chains that the slots allow."""
    domains = domain_numbers(cluster)
    low, high = 0, sum(sum(node.slots) for node in cluster) // replicas
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _room(cluster, domains, middle) >= middle * replicas else (low, middle - 1)
    return low


def _room(cluster: Cluster, domains: Sequence[int], chains: int) -> int:
    totals: dict[int, int] = {}
    for node, domain in zip(cluster, domains, strict=True):
        totals[domain] = totals.get(domain, 0) + min(chains, sum(node.slots))
    return sum(min(chains, total) for total in totals.values())


def share_out(
    targets: int,
    slots: Sequence[int],
    held: Sequence[int],
    *,
    groups: Sequence[int] | None = None,
    group_limit: int | None = None,
) -> tuple[int, ...]:
    """Targets among places with so many slots; no group gets more than `group_limit`. Raises `UsageError`."""
    scale = math.lcm(*(n for n in slots if n), 1)
    quotas = [0] * len(slots)
    totals: dict[int, int] = {}

    def entry(i: int) -> tuple[int, int, int]:
        return (2 * quotas[i] + 1) * (scale // slots[i]), quotas[i] - held[i], i

    heap = [entry(i) for i, n in enumerate(slots) if n]
    heapq.heapify(heap)
    left = targets
    while left and heap:
        _, _, i = heapq.heappop(heap)
        group = groups[i] if groups is not None else i
        if group_limit is not None and totals.get(group, 0) >= group_limit:
            continue
        quotas[i] += 1
        totals[group] = totals.get(group, 0) + 1
        left -= 1
        if quotas[i] < slots[i]:
            heapq.heappush(heap, entry(i))
    if left:
        raise UsageError(f"{targets} targets need room, and there is room for {targets - left}; add nodes or disks")
    return tuple(quotas)


def share_among_nodes(
    cluster: Cluster, chains: int, replicas: int, held: Mapping[tuple[int, int], int] | None = None
) -> Quotas:
    """`held`: targets that lie on (index of node, disk) now. Raises `UsageError` where so many chains have no room."""
    held = held or {}
    disks_held = [[held.get((i, disk), 0) for disk in range(len(node.slots))] for i, node in enumerate(cluster)]
    if _room(cluster, domain_numbers(cluster), chains) < chains * replicas:
        raise UsageError(
            f"{chains} chains of {replicas} targets on different nodes and domains have no room on these disks; add "
            "nodes or disks"
        )
    nodes = share_out(
        chains * replicas,
        [sum(node.slots) for node in cluster],
        [sum(disks) for disks in disks_held],
        groups=domain_numbers(cluster),
        group_limit=chains,
    )
    disks = tuple(share_out(nodes[i], node.slots, disks_held[i]) for i, node in enumerate(cluster))
    return Quotas(nodes, disks)
