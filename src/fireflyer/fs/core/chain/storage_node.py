"""A storage process as one machine: the node before the manager, and the replicas of its targets.

    Tick, ManagerReply, Measured ──> membership
        ──> TakeSessions   ──> each replica: ClientEnded, for those that are over
        ──> TakeRouting    ──> each replica: ChainChanged
        ──> StopTarget     ──> its replica: GiveUp
        ──> OpenFence      ──> each replica: FenceExtended
        ──> SendToManager, End  ──> the shell
    PeerMessageReceived, ClientUpdateReceived, TargetScoped, NodeLost ──> a replica
        ──> ReportGone         ──> membership: TargetStopped, TargetFailed
        ──> UpToDate           ──> membership: TargetSynced
        ──> ReportUnreachable  ──> membership: PeersUnreachable
        ──> AskRouting         ──> membership: RoutingWanted
        ──> all of these and the others, as `TargetScoped`  ──> the shell

What node membership and replicas say to each other waits in one queue: nobody is entered while the effects of its last
event are not through, and what was said first is heard first. So routing is with all replicas before any of them hears
that the fence is open further, and a role that is given up is given up before a later answer can bring it back.

*Clients.* An update is admitted if the list of living sessions has its client (`core.manager.sessions` says why that is
enough). Completion records of clients that are over are found by the shell (`ClientRecordsFound`): others of the chain
may have brought them back.

*Unreachable peers.* A replica says that its successor does not answer; that node is reported as unreachable for a
while, but not longer than the successor is silent and the chain as it is: the manager takes a role from somebody for
it.

*One target, one replica.* A replica belongs to a chain and a target. A target that is put into another chain gets a new
replica, but not before the engine has finished what the old one asked it for: the new one must not meet its results.

*Leaving.* A process that is to end lays down its roles one last time: each replica gives up, then every target is
reported as gone for good, and `Left` says that the manager has heard it, and has taken the roles: where others leave at
the same time it may have heard of a version that was over by then, and nobody would say of the next one what was done
in it. So heartbeats follow each other quickly until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain import node_membership as node
from fireflyer.fs.schema.chunks import Answer, PeerMessage, RefusalReason, Refused, Update
from fireflyer.fs.schema.ids import ChainId, ClientId, NodeId, TargetId
from fireflyer.fs.schema.manager import HeartbeatAnswer
from fireflyer.fs.schema.routing import Chain, Routing, TargetState

__all__ = [
    "ClientRecordsFound",
    "ClientUpdateReceived",
    "Effect",
    "Event",
    "Leave",
    "Left",
    "NodeLost",
    "PeerMessageReceived",
    "StorageCore",
    "TargetScoped",
]


class ReplicaMachine(Protocol):
    """`fireflyer.fs.core.chain.replica.Replica`."""

    def handle(self, now_ns: int, event: fx.Event) -> list[fx.Effect]: ...

    @property
    def busy(self) -> bool: ...


class TargetScoped(msgspec.Struct, frozen=True):
    """Event: something happened to this target. Effect: its replica wants this."""

    target: TargetId
    what: fx.Event | fx.Effect


class PeerMessageReceived(msgspec.Struct, frozen=True):
    """From an authenticated node. `handle`: the data that came with it, or 0."""

    source: TargetId
    target: TargetId
    message: PeerMessage
    handle: int = 0


class ClientUpdateReceived(msgspec.Struct, frozen=True):
    """An update, by somebody who has the right to it."""

    waiter: int
    update: Update
    handle: int = 0


class NodeLost(msgspec.Struct, frozen=True):
    """The connection to it broke, or is a new one: what was sent and not answered will not be."""

    node: NodeId


class ClientRecordsFound(msgspec.Struct, frozen=True):
    """These clients have completion records at the target."""

    target: TargetId
    clients: tuple[ClientId, ...]


class Leave(msgspec.Struct, frozen=True):
    """The process shall end."""

    reason: str


class Left(msgspec.Struct, frozen=True):
    """The manager has been told that all targets are gone."""


Event: TypeAlias = (
    node.Event | TargetScoped | PeerMessageReceived | ClientUpdateReceived | NodeLost | ClientRecordsFound | Leave
)
Effect: TypeAlias = node.SendToManager | node.TakeSessions | node.TakeRouting | node.End | TargetScoped | Left
"""`TakeSessions` and `TakeRouting` have been obeyed when they are handed on: they are for who keeps connections."""


class _RunningReplica:
    def __init__(self, chain: ChainId, machine: ReplicaMachine) -> None:
        self.chain = chain
        self.machine = machine
        self.chain_version = 0


class StorageCore:
    """`targets`: as given to the node membership. `make_replica` makes the machine of a target in a chain."""

    def __init__(
        self,
        membership: node.NodeMembership,
        targets: Iterable[TargetId],
        make_replica: Callable[[ChainId, TargetId], ReplicaMachine],
        *,
        unreachable_report_ns: int = 5 * SECOND,
    ) -> None:
        """`unreachable_report_ns`: how long a node is reported as unreachable after a replica has said so for the
        last time."""
        self.membership = membership
        self._targets = dict.fromkeys(sorted(targets))
        self._make_replica = make_replica
        self._unreachable_report_ns = unreachable_report_ns
        self._replicas: dict[TargetId, _RunningReplica] = {}
        self._at: dict[ChainId, TargetId] = {}
        self._chains: dict[TargetId, Chain] = {}
        self._nodes: dict[TargetId, NodeId] = {}
        """Of all targets in the chains of this process."""
        self._unreachable_until: dict[TargetId, tuple[NodeId, int]] = {}
        """Of a target of this process: which node, and until when."""
        self._reported_unreachable: tuple[NodeId, ...] = ()
        self._leaving = False
        self._left_from: int | None = None
        """The number of the first message to the manager which says that all are gone."""
        self._asked = 0
        self._queue: deque[Event] = deque()
        self._effects: list[Effect] = []

    @property
    def routing(self) -> Routing:
        return self.membership.routing

    def replica(self, target: TargetId) -> ReplicaMachine | None:
        """For people who look, and tests."""
        running = self._replicas.get(target)
        return running.machine if running is not None else None

    def target_of(self, chain: ChainId) -> TargetId:
        """This process's target in the chain; 0 for none."""
        return self._at.get(chain, 0)

    def node_of(self, target: TargetId) -> NodeId:
        """The node of a target that is in a chain with one of this process; 0 for any other."""
        return self._nodes.get(target, 0)

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        self._queue.append(event)
        if self._left_from is not None and isinstance(event, node.Tick):
            self._queue.append(node.RoutingWanted())
        while self._queue:
            self._one(now_ns, self._queue.popleft())
        if isinstance(event, Leave):
            self._left_from = self._asked
        effects, self._effects = self._effects, []
        return effects

    def _one(self, now_ns: int, event: Event) -> None:
        match event:
            case TargetScoped(target, what):
                # an `TargetScoped` that comes in holds an event, one that goes out an effect; the struct is one
                self._to_replica(now_ns, target, what)  # type: ignore[arg-type]
            case PeerMessageReceived(source, target, message, handle):
                if target not in self._replicas:
                    self._release(handle)
                if isinstance(message, Answer) and self._unreachable_until.get(target, (0, 0))[0] == self._nodes.get(
                    source
                ):
                    self._withdraw(now_ns, target)
                self._to_replica(now_ns, target, fx.MessageFromPeer(source, message, handle))
            case ClientUpdateReceived(waiter, update, handle):
                self._client_asked(now_ns, waiter, update, handle)
            case NodeLost(lost):
                for target, at in self._nodes.items():
                    if at == lost:
                        self._to_all(fx.PeerLost(target))
            case ClientRecordsFound(target, clients):
                over = [one for one in clients if self.membership.sessions.over(one)]
                self._queue.extend(TargetScoped(target, fx.ClientEnded(one)) for one in over)
            case Leave(reason):
                self._leave(reason)
            case node.Tick():
                self._report_unreachable(now_ns)
                self._to_all(fx.Tick())
                self._to_membership(now_ns, event)
            case _:
                self._to_membership(now_ns, event)

    # --- node membership ---

    def _to_membership(self, now_ns: int, event: node.Event) -> None:
        for effect in self.membership.handle(now_ns, event):
            match effect:
                case node.TakeSessions(_, ended):
                    for client in ended:
                        self._to_all(fx.ClientEnded(client))
                    self._effects.append(effect)
                case node.TakeRouting(routing):
                    self._take_routing(routing)
                    self._effects.append(effect)
                case node.OpenFence(until_ns):
                    self._to_all(fx.FenceExtended(until_ns))
                case node.StopTarget(target, chain_version, reason):
                    self._queue.append(TargetScoped(target, fx.GiveUp(chain_version, reason)))
                case node.SendToManager(number):
                    self._asked = number
                    self._effects.append(effect)
                case _:
                    self._effects.append(effect)
        match event:
            case node.ManagerReply(number, HeartbeatAnswer()) if (
                self._left_from is not None and number >= self._left_from and not self._has_a_role()
            ):
                self._left_from = None
                self._effects.append(Left())

    def _has_a_role(self) -> bool:
        return any(
            member.target == target and member.state is TargetState.SERVING
            for target, chain in self._chains.items()
            for member in chain.members
        )

    def _take_routing(self, routing: Routing) -> None:
        for chain in routing.chains:
            known = False
            for member in chain.members:
                if member.target in self._targets:
                    known, self._chains[member.target] = True, chain
            if known:
                self._nodes.update({member.target: member.node for member in chain.members})
            for target, running in self._replicas.items():
                if running.chain == chain.id and chain.version > running.chain_version:
                    running.chain_version = chain.version
                    self._queue.append(TargetScoped(target, fx.ChainChanged(chain)))
                if running.chain == chain.id and self._chains[target] is chain:
                    self._at[chain.id] = target  # again, where another one of this process had it in between
        for target in self._targets:
            self._start_replica(target)

    def _start_replica(self, target: TargetId) -> None:
        """Gives the target the replica of the chain that it is in, if that can be done now."""
        chain, running = self._chains.get(target), self._replicas.get(target)
        if chain is None or (running is not None and (running.chain == chain.id or running.machine.busy)):
            return
        if running is not None and self._at.get(running.chain) == target:
            del self._at[running.chain]
        made = self._replicas[target] = _RunningReplica(chain.id, self._make_replica(chain.id, target))
        self._at[chain.id] = target
        made.chain_version = chain.version
        self._queue.append(TargetScoped(target, fx.ChainChanged(chain)))

    # --- replicas ---

    def _to_all(self, event: fx.Event) -> None:
        self._queue.extend(TargetScoped(target, event) for target in self._replicas)

    def _withdraw(self, now_ns: int, target: TargetId) -> None:
        if self._unreachable_until.pop(target, None) is not None:
            self._report_unreachable(now_ns)

    def _to_replica(self, now_ns: int, target: TargetId, event: fx.Event) -> None:
        running = self._replicas.get(target)
        if isinstance(event, fx.ChainChanged):
            self._withdraw(now_ns, target)
        if running is None:
            if isinstance(event, fx.DiskFailed):
                self._queue.append(node.TargetFailed(target))
            return
        for effect in running.machine.handle(now_ns, event):
            self._effects.append(TargetScoped(target, effect))
            if self._chains[target].id != running.chain and _of_a_version(effect):
                continue  # the target is in another chain now, which has versions of its own
            match effect:
                case fx.ReportGone(version, _, failed, changed_in):
                    gone = failed or self._leaving
                    self._queue.append(
                        node.TargetFailed(target, changed_in)
                        if gone
                        else node.TargetStopped(target, version, changed_in)
                    )
                case fx.UpToDate(version):
                    self._queue.append(node.TargetSynced(target, version))
                case fx.ReportUnreachable(peer):
                    self._unreachable_until[target] = (self._nodes.get(peer, 0), now_ns + self._unreachable_report_ns)
                    self._report_unreachable(now_ns)
                case fx.AskRouting():
                    self._queue.append(node.RoutingWanted())
        chain = self._chains[target]
        if chain.id != running.chain:
            self._start_replica(target)

    def _client_asked(self, now_ns: int, waiter: int, update: Update, handle: int) -> None:
        target, sessions = self._at.get(update.chain), self.membership.sessions
        if target is None or self._leaving:
            refused = Refused(
                RefusalReason.STALE, "this node has no target that serves the chain; get the routing again"
            )
        elif sessions.admits(update.client):
            self._to_replica(now_ns, target, fx.ClientUpdate(waiter, update, handle))
            return
        elif sessions.over(update.client):
            refused = Refused(RefusalReason.ENDED, f"the session of client {update.client} has ended; open another one")
        else:
            self._queue.append(node.RoutingWanted())
            refused = Refused(RefusalReason.BUSY, f"this node does not know client {update.client} yet; try again")
        self._effects.append(TargetScoped(0, fx.Reply(waiter, refused)))
        self._release(handle)

    def _release(self, handle: int) -> None:
        if handle:
            self._effects.append(TargetScoped(0, fx.Release(handle)))

    def _report_unreachable(self, now_ns: int) -> None:
        self._unreachable_until = {
            one: what for one, what in self._unreachable_until.items() if what[0] and now_ns < what[1]
        }
        nodes = tuple(sorted({one: None for one, _ in self._unreachable_until.values()}))
        if nodes != self._reported_unreachable:
            self._reported_unreachable = nodes
            self._queue.append(node.PeersUnreachable(nodes))

    def _leave(self, reason: str) -> None:
        self._leaving = True
        for target, running in self._replicas.items():
            self._queue.append(TargetScoped(target, fx.GiveUp(running.chain_version, reason)))
        self._queue.extend(node.TargetFailed(target) for target in self._targets)


def _of_a_version(effect: fx.Effect) -> bool:
    return isinstance(effect, fx.UpToDate) or (isinstance(effect, fx.ReportGone) and not effect.failed)
