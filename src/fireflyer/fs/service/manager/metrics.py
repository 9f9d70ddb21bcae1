"""What a manager tells Prometheus, of itself and, while it is primary, of the cluster."""

from __future__ import annotations

from fireflyer.fs.core.manager.disk_space import space_of
from fireflyer.fs.schema.manager import FilesStatus, Status
from fireflyer.fs.schema.routing import TargetState
from fireflyer.runtime.metrics import Series

__all__ = ["cluster_series", "files_series"]


def _gauges(values: dict[str, tuple[str, float]]) -> list[Series]:
    return [Series.one(f"fireflyer_{name}", "gauge", text, value) for name, (text, value) in values.items()]


def cluster_series(status: Status) -> list[Series]:
    used_bytes, capacity_bytes = space_of(status, [node.id for node in status.nodes])
    states = [[member.state for member in chain.members] for chain in status.chains]
    return _gauges(
        {
            "nodes": ("Storage nodes", len(status.nodes)),
            "nodes_alive": ("Storage nodes that are alive", sum(node.alive for node in status.nodes)),
            "chains": ("Chains", len(states)),
            "chains_readable": (
                "Chains with at least one serving target",
                sum(TargetState.SERVING in one for one in states),
            ),
            "chains_whole": (
                "Fully replicated chains: all targets are serving",
                sum(all(state is TargetState.SERVING for state in one) for one in states),
            ),
            "chains_syncing": (
                "Chains with a target that is being synced",
                sum(TargetState.SYNCING in one for one in states),
            ),
            "disks_used_bytes": ("Bytes of chunks on disks, every replica counted", used_bytes),
            "disks_capacity_bytes": ("Capacity of the disks for chunks in bytes", capacity_bytes),
            "sessions": ("Sessions of clients", status.sessions),
            "routing_version": ("Routing version", status.version),
        }
    )


def files_series(files: FilesStatus) -> list[Series]:
    return _gauges(
        {
            "meta_services": ("Meta services", files.services),
            "inodes": ("Inodes; a lower bound above one million", files.inodes),
            "open_for_writing": ("Files open for writing, once for each client", files.writing),
            "unlinked_inodes": ("Removed inodes that are not collected yet", files.unlinked),
            "unlinked_bytes": ("Bytes of removed inodes that are not collected yet", files.unlinked_bytes),
        }
    )
