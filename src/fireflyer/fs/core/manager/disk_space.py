"""How much room there is on the disks of a cluster, as its status tells."""

from __future__ import annotations

from collections.abc import Iterable

from fireflyer.fs.schema.ids import NodeId
from fireflyer.fs.schema.manager import Status

__all__ = ["files_space", "space_of"]


def space_of(status: Status, nodes: Iterable[NodeId]) -> tuple[int, int]:
    """Used and capacity of the nodes' disks, in bytes. A disk that several targets share, also of several nodes on one
    machine, has its free space once."""
    wanted = frozenset(nodes)
    machines = {node.id: node.machine for node in status.nodes}
    used_bytes, free_bytes = 0, 0
    shared: dict[tuple[str, int], int] = {}
    for target in status.targets:
        report = target.report
        if report is None or target.node not in wanted:
            continue
        used_bytes += report.used_bytes
        left_bytes = max(0, report.capacity_bytes - report.used_bytes)
        if report.disk:
            place = machines[target.node], report.disk
            shared[place] = max(shared.get(place, 0), left_bytes)
        else:
            free_bytes += left_bytes
    return used_bytes, used_bytes + free_bytes + sum(shared.values())


def files_space(status: Status) -> tuple[int, int]:
    """What files can take in all, and what is free of it: each byte is there as often as a chain has replicas, on the
    average."""
    used_bytes, capacity_bytes = space_of(status, (node.id for node in status.nodes))
    members = sum(len(chain.members) for chain in status.chains)
    if not members:
        return 0, 0
    chains = len(status.chains)
    return capacity_bytes * chains // members, (capacity_bytes - used_bytes) * chains // members
