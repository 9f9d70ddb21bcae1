"""A hierarchical allreduce and storage reads on a two-zone network, as transfers; flows at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Final

from fireflyer.base.units import KIB, MIB
from fireflyer.collectives.planning.trees import double_binary_tree
from fireflyer.topology.fabrics import Fabric, NodeGroup, two_layer_tree, zones
from fireflyer.topology.traffic import Transfer
from fireflyer.topology.two_zone import zone_trees

GPUS_PER_NODE: Final = 8
ARRAY_BYTES: Final = 186 * MIB
CHUNK_BYTES: Final = 4 * MIB
LOCAL_BYTES_PER_S: Final = 13.3e9
"""At which a node sums the arrays of its GPUs (Fire-Flyer paper, IV-D)."""
READ_BYTES: Final = 4 * MIB
STRIPES: Final = 4


def two_zones(nodes: int, storage: int, *, radix: int, between: int) -> Fabric:
    """GPU node n is in zone n mod 2, storage servers in both."""
    shared = [NodeGroup(kind="storage", count=storage, ports=2)]
    return zones([NodeGroup(kind="gpu", count=nodes)], radix=radix, gbit_per_s=200, between=between, shared=shared)


def allreduce(nodes: int) -> list[Transfer]:
    """Two trees, each with half of each chunk: up to the root, and down again. A node sends a chunk when it has summed
    its own and those of its children have arrived, after the chunk before. Sums are transfers from a node to itself."""
    trees = zone_trees([node % 2 for node in range(nodes)], double_binary_tree)
    sizes = [min(CHUNK_BYTES, ARRAY_BYTES - first) for first in range(0, ARRAY_BYTES, CHUNK_BYTES)]
    numbers = count()
    found = _sums(nodes, sizes, numbers)
    sums = [one.id for one in found]
    for parents in trees:
        children: list[list[int]] = [[] for _ in range(nodes)]
        for node, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(node)
        order = _downwards(parents, children)
        up: list[tuple[int, ...]] = [()] * nodes
        down: list[tuple[int, ...]] = [()] * nodes
        for chunk, size in enumerate(sizes):
            for node in reversed(order[1:]):
                arrived = (number for child in children[node] for number in up[child])
                after = (sums[chunk * nodes + node], *arrived, *up[node])
                found.append(_sent(next(numbers), node, parents[node], size // 2, after))
                up[node] = (found[-1].id,)
            root = order[0]
            whole = (sums[chunk * nodes + root], *(number for child in children[root] for number in up[child]))
            for node in order[1:]:
                inputs = whole if parents[node] == root else down[parents[node]]
                found.append(_sent(next(numbers), parents[node], node, size // 2, (*inputs, *down[node])))
                down[node] = (found[-1].id,)
    return found


def _sums(nodes: int, sizes: list[int], numbers: Iterator[int]) -> list[Transfer]:
    """Of chunk after chunk on each node."""
    found: list[Transfer] = []
    for size in sizes:
        before = found[-nodes:]
        lasts_ns = round(size / LOCAL_BYTES_PER_S * 1e9)
        found += [
            Transfer(
                id=next(numbers),
                source=node,
                target=node,
                nbytes=0,
                after=(before[node].id,) if before else (),
                delay_ns=lasts_ns,
            )
            for node in range(nodes)
        ]
    return found


def _downwards(parents: tuple[int, ...], children: list[list[int]]) -> list[int]:
    order = [parents.index(-1)]
    for node in order:
        order += children[node]
    return order


def _sent(number: int, source: int, target: int, nbytes: int, after: tuple[int, ...]) -> Transfer:
    return Transfer(id=number, source=source, target=target, nbytes=nbytes, after=after, connection=0)


def storage_reads(nodes: int, storage: int, reads: int, first_number: int, *, lane: int = 0) -> list[Transfer]:
    """Read r, of a GPU of node r / 8, of one file in stripes that lie on different servers."""
    rng = random.Random(reads)
    numbers = count(first_number)
    found = []
    for read in range(reads):
        servers = rng.sample(range(storage), min(STRIPES, storage))
        found += [
            Transfer(
                id=next(numbers),
                source=nodes + server,
                target=read // GPUS_PER_NODE % nodes,
                nbytes=READ_BYTES // len(servers),
                lane=lane,
            )
            for server in servers
        ]
    return found


def random_flows(flows: int, radix: int) -> tuple[Fabric, list[Transfer]]:
    """All at once over a full two-layer tree."""
    nodes = radix * radix // 2
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=nodes)], radix=radix, gbit_per_s=400)
    rng = random.Random(flows)
    found = []
    for number in range(flows):
        source, target = rng.sample(range(nodes), 2)
        found.append(Transfer(id=number, source=source, target=target, nbytes=rng.randrange(64 * KIB, 1024 * MIB)))
    return fabric, found


def queued_flows(count: int, radix: int, *, at_once: bool = False) -> tuple[Fabric, list[Transfer]]:
    """Each node of a two-layer tree sends to one node after the other, at random, or to all of them `at_once`."""
    nodes = radix * radix // 4
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=nodes)], radix=radix, gbit_per_s=400)
    rng = random.Random(count)
    found = []
    for number in range(count):
        source, target = number % nodes, rng.randrange(nodes - 1)
        found.append(
            Transfer(
                id=number,
                source=source,
                target=target + (target >= source),
                nbytes=rng.randrange(64 * KIB, 256 * MIB),
                after=(number - nodes,) if number >= nodes and not at_once else (),
            )
        )
    return fabric, found
