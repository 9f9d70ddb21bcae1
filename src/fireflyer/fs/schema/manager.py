"""What storage nodes, clients and administrators say to the cluster manager, and what it answers.

One request, one answer, in any order; a request may be sent again at any time, to any manager. Answers that every
request can get: `NotPrimary` (ask another one), `ManagerError` (an error of `fireflyer.base.errors`, by its wire code).

What a storage process promises (the manager's decisions are safe only for those who keep it):

1. It registers when it starts, with a nonce of its own, while it holds the lock of its directories.
2. It takes over the sessions and the routing of a heartbeat's answer, in this order, unless it knows newer ones, before
   that answer extends its fence.
3. A target does what its state in the newest chain version known to the process allows, and only while the fence is
   open.
4. It learns of routing from the answers to its own heartbeats and from nothing else.
5. What it reports of a target, it reports for that chain version. GONE means: it has stopped using whatever role it had
   in this version or before, and will not use one until it learns of a later version that gives it one.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

from fireflyer.fs.schema.ids import ChainId, ChainVersion, Incarnation, NodeId, RoutingVersion, TableId, TargetId
from fireflyer.fs.schema.routing import MAX_REPLICAS, Address, Chain, RoutingDelta
from fireflyer.fs.schema.sessions import ClientAnswer, ClientRequest, SessionsDelta, SessionsVersion

__all__ = [
    "COUNTED",
    "MAX_PER_REQUEST",
    "MAX_TARGETS_PER_NODE",
    "MAX_UNREACHABLE",
    "AddChains",
    "AddMoves",
    "AddNode",
    "AddTable",
    "AddTargets",
    "AdminRequest",
    "Answer",
    "CancelMoves",
    "ChangeMembers",
    "Condition",
    "Done",
    "Drain",
    "FilesStatus",
    "GetFilesStatus",
    "GetMetaServices",
    "GetMoves",
    "GetRouting",
    "GetStatus",
    "GiveUp",
    "Heartbeat",
    "HeartbeatAnswer",
    "ManagerError",
    "MetaServices",
    "MoveList",
    "MoveStatus",
    "NewChain",
    "NewMove",
    "NodeStatus",
    "NotPrimary",
    "Override",
    "OverrideWarning",
    "Register",
    "Registered",
    "Request",
    "RetireNode",
    "RetireTargets",
    "RotateKeys",
    "RoutingAnswer",
    "StaleIncarnation",
    "Status",
    "Superseded",
    "TargetReport",
    "TargetStatus",
]

MAX_TARGETS_PER_NODE: Final = 256
MAX_UNREACHABLE: Final = 64
"""Peers of which one heartbeat complains."""
MAX_PER_REQUEST: Final = 1024
"""Targets or chains named by one request of an administrator."""

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Sequence: TypeAlias = _U63
_RealNode = Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
_Targets = Annotated[tuple[TargetId, ...], msgspec.Meta(max_length=MAX_PER_REQUEST)]


class Condition(enum.StrEnum):
    """How a target is, as its process says."""

    GONE = "gone"
    ONLINE = "online"
    UP_TO_DATE = "up_to_date"
    """As the syncing one of its chain it has been given everything that its predecessor has."""


class TargetReport(msgspec.Struct, frozen=True, array_like=True):
    """Of one target, for one version of its chain."""

    target: TargetId
    condition: Condition
    chain_version: ChainVersion
    clean: bool = True
    """False: it may lack updates that it acknowledged (not flushed before its machine went down, or another disk)."""
    used_bytes: _U63 = 0
    capacity_bytes: _U63 = 0
    chain: ChainId = 0
    """Whose version it is: a target that is moved comes from a chain with versions of its own. 0: not said."""
    disk: _U63 = 0
    """Its number on the machine, where the capacity is what the whole disk has left; 0 where it is the target's own."""
    changed_in: ChainVersion = 0
    """Of one that is gone: the last version of the chain in which it has changed anything, or began to serve. 0: not
    said."""
    served_in: ChainVersion = 0
    """Of a `restored` chain: the last version in which it served, as its directory says; 0: that does not say."""
    served_with: Annotated[tuple[TargetId, ...], msgspec.Meta(max_length=MAX_REPLICAS)] = ()
    """All members of the chain, whatever their states, as far as its directory knows."""


