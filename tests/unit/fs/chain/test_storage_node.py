"""One storage process: what node membership and replicas say to each other, in which order, and who gets it."""

from __future__ import annotations

from fireflyer.base.units import SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain import node_membership as node
from fireflyer.fs.core.chain.storage_node import (
    ClientRecordsFound,
    ClientUpdateReceived,
    Effect,
    Event,
    Leave,
    Left,
    NodeLost,
    PeerMessageReceived,
    StorageCore,
    TargetScoped,
)
from fireflyer.fs.schema import manager
from fireflyer.fs.schema.chunks import (
    Accepted,
    Answer,
    Change,
    Operation,
    RefusalReason,
    Refused,
    StaleChainVersion,
    Update,
)
from fireflyer.fs.schema.ids import ChainId, ChunkId, TargetId
from fireflyer.fs.schema.manager import Condition, GiveUp, Heartbeat, HeartbeatAnswer, Registered
from fireflyer.fs.schema.routing import Chain, Member, RoutingDelta, TargetState
from fireflyer.fs.schema.sessions import SessionsDelta

SERVING, SYNCING, OFFLINE = TargetState.SERVING, TargetState.SYNCING, TargetState.OFFLINE
T = 6 * SECOND


class _Replica:
    """Notes what it hears; does what it is told to stop."""

    def __init__(self, chain: ChainId, target: TargetId) -> None:
        self.chain, self.target = chain, target
        self.heard: list[fx.Event] = []
        self.busy = False
        self.acts = False
        self.says: list[fx.Effect] = []

    def handle(self, _now_ns: int, event: fx.Event) -> list[fx.Effect]:
        self.heard.append(event)
        if isinstance(event, fx.ChainChanged):
            role = next((one.state for one in event.chain.members if one.target == self.target), None)
            self.acts = role in (SERVING, SYNCING)
        if isinstance(event, fx.GiveUp) and self.acts:
            return [fx.ReportGone(event.chain_version, event.reason)]
        said, self.says = self.says, []
        return said


