"""What the scheduler is told, and what it answers. Times are nanoseconds of one clock, places are node names."""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = [
    "Decision",
    "Decisions",
    "Interrupt",
    "Limit",
    "LimitKind",
    "Node",
    "Policy",
    "Request",
    "Reservation",
    "Run",
    "Snapshot",
    "Start",
    "Task",
    "Wait",
]

HOUR: Final = 3600 * SECOND


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that is given away whole. `group`: tasks name the group of nodes that they want."""

    name: str
    group: str = "default"
    zone: str = ""
    leaf: str = ""
    labels: tuple[str, ...] = ()
    usable: bool = True
    """Up, and not drained. A run on a node that is drained goes on."""
    closed: tuple[tuple[int, int], ...] = ()
    """From when until when it is given to nobody (maintenance). See `maintenance`."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a task asks for; the same for the whole of its life."""

    user: str
    user_group: str = ""
    priority: int = 10
    node_group: str = "default"
    least_nodes: int = 1
    """The gang: a task never runs with fewer."""
    most_nodes: int = 1
    time_ns: int | None = None
    """Declared: a run takes no longer, since it is stopped then."""
    labels: tuple[str, ...] = ()
    """That its nodes must have, all of them."""
    only: tuple[str, ...] = ()
    """Nodes that it may use; all where there are none."""
    never: tuple[str, ...] = ()
    """Nodes that it must not use: the user's, and those on which it failed."""
    guaranteed_ns: int = 2 * HOUR
    """A run of it is not interrupted before."""
    interrupt_cost_ns: int = 60 * SECOND
    """What every interruption costs each of its nodes: to save, and to start again. What is not saved is lost beside
    it, see `Run.unsaved_since_ns`."""

    leave_ns: int = 0
    """A run of it that is asked to leave has left after so long, at the latest."""

    @property
    def span_ns(self) -> int:
        """So long it may need its nodes, as far as that is known."""
        return self.leave_ns if self.time_ns is None else self.time_ns

    def __post_init__(self) -> None:
        if not 1 <= self.least_nodes <= self.most_nodes:
            raise UsageError(
                f"a task asks for 1 node or more, the least first, not {self.least_nodes} to {self.most_nodes} nodes"
            )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task runs now."""

    nodes: tuple[str, ...]
    started_ns: int
    backfilled: bool = False
    """It was started before tasks that come before it, and yields to them without guarantee."""
    leaving: bool = False
    """It was told to suspend, or to stop; its nodes are free soon."""
    unsaved_since_ns: int | None = None
    """What it did since then is lost if it is interrupted. None: it saves when it is asked, and loses nothing."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task that has not ended. `submitted_ns` is when it was first submitted: its place; `queued_ns` since when it
    waits: its age. Of one that was requeued it is so long ago as it has waited in all (`order.waits_since_ns`)."""

    id: int
    request: Request
    submitted_ns: int
    queued_ns: int
    run: Run | None = None
    claim: tuple[str, ...] = ()
    """Of one that waits: nodes that are kept for it until they are free, because runs on them leave."""
    held: str = ""
    """Why it may not run whatever is free, such as a task that must end before it."""
    not_before_ns: int = 0


_Name = Annotated[str, msgspec.Meta(max_length=80)]
_Names = Annotated[tuple[_Name, ...], msgspec.Meta(max_length=16_384)]
_Ns = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Nodes = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that, from `begin_ns` until before `until_ns`, are given only to these users, groups and tasks. To all
    others they are closed."""

    name: _Name
    nodes: _Names
    begin_ns: _Ns
    until_ns: _Ns
    users: _Names = ()
    user_groups: _Names = ()
    tasks: Annotated[tuple[_Ns, ...], msgspec.Meta(max_length=16_384)] = ()

    @property
    def maintenance(self) -> bool:
        """Its nodes are given to nobody."""
        return not (self.users or self.user_groups or self.tasks)

    def admits(self, task: Task) -> bool:
        request = task.request
        return request.user in self.users or request.user_group in self.user_groups or task.id in self.tasks


class LimitKind(enum.Enum):
    """Kind of limit: whose nodes it counts."""

    USER = "user"
    """Limit of the nodes of the user of this name."""
    EACH = "each"
    """Limit of the nodes of each user who has no limit of their own for the same nodes and priority."""
    GROUP = "group"
    """Limit of the nodes of all users of the group together."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """Limit of so many nodes of a group of nodes at a time; of tasks of one priority, or of any."""

    kind: LimitKind
    name: _Name = ""
    node_group: _Name = "default"
    priority: Annotated[int, msgspec.Meta(ge=0, le=50)] | None = None
    nodes: _Nodes

    @property
    def subject(self) -> tuple[LimitKind, str, str, int | None]:
        """Subject of the limit: of two with the same one, the later takes the place of the earlier."""
        return self.kind, self.name, self.node_group, self.priority

    @property
    def words(self) -> str:
        """Words that say whom it limits."""
        who = {LimitKind.USER: f"user {self.name}", LimitKind.EACH: "each user"}.get(self.kind, f"group {self.name}")
        return who if self.priority is None else f"{who} at priority {self.priority}"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a site sets."""

    age_step_ns: _Ns = 2 * HOUR
    """A task that has waited for so long counts one priority higher, and so on without end: who comes later and is
    more important does not go first for ever."""
    usage_margin: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 1.5
    """At equal priority a task interrupts one of a user whose usage over share is more than so many times its own."""
    cross_zone_nodes: _Nodes = 16
    """Tasks of fewer nodes never run in two zones."""
    cross_zone_tasks: _Nodes = 1
    """So many tasks at a time run in two zones."""
    most_claims: _Nodes = 32
    """While so many tasks have a claim, nobody is interrupted for another: what leaves at a time is bounded."""
    usage_step_ns: _Ns = 60 * SECOND
    """Usage is added up at multiples of it; decisions between them read the last sums."""
    usage_half_life_ns: _Ns = 24 * HOUR
    """After so long, what was used counts half."""
    gang_age_ns: _Ns = 4 * HOUR
    """A gang counts as so much older for each doubling of its least nodes: it waits for many to be free together, which
    small tasks that come meanwhile would put off."""

    def __post_init__(self) -> None:
        for name in ("age_step_ns", "usage_step_ns", "usage_half_life_ns"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision depends on, with the time. Usage is in node-seconds of a decaying window, as it was last
    added up; share is the number of nodes that a user may expect."""

    nodes: tuple[Node, ...]
    tasks: tuple[Task, ...]
    limits: tuple[Limit, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    usage: dict[str, float] = {}
    share: dict[str, float] = {}
    policy: Policy = Policy()


class Start(msgspec.Struct, frozen=True, tag="Start"):
    """Nodes in the order of its ranks."""

    task: int
    nodes: tuple[str, ...]
    backfilled: bool
    reason: str


class Interrupt(msgspec.Struct, frozen=True, tag="Interrupt"):
    """`for_task`: which gets its nodes; None: nobody does, they close."""

    task: int
    for_task: int | None
    reason: str


class Wait(msgspec.Struct, frozen=True, tag="Wait"):
    """`claim`: what is kept for it from now on. `earliest_ns`: when it can start by what is declared, at the latest;
    None where nobody knows."""

    task: int
    reason: str
    earliest_ns: int | None = None
    claim: tuple[str, ...] = ()


Decision: TypeAlias = Start | Interrupt | Wait
Decisions: TypeAlias = tuple[Decision, ...]
