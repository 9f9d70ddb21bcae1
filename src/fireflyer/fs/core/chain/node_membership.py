"""The storage process's side of the manager: registration, heartbeats, the fence, and what its targets may do.

    Tick                  ──> SendToManager(Register) ... SendToManager(Heartbeat) ──> ManagerReply(answer)
    ManagerReply(answer)  ──> TakeSessions, TakeRouting, then OpenFence    a manager that was primary has answered
                          ──> StopTarget                  the target shall give its role up
                          ──> End                         a later process has this node: nothing may be done any more
    TargetStopped, TargetFailed, TargetSynced, Measured, PeersUnreachable: the data path reports
    RoutingWanted         ──> SendToManager(Heartbeat)    the data path met a version that it does not know

The effects are performed in their order, each before the next: routing is taken over before the fence opens further, so
an open fence always belongs to what the manager last said. The data path asks nothing: it obeys the routing it was
given, while its clock is before the fence's end.

Before an answer is taken over, what it makes due is noted on the disks (`served_notes`): whoever hands the answer in
has done that.

What is reported of a target is reported for the version of its chain that this process knows. GONE means that it has
stopped whatever this version, or one before, let it do; it stays so until a later version. A target whose disk has
failed is gone in every version: this process never trusts it again.

A process that gets no answers, or is told of another manager, asks the next one. It never waits for one answer before
it sends the next heartbeat, and one whose answer is lost costs nothing but its extension of the fence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from fireflyer.base.errors import InvariantViolation, StaleVersion, UsageError
from fireflyer.base.units import MS
from fireflyer.fs.core.chain.served_notes import ServedNote, note_of
from fireflyer.fs.core.fence import Fence
from fireflyer.fs.core.manager.sessions import LiveSessions, apply_sessions
from fireflyer.fs.core.routing import apply_delta
from fireflyer.fs.schema.ids import ChainId, ChainVersion, ClientId, Incarnation, NodeId, TargetId
from fireflyer.fs.schema.manager import (
    MAX_TARGETS_PER_NODE,
    MAX_UNREACHABLE,
    Answer,
    Condition,
    Heartbeat,
    HeartbeatAnswer,
    NotPrimary,
    Register,
    Registered,
    Request,
    StaleIncarnation,
    Superseded,
    TargetReport,
)
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState

__all__ = [
    "Effect",
    "End",
    "Event",
    "Measured",
    "NodeMembership",
    "OpenFence",
    "PeersUnreachable",
    "ProcessIdentity",
    "SendToManager",
]
__all__ += [
    "ManagerReply",
    "RoutingWanted",
    "StopTarget",
    "TakeRouting",
    "TakeSessions",
    "TargetFailed",
    "TargetStopped",
    "TargetSynced",
    "Tick",
]

HEARTBEATS_PER_TIMEOUT: Final = 8
"""Heartbeats in T. Three in a row may be lost before the fence closes."""
REGISTER_NS: Final = 500 * MS
"""Between two attempts to register."""
HURRY_NS: Final = 20 * MS
"""The least time between two heartbeats, however much somebody wants routing."""
PATIENCE: Final = 3
"""Messages without any answer until another manager is asked."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """As in `Register`."""

    node: NodeId
    nonce: str
    address: str
    machine: str
    boot: str
    cluster: str = ""


# --- events ---


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; comes at least every sixteenth of T."""


class ManagerReply(msgspec.Struct, frozen=True):
    """The answer to message `number`."""

    number: int
    answer: Answer


class TargetStopped(msgspec.Struct, frozen=True):
    """It does nothing any more that this chain version, or one before, lets it do."""

    target: TargetId
    chain_version: ChainVersion
    changed_in: ChainVersion = 0
    """As in `TargetReport`."""


class TargetFailed(msgspec.Struct, frozen=True):
    """It does nothing any more, and its disk is not to be trusted."""

    target: TargetId
    changed_in: ChainVersion = 0
    """As in `TargetReport`."""


class TargetSynced(msgspec.Struct, frozen=True):
    """As the syncing one in this chain version it has been given everything, and it is durable."""

    target: TargetId
    chain_version: ChainVersion


