"""Traffic of storage and of pipelines on a fabric, as transfers between its nodes. Pure.

A planner has no cluster yet: chains are placed over the storage nodes as the manager places them, and files are striped
over all chains. `fireflyer.fs.client.transfers` does the same for the routing of a cluster that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB
from fireflyer.codesign.schedule import Costs, MessageBytes, Program, pipeline_transfers
from fireflyer.fs.client.transfers import FileTransfers
from fireflyer.fs.core.files.chunk_map import ChunkMap
from fireflyer.fs.core.placement import place, uniform_cluster
from fireflyer.fs.schema.inodes import Layout
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState
from fireflyer.topology.fabrics import Fabric
from fireflyer.topology.traffic import Transfer

__all__ = ["STORAGE_KIND", "StorageLoad", "nodes_of_kind", "replica_traffic", "storage_traffic"]

STORAGE_KIND = "storage"
TARGETS_PER_NODE = 6
"""Targets of a node in the chain table: each node is in as many chains."""
MAX_STORAGE_NODES = 256
"""Most storage nodes: the placement of more takes a minute."""
MAX_TRANSFERS = 1 << 22


class StorageLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of storage: what each client reads or writes at once."""

    access: Literal["read", "write"]
    nbytes: int
    """Bytes of the file of each client."""
    replicas: int = 3
    chunk_bytes: int = MIB
    window: int = 16
    """Chunks that a client has under way at a time; 0: all."""


def nodes_of_kind(fabric: Fabric, kind: str) -> range:
    """Numbers of the nodes of that kind. Raises `UsageError` where there are none."""
    first = 0
    for group in fabric.groups:
        if group.kind == kind:
            return range(first, first + group.count)
        first += group.count
    raise UsageError(
        f'{fabric.name} has no nodes of kind "{kind}"; it has {", ".join(one.kind for one in fabric.groups)}'
    )


def storage_traffic(
    fabric: Fabric,
    clients: Sequence[int],
    load: StorageLoad,
    *,
    seed: int = 0,
    lane: int = 0,
    first_id: int = 0,
    kind: str = STORAGE_KIND,
) -> list[Transfer]:
    """Transfers of `clients` that each read or write a file of their own on the nodes of that kind. Raises `UsageError`
    where there are too few storage nodes for the replicas, too many to place chains over, or over 2^22 transfers."""
    storage = nodes_of_kind(fabric, kind)
    if len(storage) > MAX_STORAGE_NODES:
        raise UsageError(f"{len(storage)} storage nodes; chains are placed over at most {MAX_STORAGE_NODES} here")
    chunks = -(-load.nbytes // load.chunk_bytes) * len(clients)
    if chunks * (load.replicas if load.access == "write" else 1) > MAX_TRANSFERS:
        raise UsageError(f"{chunks} chunks of all nodes; simulate at most {MAX_TRANSFERS} transfers: use smaller files")
    routing = _placed(len(storage), load.replicas, seed)
    places = {number + 1: node for number, node in enumerate(storage)}
    made = FileTransfers(routing, places, first_id=first_id)
    chains = tuple(chain.id for chain in routing.chains)
    make = made.reads if load.access == "read" else made.writes
    found: list[Transfer] = []
    for client in clients:
        layout = Layout(1, load.chunk_bytes, len(chains), client + seed)
        found += make(client, ChunkMap(layout, chains), 0, load.nbytes, window=load.window)
    return [msgspec.structs.replace(one, lane=lane) for one in found] if lane else found


def _placed(nodes: int, replicas: int, seed: int) -> Routing:
    """All serve. Targets are numbered by node."""
    table = place(uniform_cluster(nodes, TARGETS_PER_NODE), replicas, seed=seed).table
    chains = tuple(
        Chain(
            number,
            1,
            tuple(Member(place.node * 1000 + number, place.node, TargetState.SERVING) for place in places),
        )
        for number, places in enumerate(table.chains, 1)
    )
    return Routing(1, chains=chains)


def replica_traffic(
    program: Program,
    costs: Costs,
    message_bytes: MessageBytes,
    nodes: Sequence[int],
    replicas: int,
    *,
    lane: int = 0,
    first_id: int = 0,
) -> list[Transfer]:
    """Transfers of pipelines beside each other: rank r of each replica on the node `nodes[r]`, as 8 GPUs of a node are
    ranks of 8 replicas (Fire-Flyer paper, V-B2). The messages of all share the NIC of the node, over connections of
    their own."""
    found: list[Transfer] = []
    for replica in range(replicas):
        found += pipeline_transfers(
            program,
            costs,
            message_bytes,
            nodes=nodes,
            lane=lane,
            first_id=first_id + len(found),
            first_connection=replica * len(program.rows) ** 2,
        )
    return found