# --- storage nodes ---


class Register(msgspec.Struct, frozen=True, tag="Register"):
    """A storage process has started and wants its incarnation. Answered by `Registered`, or by `StaleIncarnation`:
    then again
    with the incarnation named there. `Busy` while another machine's process of this node may still be alive."""

    node: _RealNode
    nonce: _Name
    """Random, drawn once by the process: the same request again gets the same answer."""
    previous: Incarnation
    """The node's last incarnation as far as this process knows; 0 at first. What makes a late copy from a process that
    is dead differ from the present one: it does not know the incarnations after its own."""
    address: Address
    machine: _Name
    """Names the machine: on the same one, the directories' locks prove that the process before is dead."""
    boot: _Name
    """Names the boot of the machine."""
    cluster: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Whose directories they are; a manager of another cluster refuses. Empty: not checked."""


class Registered(msgspec.Struct, frozen=True, tag="Registered"):
    """From now on the node's messages carry this incarnation; older ones are `Superseded`. Extends no fence."""

    incarnation: Incarnation
    failure_timeout_ns: _U63
    """T of this cluster: the fence is half of it."""
    key_ids: tuple[_U63, ...] = (1,)
    """Of the keys of capabilities, which services derive from the node secret: the first one signs, all are valid."""


class StaleIncarnation(msgspec.Struct, frozen=True, tag="Behind"):
    """There has been another incarnation since `Register.previous`: this one."""

    incarnation: Incarnation


class Superseded(msgspec.Struct, frozen=True, tag="Superseded"):
    """A later process of this node has registered: whoever gets this must end."""

    incarnation: Incarnation


class Heartbeat(msgspec.Struct, frozen=True, tag="Heartbeat"):
    """Every few hundred milliseconds, and at once when a report changes. Answered by `HeartbeatAnswer`."""

    node: _RealNode
    incarnation: Incarnation
    sequence: _Sequence
    """One more with each: an older one than the last is not looked at."""
    known: RoutingVersion = 0
    """The routing that the node has; 0 for none."""
    reports: Annotated[tuple[TargetReport, ...], msgspec.Meta(max_length=MAX_TARGETS_PER_NODE)] = ()
    unreachable: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MAX_UNREACHABLE)] = ()
    """Neighbours in chains that have not answered it for a while."""
    sessions: SessionsVersion = 0
    """The list of living sessions that the process has; 0 for none."""


class GiveUp(msgspec.Struct, frozen=True, array_like=True):
    """Stop using this target's role, then report it GONE for this version. Void in any other version of the chain."""

    target: TargetId
    chain: ChainId
    chain_version: ChainVersion
    reason: _Text


class HeartbeatAnswer(msgspec.Struct, frozen=True, tag="HeartbeatAnswer"):
    """Of a primary: the fence extends to T/2 after heartbeat `sequence` was sent."""

    sequence: _Sequence
    routing: RoutingDelta | None
    """None: unchanged."""
    give_up: Annotated[tuple[GiveUp, ...], msgspec.Meta(max_length=MAX_TARGETS_PER_NODE)] = ()
    sessions: SessionsDelta | None = None
    """None: unchanged. Belongs to the routing: both are taken over, or neither."""
    key_ids: tuple[_U63, ...] = ()
    """As in `Registered`: these are valid now."""


# --- everybody ---


class GetRouting(msgspec.Struct, frozen=True, tag="GetRouting"):
    known: RoutingVersion = 0


class RoutingAnswer(msgspec.Struct, frozen=True, tag="RoutingAnswer"):
    routing: RoutingDelta | None
    """None: unchanged."""


class GetMetaServices(msgspec.Struct, frozen=True, tag="GetMetaServices"):
    """Any manager answers, whether primary or not."""


