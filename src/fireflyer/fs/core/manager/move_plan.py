"""From what the manager says to a plan of `placement.rebalancing`, and back to moves for the manager.

Slots of a node are its targets that are neither drained nor leaving: a node of which all are gets none, a new one gets
its share. The manager knows nothing of disks, so all targets of a node count as one disk's."""

from __future__ import annotations

from fireflyer.base.errors import Busy, NotFound
from fireflyer.fs.core.placement import (
    Cluster,
    DiskLocation,
    Plan,
    Quality,
    StorageNode,
    Table,
    place,
    quality_of,
    rebalance,
)
from fireflyer.fs.schema.ids import NodeId, TargetId
from fireflyer.fs.schema.manager import MoveStatus, NewChain, NewMove, Status
from fireflyer.fs.schema.routing import Chain, ChainTable

__all__ = ["chains_of_new_targets", "plan_moves"]


def plan_moves(
    status: Status, table: ChainTable, under_way: tuple[MoveStatus, ...], *, seed: int = 0
) -> tuple[Plan, Quality, tuple[NewMove, ...]]:
    """The plan, how balanced the table is now, and the moves, in order. Raises `Busy` while moves are under way,
    `UsageError` where there is no room."""
    if under_way:
        raise Busy(
            f"{len(under_way)} moves are running; wait for them (--wait SECONDS), or cancel those that have not begun "
            "(--cancel)"
        )
    chains = {chain.id: chain for chain in status.chains}
    missing = [one for one in table.chains if one not in chains]
    if missing:
        raise NotFound(f"chain table {table.id} names chain {missing[0]}, which does not exist")
    rows = [chains[one] for one in table.chains]
    cluster = _cluster(status)
    now = Table(tuple(tuple(DiskLocation(member.node, 0) for member in chain.members) for chain in rows))
    plan = rebalance(cluster, now, seed=seed)
    quality = quality_of(cluster, now)
    moves = [(rows[move.chain], move) for move in plan.moves]
    return plan, quality, tuple(NewMove(row.id, _target(row, move.source.node), move.to.node) for row, move in moves)


def _cluster(status: Status) -> Cluster:
    slots: dict[NodeId, int] = {node.id: 0 for node in status.nodes}
    for target in status.targets:
        slots[target.node] = slots.get(target.node, 0) + (0 if target.unwanted else 1)
    return tuple(StorageNode(node, (count,)) for node, count in sorted(slots.items()))


def _target(chain: Chain, node: NodeId) -> int:
    return next(member.target for member in chain.members if member.node == node)


def chains_of_new_targets(status: Status, replicas: int, *, seed: int = 0) -> tuple[NewChain, ...]:
    """Of all targets that were in no chain, numbered behind those that are there. Raises `UsageError` where too few
    nodes have any."""
    spare: dict[NodeId, list[TargetId]] = {}
    for target in status.targets:
        if not target.used and not target.unwanted:
            spare.setdefault(target.node, []).append(target.id)
    cluster = tuple(StorageNode(node, (len(targets),)) for node, targets in sorted(spare.items()))
    number = max((chain.id for chain in status.chains), default=0)
    chains = []
    for places in place(cluster, replicas, seed=seed).table.chains:
        number += 1
        chains.append(NewChain(number, tuple(spare[one.node].pop(0) for one in places)))
    return tuple(chains)