class Measured(msgspec.Struct, frozen=True):
    target: TargetId
    used_bytes: int
    capacity_bytes: int
    disk: int = 0


class PeersUnreachable(msgspec.Struct, frozen=True):
    """Neighbours that have not answered for a while: all of them."""

    nodes: tuple[NodeId, ...]


class RoutingWanted(msgspec.Struct, frozen=True):
    """A peer or a client knows another version of a chain: ask sooner than the next heartbeat is due."""


Event: TypeAlias = (
    Tick | ManagerReply | TargetStopped | TargetFailed | TargetSynced | Measured | PeersUnreachable | RoutingWanted
)


# --- effects ---


class SendToManager(msgspec.Struct, frozen=True):
    """Send it; the answer, if there is one, comes back as `ManagerReply` to this process and to no later one."""

    number: int
    manager: str
    request: Request


class TakeSessions(msgspec.Struct, frozen=True):
    """Who is admitted from now on. Of `ended` nothing is any more: what waits of them is dropped, then their records
    are forgotten."""

    sessions: LiveSessions
    ended: tuple[ClientId, ...]
    """Those of the list before that are over."""


class TakeRouting(msgspec.Struct, frozen=True):
    routing: Routing


class OpenFence(msgspec.Struct, frozen=True):
    """Until then (the node's clock) the targets may do what the routing lets them."""

    until_ns: int


class StopTarget(msgspec.Struct, frozen=True):
    """Stop what this chain version lets the target do, then say `TargetStopped`. Comes again until that is said."""

    target: TargetId
    chain_version: ChainVersion
    reason: str


class End(msgspec.Struct, frozen=True):
    """Last effect of all: the process must end at once."""

    reason: str


Effect: TypeAlias = SendToManager | TakeSessions | TakeRouting | OpenFence | StopTarget | End


@dataclass(slots=True)
class _Target:
    clean: bool
    failed: bool = False
    chain: ChainId = 0
    stopped_in: ChainVersion = 0
    synced_in: ChainVersion = 0
    changed_in: ChainVersion = 0
    """Told when it stopped."""
    measured: Measured = field(default_factory=lambda: Measured(0, 0, 0))


