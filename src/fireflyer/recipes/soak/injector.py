"""Does what the director says to the cluster, and takes it back."""

from __future__ import annotations

import signal
from collections.abc import Callable

from fireflyer.recipes.soak.facts import FaultFact
from fireflyer.recipes.soak.preparing import Prepared
from fireflyer.recipes.testbed.cluster import Cluster
from fireflyer.recipes.testbed.processes import (
    agent_processes,
    compute_node_processes,
    file_manager_processes,
    guard_processes,
    manager_processes,
    rank_processes,
    signal_all,
    storage_processes,
)

__all__ = ["Injector"]


class Injector:
    def __init__(
        self, cluster: Cluster, prepared: Prepared, *, suspend: Callable[[str], int], resume: Callable[[str], None]
    ) -> None:
        """`suspend`, `resume`: of a task by its name; the first says 0 where it cannot be suspended any more."""
        self._layout = cluster.layout
        self._prepared = prepared
        self._suspend = suspend
        self._resume = resume
        self._stopped: dict[int, list[int]] = {}
        """By the number of the fault, which processes stand still."""

    def inject(self, fault: FaultFact, choice: float) -> int:
        """How much it reached; 0: nothing was there. `choice`: in [0, 1), which of several processes. Raises
        `FireflyerError` where the platform does not answer."""
        prepared = self._prepared
        match fault.kind:
            case "storage-cut":
                reached = prepared.storage_link.connections
                prepared.storage_link.cut()
            case "manager-cut":
                reached = prepared.manager_link.connections
                prepared.manager_link.cut()
            case "storage-full":
                reached = 0 if prepared.storage_disk is None else prepared.storage_disk.fill()
            case "agent-full":
                reached = 0 if prepared.agent_disk is None else prepared.agent_disk.fill()
            case "task-suspend":
                reached = self._suspend(fault.target)
            case "storage-pause" | "files-pause" | "manager-pause" | "agent-pause":
                self._stopped[fault.number] = self._processes(fault, choice)
                reached = signal_all(self._stopped[fault.number], signal.SIGSTOP)
            case _:
                reached = signal_all(self._processes(fault, choice), signal.SIGKILL)
        return reached

    def release(self, fault: FaultFact) -> None:
        """Raises `FireflyerError` where the platform does not answer."""
        prepared = self._prepared
        match fault.kind:
            case "storage-cut":
                prepared.storage_link.mend()
            case "manager-cut":
                prepared.manager_link.mend()
            case "storage-full" if prepared.storage_disk is not None:
                prepared.storage_disk.empty()
            case "agent-full" if prepared.agent_disk is not None:
                prepared.agent_disk.empty()
            case "task-suspend":
                self._resume(fault.target)
        signal_all(self._stopped.pop(fault.number, []), signal.SIGCONT)

    def release_everything(self) -> None:
        """However the soak ends: what stands still could not be ended in good order."""
        for pids in self._stopped.values():
            signal_all(pids, signal.SIGCONT)
        for link in (self._prepared.storage_link, self._prepared.manager_link):
            link.mend()
        for disk in (self._prepared.storage_disk, self._prepared.agent_disk):
            if disk is not None:
                disk.empty()

    def _processes(self, fault: FaultFact, choice: float) -> list[int]:
        layout = self._layout
        match fault.kind:
            case "storage-kill" | "storage-away" | "storage-pause":
                return storage_processes(layout, int(fault.target))
            case "files-kill" | "files-pause":
                return file_manager_processes(layout)
            case "manager-kill" | "manager-pause":
                return manager_processes(layout)
            case "agent-kill" | "agent-pause":
                return agent_processes(layout, fault.target)
            case "node-kill":
                return compute_node_processes(layout, fault.target)
            case "rank-kill":
                return _one(rank_processes(layout, fault.target), choice)
            case "guard-kill":
                return _one(guard_processes(layout, fault.target), choice)
        return []


def _one(pids: list[int], choice: float) -> list[int]:
    return [pids[int(choice * len(pids))]] if pids else []
