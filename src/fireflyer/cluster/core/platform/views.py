"""What can be asked of the platform, as people and programs are shown it. Times are cluster time (about Unix time),
nanoseconds."""

from __future__ import annotations

import msgspec

from fireflyer.cluster.core.health.records import RepairTicket
from fireflyer.cluster.core.platform.store.rows import Account, ConfigRow
from fireflyer.cluster.core.scheduler.model import Limit
from fireflyer.cluster.schema.sync import Inventory
from fireflyer.cluster.schema.tasks import Cause, Outcome, TaskSpec, TaskState

__all__ = [
    "Accusation",
    "Accused",
    "AuditEntry",
    "AuditPage",
    "ClusterView",
    "HealthView",
    "LimitUse",
    "NodeView",
    "PastRun",
    "PastTask",
    "PastTaskAnswer",
    "PastTaskPage",
    "QuotaView",
    "Reserved",
    "RunView",
    "TaskAnswer",
    "TaskPage",
    "TaskReason",
    "TaskReasons",
    "TaskView",
    "UsageLine",
    "UsageReport",
    "UserView",
    "Why",
]


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    task: int
    number: int
    token: str
    state: str
    nodes: tuple[str, ...]
    scheduled_ns: int
    started_ns: int | None
    ended_ns: int | None
    over_ns: int | None
    leaving: bool
    leave_reason: str
    reason: str
    """Why it was started there."""
    cause: Cause | None
    exit_code: int | None
    end_reason: str
    step: int | None
    """Last heard."""


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    user: str
    group: str
    state: TaskState
    priority: int
    node_group: str
    least_nodes: int
    most_nodes: int
    array_index: int | None
    array_of: int | None
    """First task of its array."""
    submitted_ns: int
    since_ns: int
    ended_ns: int | None
    runs: int
    requeues: int
    held: bool
    nodes: tuple[str, ...]
    """Of its run, in the order of ranks."""
    whole_life: int
    outcome: Outcome | None
    cause: Cause | None
    exit_code: int | None
    reason: str
    account: Account
    """Until now: the sum is the task's life so far."""
    ettr: float | None
    """Productive time over all time in which it wanted to run; None where no run told."""
    spec: TaskSpec | None = None
    """Only where one task is asked for."""


class Why(msgspec.Struct, frozen=True):
    """Why a task does what it does, in one line."""

    text: str
    earliest_ns: int | None = None
    """When it can start at the latest, by the times that others declared; None where nobody knows."""
    nodes: tuple[str, ...] = ()
    """Where it can start now."""
    before: int | None = None
    """How many tasks for the same group of nodes come before it in the queue, without those that are held or paused;
    None: it does not wait, or Slurm places it."""

    @property
    def place(self) -> str:
        """In words; empty where it is not known."""
        if self.before is None:
            return ""
        return {0: "next in the queue", 1: "1 task comes before it"}.get(
            self.before, f"{self.before:,} tasks come before it"
        )


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """From when until when a node is kept for others, or for maintenance."""

    name: str
    begin_ns: int
    until_ns: int
    maintenance: bool
    """It is given to nobody."""


