"""What is placed where: nodes with disks, a table of chains, and what a request must fulfil."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.fs.schema.ids import NodeId

__all__ = [
    "MAX_NODES",
    "MAX_REPLICAS_PLACED",
    "MAX_TARGETS",
    "Cluster",
    "DiskLocation",
    "StorageNode",
    "Table",
    "check_cluster",
    "check_table",
    "uniform_cluster",
]

MAX_NODES: Final = 1000
MAX_TARGETS: Final = 1 << 17
"""Of a cluster that is placed in one table."""
MAX_REPLICAS_PLACED: Final = 8


class DiskLocation(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Place of a target: the disk with this number, from 0, of this node."""

    node: NodeId
    disk: int


class StorageNode(msgspec.Struct, frozen=True):
    """A node as the administrator describes it. `slots[i]` is how many targets disk i may hold; 0 says that the disk
    is to be emptied, or is no more. Nodes of one `domain` (a rack, a zone) never hold two targets of a chain; an empty
    name is a domain of its own."""

    id: Annotated[NodeId, msgspec.Meta(ge=1)]
    slots: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    domain: str = ""


Cluster = tuple[StorageNode, ...]


class Table(msgspec.Struct, frozen=True):
    """Chains in the order of the table; the places of each, head first."""

    chains: tuple[tuple[DiskLocation, ...], ...]


def uniform_cluster(nodes: int, targets_per_node: int, *, disks: int = 1, domains: tuple[str, ...] = ()) -> Cluster:
    """Nodes 1 to `nodes`, each with so many targets spread over so many disks. `domains`: one per node, or empty."""
    if domains and len(domains) != nodes:
        raise UsageError(f"{len(domains)} domains for {nodes} nodes; give one domain for each node, in order")
    if not 1 <= disks <= targets_per_node:
        raise UsageError(f"{disks} disks for {targets_per_node} targets per node; each disk needs at least one target")
    slots = tuple((targets_per_node + disk) // disks for disk in reversed(range(disks)))
    return tuple(StorageNode(i + 1, slots, domains[i] if domains else "") for i in range(nodes))


def check_cluster(cluster: Cluster, replicas: int) -> None:
    """Raises `UsageError` where no table can be made: one line that says what is missing."""
    if not 1 <= replicas <= MAX_REPLICAS_PLACED:
        raise UsageError(f"{replicas} replicas; give 1 to {MAX_REPLICAS_PLACED}")
    if len(cluster) > MAX_NODES:
        raise UsageError(f"{len(cluster)} nodes; a chain table has at most {MAX_NODES}, make several tables")
    if len({node.id for node in cluster}) != len(cluster):
        raise UsageError("two nodes have the same id; give each its own")
    if sum(sum(node.slots) for node in cluster) > MAX_TARGETS:
        raise UsageError(f"the nodes have more than {MAX_TARGETS} targets; make several tables")
    usable = [node for node in cluster if sum(node.slots)]
    if len(usable) < replicas:
        raise UsageError(
            f"{replicas} replicas need {replicas} nodes with room for targets, and there are {len(usable)}; add "
            "nodes, or give fewer replicas"
        )
    domains = {node.domain or f"\0{node.id}" for node in usable}
    if len(domains) < replicas:
        raise UsageError(
            f"{replicas} replicas need {replicas} domains, and the nodes with room are in {len(domains)}; use more "
            "domains, or give fewer replicas"
        )


def check_table(table: Table) -> int:
    """The number of replicas. Raises `UsageError` for chains of different lengths, or with one node twice."""
    lengths = sorted({len(chain) for chain in table.chains})
    if len(lengths) != 1 or not 1 <= lengths[0] <= MAX_REPLICAS_PLACED:
        raise UsageError(
            f"the chains have {lengths} replicas; all have the same number, from 1 to {MAX_REPLICAS_PLACED}"
        )
    if sum(map(len, table.chains)) > MAX_TARGETS:
        raise UsageError(f"the table has more than {MAX_TARGETS} targets")
    for index, chain in enumerate(table.chains):
        if len({place.node for place in chain}) != len(chain):
            raise UsageError(f"chain {index} has two targets on one node; move one of them first")
    return lengths[0]
