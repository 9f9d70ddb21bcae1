"""What the platform's machine is told, and what it asks its shell to do."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.platform.commands import Command
from fireflyer.cluster.core.platform.node_checking import Checks, NodeChecking
from fireflyer.cluster.core.platform.slurm.messages import SlurmEvent, SlurmSettings
from fireflyer.cluster.core.platform.webhooks import Deliver, Delivered, WebhookChange
from fireflyer.cluster.schema.sync import Sync
from fireflyer.cluster.schema.tasks import MAX_ARRAY, TaskSpec
from fireflyer.kvstore.core.fenced import Outcome, Transact

__all__ = [
    "LEASE_KEY",
    "MAX_PENDING",
    "Answer",
    "Audited",
    "Changed",
    "ChecksChanged",
    "Commanded",
    "Copied",
    "Done",
    "Effect",
    "Event",
    "Leave",
    "LogDecision",
    "NotLeader",
    "OrdersChanged",
    "Refused",
    "Result",
    "Settings",
    "SlurmFollowed",
    "StepDown",
    "Submission",
    "Submitted",
    "Synced",
    "Tick",
    "TookLead",
    "WebhookAsked",
]

LEASE_KEY: Final = b"PMle"
"""Of the row of the managers' lease, for `LeaseMachine` and `carry_out`."""
MAX_PENDING: Final = 4096
"""Submissions and commands that wait for a transaction."""