class Accusation(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ended by an infrastructure cause and names this node as responsible."""

    task: int
    run: int
    user: str
    at_ns: int
    """When the run ended."""
    reason: str


class Accused(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs that are remembered say of a node, since it was last resumed."""

    runs: int
    tasks: int
    users: int
    since_ns: int
    """The end of the first of these runs; likewise of the last."""
    last_ns: int


class HealthView(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks of a node have led to."""

    state: str
    """`healthy`, `suspect`, `drained`, `reset`, `reboot`, `field diagnosis`, `rma`, `testing`, `probation` or
    `returned`."""
    since_ns: int
    reason: str
    """Why, and what is to be done next; one line."""
    hold: str
    """Why a suspect is not acted on: `breaker`, `leaf`, `user`, `unconfirmed`, or `none`."""
    until_ns: int | None
    """The test lasts until then at least; or the end of the probation."""
    faults: int
    """Of the part that failed, as far as they are remembered; 0: none failed."""
    policy: int
    """Version of the policy."""
    ticket: RepairTicket | None = None
    """Only where one node was asked for."""
    warnings: tuple[str, ...] = ()
    """What its checks warn of and have not passed since, a line each: also of a node in service."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    zone: str
    leaf: str
    group: str
    labels: tuple[str, ...]
    state: str
    """`idle`, `busy`, `leaving` (its run is to leave), `lost`, `suspect` (a fault that is not acted on yet: it gets no
    new run), `drained` or `draining` (with a run), by people or by its health."""
    drain_reason: str
    task: int | None
    run: int | None
    silent_ns: int | None
    """Since it was last heard; None: not by this leader."""
    inventory: Inventory | None
    reserved: tuple[Reserved, ...] = ()
    """Now or later; what begins first comes first."""
    accused: Accused | None = None
    """None: no run accuses it."""
    accusations: tuple[Accusation, ...] = ()
    """Of these runs the newest, the newest first; only where one node was asked for."""
    health: HealthView | None = None
    """None: its checks have reported nothing that led to anything."""


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    user: str
    unfinished: int
    nodes: int
    """That it has now."""
    node_seconds: float
    share: float
    highest_priority: int


class LimitUse(msgspec.Struct, frozen=True, kw_only=True):
    limit: Limit
    user: str
    """Of a limit of each user: whose nodes are counted."""
    used: int
    """Nodes that it counts now."""


class QuotaView(msgspec.Struct, frozen=True, kw_only=True):
    """What one user has and may have."""

    user: str
    group: str
    nodes: int
    """That the user has now."""
    unfinished: int
    node_seconds: float
    """Used in the decaying window of the policy: what the order of equal priorities goes by."""
    share: float
    highest_priority: int
    limits: tuple[LimitUse, ...]


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    term: int
    time_ns: int
    nodes: int
    healthy: int
    busy: int
    tasks: dict[str, int]
    """How many are in each state, among those remembered."""
    utilisation: float | None
    """Allocated over healthy node-time, since the cluster began."""
    goodput: float | None
    """Productive over healthy node-time, of runs that have ended."""
    changes: int
    """Number of the last `Changed`."""
    outbox_first: int
    outbox_next: int
    config: ConfigRow


class TaskAnswer(msgspec.Struct, frozen=True):
    """One task with its runs."""

    task: TaskView
    runs: tuple[RunView, ...]
    why: Why


class TaskReason(msgspec.Struct, frozen=True):
    task: int
    why: Why | None
    """None: there is no such task, or it ended long ago."""


class TaskReasons(msgspec.Struct, frozen=True):
    """One for each task that was asked for, in that order."""

    reasons: tuple[TaskReason, ...]


class TaskPage(msgspec.Struct, frozen=True):
    """Newest first. `next`: `before` of the next page; None on the last one."""

    tasks: tuple[TaskView, ...]
    next: int | None


class PastTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task as the history has it; the newest changes may be missing for some seconds."""

    id: int
    name: str
    user: str
    group: str
    node_group: str
    nodes: int
    """That it asked for, at least."""
    priority: int
    state: str
    outcome: str | None
    cause: str | None
    exit_code: int | None
    reason: str
    submitted_ns: int
    ended_ns: int | None
    runs: int
    requeues: int
    account: Account
    ettr: float | None
    """Productive time over its life; None where no run told."""


class PastRun(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    state: str
    nodes: tuple[str, ...]
    reason: str
    leave_reason: str
    scheduled_ns: int
    started_ns: int | None
    ended_ns: int | None
    over_ns: int | None
    cause: str | None
    exit_code: int | None
    end_reason: str


class PastTaskAnswer(msgspec.Struct, frozen=True, kw_only=True):
    task: PastTask
    runs: tuple[PastRun, ...]
    parts: dict[str, Account]
    """Number of a run -> where the time went, with that in which the task waited for it. Their sum is the task's
    account; a run that never began has the number after the last one."""


class PastTaskPage(msgspec.Struct, frozen=True):
    """The one that ended last is first. `next`: `after` of the next page; empty on the last one."""

    tasks: tuple[PastTask, ...]
    next: str


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    entry: str
    at_ns: int
    user: str
    command: str
    target: str
    text: str
    address: str
    outcome: str
    """`done`, `refused`, or `begun`: the manager ended before it said."""


class AuditPage(msgspec.Struct, frozen=True):
    """The newest first. `next`: `after` of the next page; empty on the last one."""

    entries: tuple[AuditEntry, ...]
    next: str


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one user, or one group, had of the cluster in a span."""

    name: str
    tasks: int
    """That ended in the span."""
    succeeded: int
    failed: int
    stopped: int
    runs: int
    """That had nodes in the span."""
    node_seconds: float
    """Of these, inside the span."""
    productive: float
    """Of these, node-seconds that were productive; of runs that have ended."""


class UsageReport(msgspec.Struct, frozen=True):
    """Who had the most is first."""

    start_ns: int
    end_ns: int
    by: str
    lines: tuple[UsageLine, ...]