class MetaServices(msgspec.Struct, frozen=True, tag="MetaServices"):
    """Where files are served now: those that have been heard in the last seconds, sorted. Any of them is right."""

    addresses: tuple[Address, ...]


COUNTED: Final = 20_000


class GetFilesStatus(msgspec.Struct, frozen=True, tag="GetFilesStatus"):
    """Any manager answers. What waits to be collected, and who writes, is counted when it is asked."""


class FilesStatus(msgspec.Struct, frozen=True, tag="FilesStatus"):
    services: int
    """That serve files."""
    inodes: int
    all_inodes: bool
    """False: there are more than were counted."""
    writing: int
    """Files that are open for writing, once for each client; `COUNTED` or more: at least so many."""
    unlinked: int
    """That wait to be collected: inodes, and their bytes; `COUNTED` or more as above."""
    unlinked_bytes: int
    last_error: str = msgspec.field(default="", name="trouble")
    """What the collector could not do, if it is in the manager's process."""
    inodes_age_ns: int = 0
    """How long before the question they were counted: large numbers are not counted for each."""


class NotPrimary(msgspec.Struct, frozen=True, tag="NotPrimary"):
    """This manager may not answer now. `address`: of the one that took the lease, as far as is known; else empty."""

    address: Annotated[str, msgspec.Meta(max_length=256)]


class ManagerError(msgspec.Struct, frozen=True, tag="Refusal"):
    """An error; `code` and `message` as in `fireflyer.base.errors`."""

    code: str
    message: str


# --- administrators: all may be repeated, what is there already is left as it is ---


class AddNode(msgspec.Struct, frozen=True, tag="AddNode"):
    """Lets a storage node register under this id."""

    node: _RealNode


class AddTargets(msgspec.Struct, frozen=True, tag="AddTargets"):
    """New, empty directories of a node."""

    node: _RealNode
    targets: _Targets


class NewChain(msgspec.Struct, frozen=True, array_like=True):
    id: ChainId
    targets: Annotated[tuple[TargetId, ...], msgspec.Meta(min_length=1, max_length=MAX_REPLICAS)]
    """Head first; each on another node."""


class AddChains(msgspec.Struct, frozen=True, tag="AddChains"):
    """Chains of targets that have never been in one: empty, so all of them serve at once."""

    chains: Annotated[tuple[NewChain, ...], msgspec.Meta(max_length=MAX_PER_REQUEST)]


class AddTable(msgspec.Struct, frozen=True, tag="AddTable"):
    """A table never changes: files name it in their layouts."""

    id: TableId
    chains: Annotated[tuple[ChainId, ...], msgspec.Meta(min_length=1, max_length=1 << 16)]


class ChangeMembers(msgspec.Struct, frozen=True, tag="ChangeMembers"):
    """Puts `add` at the end of the chain, to be synced, and takes out `remove`, which must have no role in it."""

    chain: ChainId
    add: TargetId | None = None
    remove: TargetId | None = None


class Drain(msgspec.Struct, frozen=True, tag="Drain"):
    """Targets that shall lose their roles, or may have some again. A node stands for all of its targets."""

    targets: _Targets = ()
    node: NodeId = 0
    drain: bool = True
    at_once: bool = True
    """One of a chain at a time and never its last, though the chain has a replica less then. False: each serves until a
    move has put another one in its place."""


class NewMove(msgspec.Struct, frozen=True, array_like=True):
    chain: ChainId
    source: TargetId
    """Of the chain, which it leaves in the end."""
    node: _RealNode
    """On which a target that is in no chain takes its place."""


class AddMoves(msgspec.Struct, frozen=True, tag="AddMoves"):
    """The primary carries them out, a few at a time, in this order: see `core.manager.migration`."""

    moves: Annotated[tuple[NewMove, ...], msgspec.Meta(max_length=MAX_PER_REQUEST)]


class CancelMoves(msgspec.Struct, frozen=True, tag="CancelMoves"):
    """Those that have not begun."""


class GetMoves(msgspec.Struct, frozen=True, tag="GetMoves"):
    pass