class NodeMembership:
    """One storage process. `targets`: those of its directories, and whether each is clean (see `TargetReport`).
    `noted`: what its directories say of the chains that they served."""

    def __init__(
        self,
        identity: ProcessIdentity,
        targets: Mapping[TargetId, bool],
        managers: Sequence[str],
        noted: Mapping[TargetId, ServedNote] | None = None,
    ) -> None:
        if not managers or len(targets) > MAX_TARGETS_PER_NODE:
            raise UsageError(
                f"{len(managers)} managers and {len(targets)} targets; give at least one manager address, and at most "
                f"{MAX_TARGETS_PER_NODE} targets"
            )
        self._identity = identity
        self._targets = {target: _Target(targets[target]) for target in sorted(targets)}
        self._noted = {target: note for target, note in (noted or {}).items() if target in self._targets}
        self._managers = list(managers)
        self._manager = self._managers[0]
        self._turn = 0
        self._followed = False
        self._routing = Routing(0)
        self._sessions = LiveSessions()
        self._key_ids: tuple[int, ...] = ()
        self._keys_from = 0
        """The heartbeat whose answer named them; answers to earlier ones may still be under way."""
        self._place: dict[TargetId, tuple[Chain, Member]] = {}
        self._fence: Fence | None = None
        self._incarnation: Incarnation = 0
        self._previous: Incarnation = 0
        self._heartbeat_ns = REGISTER_NS
        self._due_ns: int | None = None
        self._sent_ns = 0
        self._numbers = 0
        self._unanswered = 0
        self._reported: tuple[TargetReport, ...] = ()
        self._unreachable: tuple[NodeId, ...] = ()
        self._touched = False
        self._ended = False
        self._effects: list[Effect] = []

    @property
    def incarnation(self) -> Incarnation:
        """0 until it has registered."""
        return self._incarnation

    @property
    def routing(self) -> Routing:
        return self._routing

    @property
    def sessions(self) -> LiveSessions:
        return self._sessions

    @property
    def key_ids(self) -> tuple[int, ...]:
        """Of the keys of capabilities that are valid; none until it has registered."""
        return self._key_ids

    @property
    def noted(self) -> Mapping[TargetId, ServedNote]:
        """What is on the disks, of those targets that have served."""
        return self._noted

    def serves(self, now_ns: int, target: TargetId) -> bool:
        """Whether this target may serve now: by the routing, by the fence, and unless it has stopped."""
        place = self._place.get(target)
        if place is None or self._fence is None or self._ended or not self._fence.is_open(now_ns):
            return False
        return place[1].state is TargetState.SERVING and self.active(target, place[0].version)

    def active(self, target: TargetId, chain_version: ChainVersion) -> bool:
        """Whether it still does what this chain version lets it do."""
        known = self._targets.get(target)
        return known is not None and not known.failed and known.stopped_in < chain_version

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        if self._ended:
            return []
        self._take(now_ns, event)
        if self._due_ns is None or now_ns >= self._due_ns or self._news():
            self._send(now_ns)
        effects, self._effects = self._effects, []
        return effects

    def _take(self, now_ns: int, event: Event) -> None:
        match event:
            case Tick():
                pass
            case ManagerReply(_, answer):
                self._on_answer(now_ns, answer)
            case TargetStopped(target, chain_version, changed_in):
                known, place = self._known(target), self._place.get(target)
                known.changed_in = max(known.changed_in, changed_in)
                # Without a role there is nothing to lay down: GONE would keep it from ever getting one.
                if place is not None and place[1].state in (TargetState.SERVING, TargetState.SYNCING):
                    known.stopped_in = max(known.stopped_in, chain_version)
            case TargetFailed(target, changed_in):
                known = self._known(target)
                known.failed, known.changed_in = True, max(known.changed_in, changed_in)
            case TargetSynced(target, chain_version):
                known = self._known(target)
                known.synced_in, known.clean = max(known.synced_in, chain_version), True
            case Measured():
                self._known(event.target).measured = event
            case PeersUnreachable(nodes):
                self._unreachable = nodes[:MAX_UNREACHABLE]
            case RoutingWanted():
                if self._fence is not None and self._due_ns is not None:
                    self._due_ns = min(self._due_ns, self._sent_ns + HURRY_NS)

    def clean(self, target: TargetId) -> bool:
        """Whether it is known to have all that it acknowledged."""
        known = self._targets.get(target)
        return known is not None and known.clean

    def _known(self, target: TargetId) -> _Target:
        self._touched = True
        if target not in self._targets:
            raise InvariantViolation(f"target {target} does not belong to node {self._identity.node}")
        return self._targets[target]

    # --- what is sent ---

    def _send(self, now_ns: int) -> None:
        if self._ended:
            return
        self._sent_ns, self._due_ns = now_ns, now_ns + self._heartbeat_ns
        self._unanswered += 1
        if self._unanswered > PATIENCE:
            self._next_manager()
        self._numbers += 1
        me = self._identity
        if self._fence is None:
            request: Request = Register(me.node, me.nonce, self._previous, me.address, me.machine, me.boot, me.cluster)
        else:
            sequence = self._fence.sent(now_ns)
            self._reported, self._touched = self._reports(), False
            request = Heartbeat(
                me.node,
                self._incarnation,
                sequence,
                self._routing.version,
                self._reported,
                self._unreachable,
                self._sessions.version,
            )
        self._effects.append(SendToManager(self._numbers, self._manager, request))

    def _news(self) -> bool:
        """Whether the manager should not wait for the next heartbeat to learn of it."""
        if self._fence is None or not self._touched:
            return False
        return [_said(one) for one in self._reports()] != [_said(one) for one in self._reported]

    def _reports(self) -> tuple[TargetReport, ...]:
        reports = []
        for target, known in self._targets.items():
            place = self._place.get(target)
            if place is None:
                continue
            version = place[0].version
            condition = Condition.ONLINE
            if not self.active(target, version):
                condition = Condition.GONE
            elif known.synced_in == version:
                condition = Condition.UP_TO_DATE
            size, note = known.measured, self._noted.get(target) if place[0].restored else None
            if note is not None and note.chain != place[0].id:
                note = None  # it says nothing of this chain
            reports.append(
                TargetReport(
                    target,
                    condition,
                    version,
                    known.clean,
                    size.used_bytes,
                    size.capacity_bytes,
                    place[0].id,
                    size.disk,
                    known.changed_in if condition is Condition.GONE else 0,
                    note.served_in if note is not None else 0,
                    note.members if note is not None else (),
                )
            )
        return tuple(reports)

    def _next_manager(self) -> None:
        """In turn."""
        for _ in self._managers:
            self._turn = (self._turn + 1) % len(self._managers)
            if self._managers[self._turn] != self._manager:
                break
        self._manager, self._unanswered, self._followed = self._managers[self._turn], 0, False

    # --- what is answered ---

    def _on_answer(self, now_ns: int, answer: Answer) -> None:
        self._unanswered = 0
        match answer:
            case NotPrimary(address):
                # Of two names in a row the second is not followed: managers that are cut off from their store could
                # send us to and fro for ever.
                if address in self._managers and address != self._manager and not self._followed:
                    self._manager, self._followed = address, True
                else:
                    self._next_manager()
            case Registered(incarnation, failure_timeout_ns, key_ids) if self._fence is None:
                self._incarnation, self._fence = incarnation, Fence(failure_timeout_ns)
                self._key_ids = key_ids
                self._heartbeat_ns = failure_timeout_ns // HEARTBEATS_PER_TIMEOUT
                self._due_ns = None
            case StaleIncarnation(incarnation) if self._fence is None and incarnation > self._previous:
                self._previous = incarnation
                self._due_ns = None
            case Superseded(incarnation):
                self._ended = True
                node = self._identity.node
                self._effects.append(End(f"process {incarnation} of node {node} has replaced {self._incarnation}"))
            case HeartbeatAnswer() if self._fence is not None:
                self._followed = False
                self._on_heartbeat_answer(now_ns, self._fence, answer)
            case _:
                pass  # a refusal: the next heartbeat or registration tries again

    def _on_heartbeat_answer(self, now_ns: int, fence: Fence, answer: HeartbeatAnswer) -> None:
        routing, sessions = self._routing, self._sessions
        try:
            if answer.sessions is not None:
                sessions = apply_sessions(sessions, answer.sessions)
            if answer.routing is not None:
                routing = apply_delta(routing, answer.routing)
        except StaleVersion:
            return  # an answer to a heartbeat before those that have been answered: nothing is learned from it
        if answer.key_ids and answer.sequence > self._keys_from:
            self._key_ids, self._keys_from = answer.key_ids, answer.sequence
        if sessions is not self._sessions:
            ended = tuple(one for one in self._sessions.clients if not sessions.admits(one))
            self._sessions = sessions
            self._effects.append(TakeSessions(sessions, ended))
        if routing is not self._routing:
            self._take_routing(routing)
        for order in answer.give_up:
            place = self._place.get(order.target)
            valid = place is not None and (place[0].id, place[0].version) == (order.chain, order.chain_version)
            if valid and self.active(order.target, order.chain_version):
                self._effects.append(StopTarget(order.target, order.chain_version, order.reason))
        before_ns = fence.until_ns
        fence.answered(answer.sequence)
        if fence.until_ns is not None and fence.until_ns != before_ns and now_ns < fence.until_ns:
            self._effects.append(OpenFence(fence.until_ns))

    def _take_routing(self, routing: Routing) -> None:
        self._routing, self._touched = routing, True
        self._place = {
            member.target: (chain, member)
            for chain in routing.chains
            for member in chain.members
            if member.target in self._targets
        }
        for target, (chain, member) in self._place.items():
            known = self._targets[target]
            if known.chain != chain.id:
                # Another chain has versions of its own.
                known.chain, known.stopped_in, known.synced_in, known.changed_in = chain.id, 0, 0, 0
            note = note_of(chain, target, self._noted.get(target))
            if note is not None:
                self._noted[target] = note
            if member.state is TargetState.SERVING:
                # Who serves has everything by definition, also when an administrator has decided so.
                known.clean = True
        self._effects.append(TakeRouting(routing))


def _said(report: TargetReport) -> tuple[object, ...]:
    return report.target, report.condition, report.chain, report.chain_version, report.clean, report.served_in
