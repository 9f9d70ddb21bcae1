"""What the platform's managers keep in the key-value store: keys and values.

    PMle                 the lease                      PMst                 counters of the whole cluster
    PMcf                 what the site sets             PMsp + task (8)      a submission: what its tasks are
    PMta + task (8)      a task                         PMru + task (8) + run (4)    a run
    PMno + name          a node                         PMpl + name          the run that has the node
    PMus + name          a user's usage                 PMob + number (8)    a change that the history has not yet
    PMwh + id (8)        a webhook                      PMnt + number (8)    a notification that was not delivered yet
    PMsj + task (8) + number (4)    a job of Slurm that was asked for a task
    PMhe + name          the health of a node           PMrt + id (8)        a ticket of a repair
    PMhp + key           the faults of a part

Numbers are big-endian, so a range is in their order. A value is one byte, the version of its format, and MessagePack.
What does not decode is `DataCorruption` naming the key: the manager then does not lead, rather than guess.

All times are *cluster time*, nanoseconds: see `ledger`.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from fireflyer.base.errors import DataCorruption
from fireflyer.cluster.core.health.records import NodeHealth, PartHistory, RepairTicket
from fireflyer.cluster.core.platform.commands import PriorityBound
from fireflyer.cluster.core.scheduler.model import Limit, Policy, Reservation
from fireflyer.cluster.schema.sync import EndedRun, Inventory
from fireflyer.cluster.schema.tasks import Cause, Outcome, TaskSpec, TaskState
from fireflyer.cluster.schema.webhooks import EventKind, NotificationData
from fireflyer.kvstore.core.rows import decode_row, encode_row

__all__ = [
    "CONFIG_KEY",
    "HEALTH",
    "JOBS",
    "NODES",
    "NOTIFICATIONS",
    "OUTBOX_PREFIX",
    "PARTS",
    "PLACES",
    "PREFIX",
    "REPAIRS",
    "RUNS",
    "STATE_KEY",
    "SUBMISSIONS",
    "TASKS",
    "USAGE",
    "WEBHOOKS",
]
__all__ += [
    "Account",
    "ClusterRow",
    "ConfigRow",
    "JobRow",
    "JobState",
    "NodeRow",
    "NotificationRow",
    "PlaceRow",
    "RowKind",
    "RunRow",
    "RunState",
    "SubmissionRow",
]
__all__ += ["TaskRow", "UsageRow", "WebhookRow", "Wish", "decode_row", "encode_row", "outbox_key"]

PREFIX: Final = b"PM"
STATE_KEY: Final = PREFIX + b"st"
CONFIG_KEY: Final = PREFIX + b"cf"
OUTBOX_PREFIX: Final = PREFIX + b"ob"

R = TypeVar("R", bound=msgspec.Struct)


class ClusterRow(msgspec.Struct, frozen=True, kw_only=True):
    """Changed by every transaction but those of the lease: (term, number) names the one that wrote it."""

    cluster: str
    """Part of all run tokens."""
    term: int = 0
    number: int = 0
    time_ns: int = 0
    """Cluster time of the transaction."""
    next_task: int = 1
    changes: int = 0
    """Numbers of `messages.Changed` that were given out."""
    outbox_first: int = 0
    outbox_next: int = 0
    totals_at_ns: int = 0
    """Until when the following are added up."""
    node_ns: int = 0
    """Nodes that were known, times time."""
    healthy_ns: int = 0
    """Of these, nodes that were heard."""
    allocated_ns: int = 0
    """Of these, nodes that a run had."""
    productive_ns: int = 0
    """Nodes times productive time, of runs that have ended."""
    starts_after_ns: int = 0
    """Nothing is started or interrupted before: the store was restored, and runs that it does not know may live."""
    next_webhook: int = 1
    next_notification: int = 1


class ConfigRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the site sets."""

    policy: Policy = Policy()
    guaranteed_ns: int = 7200 * 10**9
    limits: tuple[Limit, ...] = ()
    shares: dict[str, float] = {}
    bounds: tuple[PriorityBound, ...] = ()
    reservations: tuple[Reservation, ...] = ()


class SubmissionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One spec; of an array, for all of its tasks. Kept as long as one of them is. `id`: of the first one."""

    id: int
    spec: TaskSpec
    count: int = 1
    key: str = ""
    """The idempotency key of its user."""
    digest: str = ""
    """Of all specs that came with the key."""
    first: int = 0
    """Of the tasks that came with it, and how many they are."""
    total: int = 1


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a task's life went, until its row was last written; the sum is that time exactly."""

    queue_ns: int = 0
    suspended_ns: int = 0
    """It had saved and waited for nodes, or for its user."""
    platform_ns: int = 0
    """A run of it had nodes, and its launcher did not say what for: from the decision until the launcher began, and
    from its end until the manager knew."""
    release_ns: int = 0
    """Its last run had ended, and the last process of it had not."""
    start_ns: int = 0
    productive_ns: int = 0
    checkpoint_ns: int = 0
    lost_ns: int = 0
    restart_ns: int = 0
    other_ns: int = 0
    unknown_ns: int = 0
    """Ranks ran and nobody told what they did."""

    @property
    def total_ns(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    submission: int
    array_index: int | None = None
    name: str
    user: str
    group: str = ""
    state: TaskState
    priority: int
    submitted_ns: int
    """Its place in the queue for ever."""
    queued_ns: int
    """Since when it waits, or waited before its run began: its age."""
    since_ns: int
    """Since when it is in its state."""
    counted_ns: int
    """Until when `account` adds up its life."""
    account: Account = Account()
    runs: int = 0
    """That were begun; the last one is number `runs - 1`."""
    requeues: int = 0
    """After infrastructure causes."""
    not_before_ns: int = 0
    excluded: tuple[str, ...] = ()
    """Nodes on which it failed."""
    claim: tuple[str, ...] = ()
    """Nodes that are kept for it."""
    held: bool = False
    """Its user suspended it."""
    stopping: str = ""
    """Who wants it to end, and why."""
    whole_life: int = 0
    outcome: Outcome | None = None
    cause: Cause | None = None
    """Of the end of its last run."""
    exit_code: int | None = None
    reason: str = ""
    """Of its end."""
    ended_ns: int | None = None
    jobs: int = 0
    """Of Slurm that were asked for it; the last one is number `jobs - 1`."""


class RunState(enum.Enum):
    SCHEDULED = "scheduled"
    """Its nodes are its own; the launcher was not heard of."""
    RUNNING = "running"
    ENDED = "ended"
    """The launcher has ended, certainly; processes on other nodes perhaps not yet."""
    OVER = "over"
    """No process of it is left, and none will ever be started."""


class Wish(enum.Enum):
    """Why a run is to leave its nodes."""

    NONE = "none"
    INTERRUPT = "interrupt"
    """Another task comes first."""
    USER_SUSPEND = "user_suspend"
    USER_STOP = "user_stop"
    TIME_LIMIT = "time_limit"
    NO_START = "no_start"
    """The launcher or the ranks did not start in time."""
    LOST = "lost"
    """Nobody knows of the launcher any more."""
    ENDED = "ended"
    """The launcher has ended: what is left is to end too."""
    NODE_FAULT = "node_fault"
    """A check found a node of it faulty."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    task: int
    number: int
    token: str
    nodes: tuple[str, ...]
    """In the order of ranks; the first one has the launcher. Which of them it still has: `PlaceRow`."""
    state: RunState = RunState.SCHEDULED
    wanted: Literal["run", "suspend", "stop"] = "run"
    wish: Wish = Wish.NONE
    wish_reason: str = ""
    reason: str = ""
    """Of its start."""
    backfilled: bool = False
    queued_ns: int
    """Of the task, when it was scheduled."""
    scheduled_ns: int
    prepared_ns: int | None = None
    """When its launcher was first heard of."""
    started_ns: int | None = None
    wanted_ns: int | None = None
    """Since when it is wished to leave."""
    ended_ns: int | None = None
    over_ns: int | None = None
    ended: EndedRun | None = None
    saved_ns: int | None = None
    """Of one that has ended: when the state of its last checkpoint was taken; None: nobody told of one."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    zone: str = ""
    leaf: str = ""
    group: str = "default"
    labels: tuple[str, ...] = ()
    drained: bool = False
    drain_reason: str = ""
    inventory: Inventory | None = None
    added_ns: int = 0
    resumed_ns: int = 0
    """When an operator last gave it to tasks again: what accused it before was looked at."""


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """The one run that the node belongs to; no row: it is free."""

    name: str
    task: int
    run: int


class JobState(enum.Enum):
    ASKED = "asked"
    """Slurm is being asked, or was: whether it has the job is known when the job is found by its name."""
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job of Slurm in which agents come up for a run of a task."""

    task: int
    number: int
    name: str
    """Made from durable numbers, so given once: Slurm is asked for no second job of this name."""
    state: JobState = JobState.ASKED
    asked_ns: int
    """When the manager that leads in `term` was to ask Slurm for it."""
    term: int
    retry_ns: int | None = None
    """It is asked again then, unless the job was found; None: the asking is under way, or succeeded."""
    refusal: str = ""
    """What Slurm said when it was asked last."""
    slurm_id: int = 0
    """0: not known yet."""
    slurm_state: str = ""
    slurm_reason: str = ""
    nodes: tuple[str, ...] = ()
    """As Slurm calls them, once it runs."""
    running_ns: int | None = None
    run: int | None = None
    """Number of the run that it has, or had."""
    leave: int | None = None
    """Its agents are to go, and its exit code is to be this one."""
    leave_ns: int | None = None
    ended_ns: int | None = None
    start_s: int | None = None
    """Unix time by Slurm's clock; likewise `end_s`."""
    end_s: int | None = None
    account: str = ""
    """Where these are from: `squeue`, `scontrol`, `sacct` or `jobcomp`; empty: not known."""
    submit_s: int | None = None
    """By Slurm's clock. slurmctld that lost a job gives its number again."""
    exit_code: int | None = None
    """Of its batch script, as `account` says it; likewise `signal`, 0 where none ended it."""
    signal: int | None = None


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Node-seconds of a decaying window, as they were at `at_ns`."""

    name: str
    node_seconds: float
    at_ns: int


class WebhookRow(msgspec.Struct, frozen=True, kw_only=True):
    """Where a user is told what happens."""

    id: int
    user: str
    url: str
    events: tuple[str, ...]
    named: bool
    """Only of tasks that name it."""
    nonce: bytes
    """The secret is computed from it."""
    created_ns: int
    delivered: int = 0
    given_up: int = 0
    dropped: int = 0
    failures: int = 0
    """In a row."""
    retry_ns: int = 0
    """Nothing is sent before."""
    last: str = ""
    """How the newest attempt went."""


class NotificationRow(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    webhook: int
    user: str
    """Of the webhook."""
    event_id: str
    kind: EventKind
    at_ns: int
    data: NotificationData


class RowKind(Generic[R]):
    """One kind of row that there are many of. `fields` make its key: numbers of so many bytes, or one name (0)."""

    def __init__(self, prefix: bytes, row_type: type[R], fields: tuple[tuple[str, int], ...]) -> None:
        self.prefix = PREFIX + prefix
        self.end = self.prefix[:-1] + bytes([self.prefix[-1] + 1])
        self._row_type = row_type
        self._fields = fields

    def key(self, row: R) -> bytes:
        return self.key_of(*(getattr(row, name) for name, _ in self._fields))

    def key_of(self, *parts: Any) -> bytes:
        """Of the row whose key is made of these."""
        sizes = [size for _, size in self._fields]
        return self.prefix + b"".join(
            part.to_bytes(size, "big") if size else str(part).encode() for part, size in zip(parts, sizes, strict=True)
        )

    def decode(self, key: bytes, value: bytes) -> R:
        """Raises `DataCorruption`, also when the row is another one's."""
        row = decode_row(key, value, self._row_type)
        if self.key(row) != key:
            raise DataCorruption(f"row {key.hex()} of the key-value store is that of another key; restore the store")
        return row


TASKS: Final = RowKind(b"ta", TaskRow, (("id", 8),))
SUBMISSIONS: Final = RowKind(b"sp", SubmissionRow, (("id", 8),))
RUNS: Final = RowKind(b"ru", RunRow, (("task", 8), ("number", 4)))
NODES: Final = RowKind(b"no", NodeRow, (("name", 0),))
PLACES: Final = RowKind(b"pl", PlaceRow, (("name", 0),))
JOBS: Final = RowKind(b"sj", JobRow, (("task", 8), ("number", 4)))
USAGE: Final = RowKind(b"us", UsageRow, (("name", 0),))
HEALTH: Final = RowKind(b"he", NodeHealth, (("name", 0),))
REPAIRS: Final = RowKind(b"rt", RepairTicket, (("id", 8),))
PARTS: Final = RowKind(b"hp", PartHistory, (("key", 0),))

WEBHOOKS: Final = RowKind(b"wh", WebhookRow, (("id", 8),))
NOTIFICATIONS: Final = RowKind(b"nt", NotificationRow, (("number", 8),))


def outbox_key(number: int) -> bytes:
    return OUTBOX_PREFIX + number.to_bytes(8, "big")
