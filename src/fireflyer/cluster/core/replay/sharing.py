"""The platform's own scheduler as a policy of a replay: its machine, told what happens, decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fireflyer.cluster.core.replay.policy import ClusterSettings, Decision, Interrupt, Start
from fireflyer.cluster.core.replay.trace import TraceTask
from fireflyer.cluster.core.scheduler import events, model
from fireflyer.cluster.core.scheduler.machine import SchedulerMachine

__all__ = ["TimeSharing"]


class TimeSharing:
    """Every user has the same share, unless `shares` says otherwise."""

    def __init__(
        self,
        tasks: Sequence[TraceTask],
        cluster: ClusterSettings,
        *,
        interrupt_cost_ns: int,
        policy: model.Policy | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self._tasks, self._cluster, self._interrupt_cost_ns = tasks, cluster, interrupt_cost_ns
        self._nodes = [
            model.Node(name=f"n{node:05d}", zone=f"z{cluster.zone(node)}", leaf=f"l{node // cluster.leaf_nodes:04d}")
            for node in range(cluster.nodes)
        ]
        self._number = {node.name: number for number, node in enumerate(self._nodes)}
        users = dict.fromkeys(task.user for task in tasks)
        known = model.Policy(cross_zone_nodes=cluster.cross_zone_nodes, cross_zone_tasks=cluster.cross_zone_tasks)
        self.machine = SchedulerMachine(known if policy is None else policy)
        for node in self._nodes:
            self.machine.apply(events.NodeChanged(node), 0)
        share = dict.fromkeys(users, cluster.nodes / len(users)) if shares is None else dict(shares)
        self.machine.apply(events.SharesChanged(share), 0)

    @property
    def name(self) -> str:
        return "time sharing"

    def name_of(self, node: int) -> str:
        """As the machine knows it."""
        return self._nodes[node].name

    def submitted(self, now_ns: int, tasks: Sequence[int]) -> None:
        new = tuple(self._task(task, now_ns) for task in tasks)
        self.machine.apply(events.TasksSubmitted(new), now_ns)

    def finished(self, now_ns: int, task: int) -> None:
        self.machine.apply(events.TaskEnded(task), now_ns)

    def vacated(self, now_ns: int, task: int) -> None:
        self.machine.apply(events.RunEnded(task), now_ns)

    def node_down(self, now_ns: int, node: int) -> None:
        down = model.Node(
            name=self._nodes[node].name, zone=self._nodes[node].zone, leaf=self._nodes[node].leaf, usable=False
        )
        self.machine.apply(events.NodeChanged(down), now_ns)

    def node_up(self, now_ns: int, node: int) -> None:
        self.machine.apply(events.NodeChanged(self._nodes[node]), now_ns)

    def decide(self, now_ns: int) -> Sequence[Decision]:
        made: list[Decision] = []
        for one in self.machine.decide(now_ns):
            if isinstance(one, model.Start):
                made.append(Start(one.task, tuple(self._number[name] for name in one.nodes)))
            elif isinstance(one, model.Interrupt):
                made.append(Interrupt(one.task, saves=True))
        return made

    def wake_ns(self) -> int | None:
        return self.machine.wake_ns()

    def _task(self, number: int, now_ns: int) -> model.Task:
        row = self._tasks[number]
        request = model.Request(
            user=row.user,
            user_group=row.group,
            priority=row.priority,
            least_nodes=row.nodes,
            most_nodes=row.nodes,
            time_ns=row.time_ns,
            guaranteed_ns=self._cluster.guaranteed_ns,
            interrupt_cost_ns=self._interrupt_cost_ns,
        )
        return model.Task(id=number, request=request, submitted_ns=now_ns, queued_ns=now_ns)
