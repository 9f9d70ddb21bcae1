"""The scheduler's machine, told of a run that a fault ended what the platform tells it: a pause, doubled each time, and
the node that is blamed, on which the task shall not run again. Who blames is the launcher, with the loop and without:
it looks at a node when a rank of it failed, and sees what `fireflyer.validators` sees: memory and links. Xids are seen
by health checks alone, and those exclude nobody: they take the node out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.life.states import pause_ns
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.replay.fleet.faults import Fault
from fireflyer.cluster.core.replay.fleet.nodes import FleetNodes
from fireflyer.cluster.core.replay.policy import ClusterSettings
from fireflyer.cluster.core.replay.sharing import TimeSharing
from fireflyer.cluster.core.replay.trace import TraceTask
from fireflyer.cluster.core.scheduler.events import RunEnded
from fireflyer.cluster.core.scheduler.model import Policy

__all__ = ["FleetSharing", "launcher_sees"]

USAGE_STEP_NS: Final = 900 * SECOND
"""Users' usage is added up so often, as sites may set it: each minute, 400 users of 90 days take most of the time."""
LOOKED_AT: Final = ("memory_errors", "infiniband")
MAX_EXCLUDED: Final = 16
_SETTINGS: Final = Settings(holder="simulated", address="", cluster="0" * 32)
"""With the pauses of a manager."""


def launcher_sees(fault: Fault) -> bool:
    """When it looks, seconds after the end of the run: what does not last is over by then."""
    return fault.lasts and fault.kind.check in LOOKED_AT


class FleetSharing(TimeSharing):
    def __init__(
        self, tasks: Sequence[TraceTask], cluster: ClusterSettings, fleet: FleetNodes, *, interrupt_cost_ns: int
    ) -> None:
        policy = Policy(usage_step_ns=USAGE_STEP_NS)
        super().__init__(tasks, cluster, interrupt_cost_ns=interrupt_cost_ns, policy=policy)
        self._fleet = fleet
        self._most = [min(MAX_EXCLUDED, (cluster.nodes - task.nodes) // 2) for task in tasks]
        """Nodes that a task may be kept from."""
        self._requeues: dict[int, int] = {}
        self._excluded: dict[int, int] = {}

    def vacated(self, now_ns: int, task: int) -> None:
        active = self._fleet.ending
        if active is None:
            super().vacated(now_ns, task)
            return
        requeues = self._requeues[task] = self._requeues.get(task, 0) + 1
        until_ns = now_ns + pause_ns(requeues, _SETTINGS.requeue_pause_ns, _SETTINGS.requeue_pause_max_ns)
        never: tuple[str, ...] = ()
        if launcher_sees(active.fault) and self._excluded.get(task, 0) < self._most[task]:
            self._excluded[task] = self._excluded.get(task, 0) + 1
            never = (self.name_of(active.node),)
        self.machine.apply(RunEnded(task, not_before_ns=until_ns, never=never), now_ns)