class _Process:
    """Node 1 with targets 1 and 2; target n of other nodes is on node n."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.made: list[_Replica] = []
        self.asked: list[node.SendToManager] = []
        identity = node.ProcessIdentity(1, "nonce", "localhost:1", "machine", "boot")
        membership = node.NodeMembership(identity, {1: True, 2: True}, ["manager"])
        self.core = StorageCore(membership, [1, 2], self._make, unreachable_report_ns=5 * SECOND)
        self.feed(node.Tick())
        self.told(Registered(1, T))

    def _make(self, chain: ChainId, target: TargetId) -> _Replica:
        self.made.append(_Replica(chain, target))
        return self.made[-1]

    def feed(self, event: Event) -> list[Effect]:
        effects = self.core.handle(self.now_ns, event)
        self.asked += [one for one in effects if isinstance(one, node.SendToManager)]
        return effects

    def told(self, answer: manager.Answer) -> list[Effect]:
        return self.feed(node.ManagerReply(self.asked[-1].number, answer))

    def beat(self) -> Heartbeat:
        request = self.asked[-1].request
        assert isinstance(request, Heartbeat)
        return request

    def route(self, version: int, *chains: Chain, give_up: tuple[GiveUp, ...] = ()) -> list[Effect]:
        delta = RoutingDelta(version - 1, version, (), chains)
        return self.told(HeartbeatAnswer(self.beat().sequence, delta, give_up))

    def sessions(
        self, version: int, next_client: int, *, opened: tuple[int, ...] = (), ended: tuple[int, ...] = ()
    ) -> None:
        delta = SessionsDelta(version - 1, version, next_client, opened, ended)
        self.now_ns += SECOND
        self.feed(node.Tick())
        self.told(HeartbeatAnswer(self.beat().sequence, None, (), delta))

    def refused(self, client: int) -> RefusalReason | None:
        """Why an update of this client is not admitted to chain 10."""
        update = Update(10, 1, client, 0, 1, ChunkId(1, 1), Change(Operation.REMOVE))
        for effect in self.feed(ClientUpdateReceived(4, update, 3)):
            if isinstance(effect, TargetScoped) and isinstance(effect.what, fx.Reply):
                assert isinstance(effect.what.reply, Refused)
                return effect.what.reply.refusal
        return None

    def conditions(self) -> dict[TargetId, Condition]:
        return {one.target: one.condition for one in self.beat().reports}


def chain(number: int, version: int, *states: TargetState, targets: tuple[int, ...] = (1, 7)) -> Chain:
    members = tuple(
        Member(target, 1 if target < 3 else target, state) for target, state in zip(targets, states, strict=True)
    )
    return Chain(number, version, members)


def test_all_replicas_have_the_routing_and_their_orders_before_the_fence_opens() -> None:
    process = _Process()
    first, second = chain(10, 1, SERVING, SERVING), chain(20, 3, SERVING, targets=(2,))
    effects = process.route(1, first, second, give_up=(GiveUp(1, 10, 1, "drained"),))
    assert [(one.chain, one.target) for one in process.made] == [(10, 1), (20, 2)]
    fence = fx.FenceExtended(T // 2)
    assert process.made[0].heard == [fx.ChainChanged(first), fx.GiveUp(1, "drained"), fence]
    assert process.made[1].heard == [fx.ChainChanged(second), fence]
    assert isinstance(effects[0], node.TakeRouting)
    assert process.conditions() == {1: Condition.GONE, 2: Condition.ONLINE}


def test_what_replicas_report_goes_to_the_manager() -> None:
    process = _Process()
    process.route(1, chain(10, 1, SERVING, SERVING), chain(20, 3, SYNCING, SERVING, targets=(2, 8)))
    process.made[1].says = [fx.UpToDate(3)]
    process.made[0].says = [fx.ReportUnreachable(7), fx.AskRouting()]
    process.feed(node.Tick())
    assert process.conditions() == {1: Condition.ONLINE, 2: Condition.UP_TO_DATE}
    process.now_ns += SECOND
    process.feed(node.Tick())
    assert process.beat().unreachable == (7,)

    def heartbeat_sent() -> tuple[int, ...]:
        process.now_ns += SECOND
        process.feed(node.Tick())
        return process.beat().unreachable

    process.feed(PeerMessageReceived(8, 2, Answer(20, 3, 0, 0, 1, Accepted())))
    process.feed(PeerMessageReceived(7, 1, StaleChainVersion(10, 1)))
    assert heartbeat_sent() == (7,)
    for ends in (
        PeerMessageReceived(7, 1, Answer(10, 1, 0, 0, 1, Accepted())),
        TargetScoped(1, fx.ChainChanged(chain(10, 1, SERVING, OFFLINE))),
    ):
        process.feed(ends)
        assert heartbeat_sent() == ()
        process.made[0].says = [fx.ReportUnreachable(7)]
        process.feed(node.Tick())
        assert heartbeat_sent() == (7,)
    process.now_ns += 5 * SECOND
    process.feed(node.Tick())
    assert heartbeat_sent() == ()
    process.feed(TargetScoped(2, fx.DiskFailed("no such device")))
    process.made[1].says = [fx.ReportGone(3, "no such device", failed=True)]
    process.feed(TargetScoped(2, fx.Tick()))
    assert process.conditions()[2] is Condition.GONE


def test_messages_find_the_replica_and_those_for_nobody_are_answered() -> None:
    process = _Process()
    process.route(1, chain(10, 1, SERVING, SERVING))
    process.sessions(1, 9, opened=(5,))
    del process.made[0].heard[2:]
    update = Update(10, 1, 5, 0, 1, ChunkId(1, 1), Change(Operation.REMOVE))
    process.feed(ClientUpdateReceived(4, update))
    process.feed(PeerMessageReceived(7, 1, StaleChainVersion(10, 1)))
    process.feed(NodeLost(7))
    process.feed(NodeLost(99))
    assert process.made[0].heard[2:] == [
        fx.ClientUpdate(4, update),
        fx.MessageFromPeer(7, StaleChainVersion(10, 1)),
        fx.PeerLost(7),
    ]
    lost = Update(11, 1, 5, 0, 1, ChunkId(1, 1), Change(Operation.REMOVE))
    reply, release = process.feed(ClientUpdateReceived(5, lost, 3))
    assert isinstance(reply, TargetScoped)
    assert isinstance(reply.what, fx.Reply)
    assert isinstance(reply.what.reply, Refused)
    assert reply.what.reply.refusal is RefusalReason.STALE
    assert release == TargetScoped(0, fx.Release(3))
    assert process.feed(PeerMessageReceived(7, 2, StaleChainVersion(20, 1), 9)) == [TargetScoped(0, fx.Release(9))]


def test_only_clients_that_live_are_admitted_and_what_was_theirs_is_forgotten() -> None:
    process = _Process()
    process.route(1, chain(10, 1, SERVING, SERVING))
    assert process.refused(1) is RefusalReason.BUSY
    process.sessions(1, 3, opened=(1, 2))
    assert [process.refused(client) for client in (1, 2, 3)] == [None, None, RefusalReason.BUSY]
    process.sessions(2, 3, ended=(1,))
    assert fx.ClientEnded(1) in process.made[0].heard
    assert [process.refused(client) for client in (1, 2)] == [RefusalReason.ENDED, None]
    process.made[0].heard.clear()
    process.feed(ClientRecordsFound(1, (1, 2, 7)))
    assert process.made[0].heard == [fx.ClientEnded(1)]


def test_a_target_that_is_moved_gets_its_new_replica_when_the_old_one_is_idle() -> None:
    process = _Process()
    process.route(1, chain(10, 1, SERVING, SERVING))
    old = process.made[0]
    old.busy = True
    process.feed(node.Tick())
    process.now_ns += SECOND
    process.feed(node.Tick())
    without = chain(10, 2, SERVING, targets=(7,))
    new_chain = chain(20, 5, SERVING, SYNCING, targets=(8, 1))
    process.route(2, without, new_chain)
    assert process.made == [old]
    assert old.heard[-2:-1] == [fx.ChainChanged(without)]
    assert process.core.target_of(20) == 0
    old.busy = False
    process.feed(TargetScoped(1, fx.Staged(ChunkId(1, 1), None, None)))  # type: ignore[arg-type]
    assert [(one.chain, one.heard[0]) for one in process.made[1:]] == [(20, fx.ChainChanged(new_chain))]
    assert (process.core.target_of(10), process.core.target_of(20)) == (0, 1)


def test_a_chain_that_goes_from_one_target_of_the_process_to_another_is_heard_by_both() -> None:
    process = _Process()
    process.route(1, chain(10, 1, SERVING, SERVING))
    process.now_ns += SECOND
    process.feed(node.Tick())
    other = chain(10, 2, SERVING, SYNCING, targets=(7, 2))
    process.route(2, other)
    first, second = process.made
    assert (first.heard[-2], second.heard[0]) == (fx.ChainChanged(other), fx.ChainChanged(other))
    process.now_ns += SECOND
    process.feed(node.Tick())
    later = chain(10, 3, SERVING, SERVING, targets=(7, 2))
    process.route(3, later, chain(20, 1, SERVING, SYNCING, targets=(8, 1)))
    assert process.core.target_of(10) == 2
    assert process.core.target_of(20) == 1
    assert fx.ChainChanged(later) in second.heard


def test_a_target_that_comes_back_to_a_chain_after_another_one_of_its_process_serves_it() -> None:
    process = _Process()
    for version, members in enumerate(((7, 1), (7,), (7, 2), (7,), (7, 1)), start=1):
        states = (SERVING, SYNCING)[: len(members)]
        process.now_ns += SECOND
        process.feed(node.Tick())
        process.route(version, chain(10, version, *states, targets=members))
    assert [(one.chain, one.target) for one in process.made] == [(10, 1), (10, 2)]
    assert process.core.target_of(10) == 1
    assert fx.ChainChanged(chain(10, 5, SERVING, SYNCING, targets=(7, 1))) in process.made[0].heard


def test_who_leaves_is_gone_for_good_and_knows_when_the_manager_has_heard_it() -> None:
    process = _Process()
    process.route(1, chain(10, 1, SERVING, SERVING), chain(20, 3, SERVING, OFFLINE, targets=(8, 2)))
    before = process.asked[-1]
    assert Left() not in process.feed(Leave("the administrator stops it"))
    assert [one.heard[-1] for one in process.made] == [
        fx.GiveUp(version, "the administrator stops it") for version in (1, 3)
    ]
    assert process.conditions() == {1: Condition.GONE, 2: Condition.GONE}
    assert Left() not in process.feed(node.ManagerReply(before.number, HeartbeatAnswer(1, None)))
    # The other one was faster: the manager has not heard of this one in the version that followed.
    assert Left() not in process.route(2, chain(10, 2, SERVING, OFFLINE))
    asked = len(process.asked)
    process.now_ns += SECOND // 20
    process.feed(node.Tick())
    assert len(process.asked) == asked + 1, "who leaves does not wait until the next heartbeat is due"
    assert process.conditions() == {1: Condition.GONE, 2: Condition.GONE}
    assert Left() in process.route(3, chain(10, 3, TargetState.LASTSRV, OFFLINE))
    process.now_ns += SECOND
    process.feed(node.Tick())
    assert process.conditions() == {1: Condition.GONE, 2: Condition.GONE}
    update = Update(10, 2, 5, 0, 1, ChunkId(1, 1), Change(Operation.REMOVE))
    (reply,) = process.feed(ClientUpdateReceived(5, update))
    assert isinstance(reply, TargetScoped)
    assert isinstance(reply.what, fx.Reply)