class MoveStatus(msgspec.Struct, frozen=True, array_like=True):
    chain: ChainId
    source: TargetId
    node: NodeId
    target: TargetId
    """0: it has not begun."""


class MoveList(msgspec.Struct, frozen=True, tag="MoveList"):
    moves: tuple[MoveStatus, ...]


class RetireTargets(msgspec.Struct, frozen=True, tag="RetireTargets"):
    """Forgets targets that are in no chain."""

    targets: _Targets


class RetireNode(msgspec.Struct, frozen=True, tag="RetireNode"):
    """Forgets a node that has no targets."""

    node: _RealNode


class Override(msgspec.Struct, frozen=True, tag="Override"):
    """Lets `target` serve a chain that nobody serves although it may lack updates. Without `confirm`, or with that of
    another version of the chain: an `OverrideWarning`, and nothing is changed."""

    chain: ChainId
    target: TargetId
    confirm: ChainVersion = 0


class RotateKeys(msgspec.Struct, frozen=True, tag="RotateKeys"):
    """A new key shall sign capabilities, see `core.manager.key_rotation`; while that is under way, again changes
    nothing. `revoke`:
    at once, and what the others have signed counts no more."""

    revoke: bool = False


class OverrideWarning(msgspec.Struct, frozen=True, tag="OverrideWarning"):
    warning: str
    """What may be lost, for people."""
    confirm: ChainVersion


class Done(msgspec.Struct, frozen=True, tag="Done"):
    """Done and durable."""

    note: str


class GetStatus(msgspec.Struct, frozen=True, tag="GetStatus"):
    """Answered in pages: `ManagerClient.status` asks for all of them."""

    after: TargetId = 0
    """0: the first page, with nodes and chains; else `Status.more_after`."""


class TargetStatus(msgspec.Struct, frozen=True):
    id: TargetId
    node: NodeId
    chain: ChainId | None
    drained: bool
    report: TargetReport | None
    """The last one since this manager became primary and the node's process started."""
    used: bool = False
    """It is or was in a chain, so it may hold chunks."""
    leaving: bool = False
    """It serves until a move has put another one in its place."""

    @property
    def unwanted(self) -> bool:
        """Drained or leaving: no chain gets it."""
        return self.drained or self.leaving


class NodeStatus(msgspec.Struct, frozen=True):
    id: NodeId
    address: str
    """Empty: it has never registered."""
    incarnation: Incarnation
    silent_ns: int
    """Since it was last heard, by the manager's clock."""
    alive: bool
    machine: str = ""
    heard: bool = True
    """False: not since this manager became primary or the node's process registered, so nothing is known of it."""


class Status(msgspec.Struct, frozen=True, tag="Status"):
    version: RoutingVersion
    term: int
    """Of the primary that answers."""
    nodes: tuple[NodeStatus, ...]
    targets: tuple[TargetStatus, ...]
    chains: tuple[Chain, ...]
    cluster: str = ""
    sessions: int = 0
    """That live."""
    key_ids: tuple[int, ...] = ()
    """Of the keys of capabilities: the first one signs, all are valid."""
    more_after: TargetId = 0
    """There are more targets after this one; 0: there are not."""


AdminRequest: TypeAlias = (
    AddNode
    | AddTargets
    | AddChains
    | AddTable
    | AddMoves
    | CancelMoves
    | ChangeMembers
    | Drain
    | RetireTargets
    | RetireNode
    | RotateKeys
    | Override
)
Request: TypeAlias = (
    Register
    | Heartbeat
    | GetRouting
    | GetStatus
    | GetMoves
    | GetMetaServices
    | GetFilesStatus
    | ClientRequest
    | AdminRequest
)
Answer: TypeAlias = (
    Registered
    | StaleIncarnation
    | Superseded
    | HeartbeatAnswer
    | RoutingAnswer
    | NotPrimary
    | ManagerError
    | OverrideWarning
    | Done
    | Status
    | MoveList
    | MetaServices
    | FilesStatus
    | ClientAnswer
)