IdempotencyKey = Annotated[str, msgspec.Meta(max_length=80)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one manager. What the site sets while it runs are rows: see `commands`."""

    holder: str
    """Unique to this process: a name and something random."""
    address: str
    """Where the others send those who ask."""
    managers: tuple[str, ...] = ()
    """`host:port` of all managers, as agents reach them."""
    cluster: str
    """At least 128 random bits in hexadecimal: becomes part of all run tokens if the store is new. A store that was
    restored from a backup must get another one (`rows.ClusterRow`)."""
    lease_ns: int = 4 * SECOND
    lost_ns: int = 20 * SECOND
    """A node of which nothing was heard for so long gets no new run."""
    stop_after_ns: int = 300 * SECOND
    """An agent that has heard of no manager for so long stops all runs; also the longest life of a guard without its
    launcher. The same for all managers and for the life of the cluster."""
    stop_slack_ns: int = 120 * SECOND
    """What it may take after that until the last process has ended, and the drift of two clocks."""
    start_timeout_ns: int = 120 * SECOND
    """From the orders until the agent says that it has the run."""
    prepare_timeout_ns: int = 3600 * SECOND
    """From then until its ranks run: the snapshot is fetched and the environment built."""
    suspend_slack_ns: int = 120 * SECOND
    """After a task's grace period until its run is stopped by the manager."""
    requeue_pause_ns: int = 10 * SECOND
    """After the first infrastructure failure; doubles with each, up to `requeue_pause_max_ns`."""
    requeue_pause_max_ns: int = 1800 * SECOND
    schedule_every_ns: int = 50 * MS
    """Passes of the scheduler are so far apart at least."""
    settle_ns: int = 10 * SECOND
    """A new leader starts and interrupts nothing for so long, unless all nodes have been heard before."""
    history: bool = False
    """Changes are also put into the outbox; somebody must copy and clear it (`Copied`)."""
    totals_every_ns: int = 30 * SECOND
    """Node-time is put into the outbox so often."""
    max_outbox_rows: int = 1_000_000
    """Submissions are refused from then on."""
    max_unfinished_per_user: int = 10_000
    max_tasks: int = 60_000
    """That have not finished."""
    max_finished: int = 20_000
    """That are remembered; the oldest are forgotten first."""
    max_nodes: int = 16_384
    slurm: SlurmSettings | None = None
    """Slurm places tasks; None: our scheduler does, on nodes whose agents have joined."""
    slurm_output: str = "/dev/null"
    """Where jobs of Slurm print; their runs have logs of their own."""
    slurm_options: tuple[str, ...] = ()
    """Of `sbatch`, for all jobs."""
    node_check: tuple[str, ...] = ()
    """Asked whether a node is at fault, when a rank on it failed; empty: none is asked."""
    node_check_limit_ns: int = 60 * SECOND

    checking: NodeChecking = msgspec.field(default_factory=NodeChecking)

    def __post_init__(self) -> None:
        if len(self.cluster) < 32:
            raise UsageError("cluster must have at least 32 hexadecimal digits; draw it at random")


# --- events ---


class Tick(msgspec.Struct, frozen=True, tag="Tick"):
    """Time has passed; comes at least every eighth of the lease. `wall_ns`: Unix time, used when a manager begins to
    lead (see `ledger`), and never compared with another machine's."""

    wall_ns: int


class Submitted(msgspec.Struct, frozen=True, kw_only=True, tag="Submitted"):
    """`call` is the shell's: it comes back in the one `Answer`. With `key` the same submission may be sent again: it
    is answered with the tasks of the first one."""

    call: int
    user: str
    group: str = ""
    """Whose limits count beside the user's."""
    roles: tuple[str, ...] = ()
    address: str = ""
    """Of who asks, for the audit."""
    key: IdempotencyKey = ""
    specs: Annotated[tuple[TaskSpec, ...], msgspec.Meta(min_length=1, max_length=MAX_ARRAY)]


class Commanded(msgspec.Struct, frozen=True, kw_only=True, tag="Commanded"):
    call: int
    user: str
    roles: tuple[str, ...] = ()
    address: str = ""
    """Of who asks, for the audit."""
    command: Command


class WebhookAsked(msgspec.Struct, frozen=True, kw_only=True, tag="WebhookAsked"):
    """A user adds, removes or tests a webhook. Not a `Command`: those come from outside as they are."""

    call: int
    user: str
    roles: tuple[str, ...] = ()
    change: WebhookChange


class Audited(msgspec.Struct, frozen=True, kw_only=True, tag="Audited"):
    """Something that the shell does for a user, and that is written down before: `Done` when it is durable."""

    call: int
    user: str
    what: str
    target: str
    text: str


class Synced(msgspec.Struct, frozen=True, tag="Synced"):
    """What the agent of `node` said; the credential of its connection has proven which node it is. The shell holds the
    call until `PlatformMachine.orders_for(node)` is newer than what the agent has heard, `OrdersChanged` names the
    node, or HOLD_NS are over."""

    node: str
    sync: Sync


class Copied(msgspec.Struct, frozen=True, tag="Copied"):
    """Rows of the outbox with numbers below `until` are in the tables of the history."""

    until: int


class ChecksChanged(msgspec.Struct, frozen=True, tag="ChecksChanged"):
    """Nodes are checked like this from now on: each hears of it with its next orders."""

    checks: Checks


class Leave(msgspec.Struct, frozen=True, tag="Leave"):
    """The process is to end; it may when `PlatformMachine.left`. Ticks go on until then."""


Event: TypeAlias = (
    Tick
    | Submitted
    | Commanded
    | WebhookAsked
    | Audited
    | Delivered
    | Synced
    | Copied
    | ChecksChanged
    | Leave
    | SlurmEvent
    | Outcome
)


# --- effects ---


class Submission(msgspec.Struct, frozen=True, tag="Submission"):
    """Tasks in the order of the specs; of an array, all of them."""

    tasks: tuple[int, ...]
    repeated: bool = False
    """They were submitted before, with the same key."""


class Done(msgspec.Struct, frozen=True, tag="Done"):
    """One line that says what was changed."""

    text: str
    number: int = 0
    """Of what was made."""


class Refused(msgspec.Struct, frozen=True, tag="Refused"):
    """Of an error's wire code and message (`base.errors.error_from_wire`)."""

    code: str
    message: str


class NotLeader(msgspec.Struct, frozen=True, tag="NotLeader"):
    """Ask there; empty where nobody leads."""

    address: str


Result: TypeAlias = Submission | Done | Refused | NotLeader


class Answer(msgspec.Struct, frozen=True, tag="Answer"):
    """To the caller, once; sent after the commit."""

    call: int
    result: Result


class OrdersChanged(msgspec.Struct, frozen=True, tag="OrdersChanged"):
    """`orders_for(node)` has a new version: answer the call that is held for it."""

    node: str


class Changed(msgspec.Struct, frozen=True, tag="Changed"):
    """For those who watch. Numbers grow by one with each change that was committed, also from leader to leader;
    `what` is `task`, `node` or `settings`, `name` its id or name, `state` what it is now."""

    number: int
    what: str
    name: str
    state: str


class SlurmFollowed(msgspec.Struct, frozen=True, tag="SlurmFollowed"):
    """What follows from these events is committed: `slurm_work` and `slurm_jobs` are of after them."""

    events: tuple[SlurmEvent, ...]


class LogDecision(msgspec.Struct, frozen=True, tag="LogDecision"):
    """A decision and its reason, for the log."""

    text: str


class TookLead(msgspec.Struct, frozen=True, tag="TookLead"):
    """All rows are read: this manager answers, from now on."""

    term: int


class StepDown(msgspec.Struct, frozen=True, tag="StepDown"):
    """This manager leads no longer: held calls are to be answered `NotLeader`."""

    reason: str


Effect: TypeAlias = (
    Transact | Answer | OrdersChanged | Changed | SlurmFollowed | LogDecision | TookLead | StepDown | Deliver
)
