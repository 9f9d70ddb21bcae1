"""A storage process before its manager: what it asks, what it takes from answers, and when it stops."""

from __future__ import annotations

import pytest
from tests.support.fs.manager_sim.mutants import another_chains_versions_count

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.chain.node_membership import (
    Effect,
    End,
    Event,
    ManagerReply,
    Measured,
    NodeMembership,
    OpenFence,
    PeersUnreachable,
    ProcessIdentity,
    RoutingWanted,
    SendToManager,
    StopTarget,
    TakeRouting,
    TargetFailed,
    TargetStopped,
    TargetSynced,
    Tick,
)
from fireflyer.fs.schema.manager import (
    Answer,
    Condition,
    GiveUp,
    Heartbeat,
    HeartbeatAnswer,
    ManagerError,
    NotPrimary,
    Register,
    Registered,
    StaleIncarnation,
    Superseded,
    TargetReport,
)
from fireflyer.fs.schema.routing import Chain, Member, RoutingDelta, TargetState

TIMEOUT_NS = 8 * SECOND
ME = ProcessIdentity(1, "nonce", "n1:1", "machine", "boot")


class Process:
    def __init__(self, *managers: str, clean: bool = True) -> None:
        self.membership = NodeMembership(ME, {11: clean}, managers or ("a",))
        self.now_ns = 0

    def feed(self, event: Event) -> list[Effect]:
        return self.membership.handle(self.now_ns, event)

    def tick(self, after_ns: int = SECOND) -> SendToManager:
        self.now_ns += after_ns
        (ask,) = self.feed(Tick())
        assert isinstance(ask, SendToManager)
        return ask

    def told(self, answer: Answer) -> list[Effect]:
        return self.feed(ManagerReply(1, answer))

    def registered(self) -> Process:
        self.tick()
        (heartbeat,) = self.told(Registered(3, TIMEOUT_NS))
        assert isinstance(heartbeat, SendToManager)
        assert heartbeat.request == Heartbeat(1, 3, 1)
        return self

    def serving(self) -> Process:
        self.registered()
        self.told(HeartbeatAnswer(1, routing(1, TargetState.SERVING)))
        assert self.membership.serves(self.now_ns, 11)
        return self


def routing(version: int, state: TargetState, base: int = 0) -> RoutingDelta:
    return RoutingDelta(base, version, chains=(Chain(5, version, (Member(11, 1, state), Member(12, 2, state))),))


def reports(effects: list[Effect]) -> tuple[TargetReport, ...]:
    (ask,) = [one for one in effects if isinstance(one, SendToManager)]
    assert isinstance(ask.request, Heartbeat)
    return ask.request.reports


def test_it_registers_until_it_is_told_its_incarnation() -> None:
    process = Process()
    first = process.tick()
    assert first.request == Register(1, "nonce", 0, "n1:1", "machine", "boot")
    assert process.tick().request == first.request
    (again,) = process.told(StaleIncarnation(7))
    assert isinstance(again, SendToManager)
    assert again.request == Register(1, "nonce", 7, "n1:1", "machine", "boot")
    assert process.told(StaleIncarnation(6)) == []
    (heartbeat,) = process.told(Registered(8, TIMEOUT_NS))
    assert isinstance(heartbeat, SendToManager)
    assert heartbeat.request == Heartbeat(1, 8, 1)
    assert process.told(Registered(9, TIMEOUT_NS)) == []
    assert process.membership.incarnation == 8


def test_routing_is_taken_over_before_the_fence_opens_and_the_fence_counts_from_the_sending() -> None:
    process = Process().registered()
    sent_ns = process.now_ns
    assert not process.membership.serves(sent_ns, 11)
    process.now_ns += SECOND // 2
    taken, opened, heartbeat = process.told(HeartbeatAnswer(1, routing(1, TargetState.SERVING)))
    assert isinstance(taken, TakeRouting)
    assert opened == OpenFence(sent_ns + TIMEOUT_NS // 2)
    assert isinstance(heartbeat, SendToManager), "what it says of the new version is said at once"
    assert process.membership.serves(sent_ns + TIMEOUT_NS // 2 - 1, 11)
    assert not process.membership.serves(sent_ns + TIMEOUT_NS // 2, 11)


def test_an_answer_that_comes_too_late_opens_nothing() -> None:
    process = Process().registered()
    process.now_ns += TIMEOUT_NS
    effects = process.told(HeartbeatAnswer(1, routing(1, TargetState.SERVING)))
    assert not any(isinstance(one, OpenFence) for one in effects)
    assert not process.membership.serves(process.now_ns, 11)


def test_older_routing_changes_nothing_and_missing_changes_are_not_guessed() -> None:
    process = Process().serving()
    process.told(HeartbeatAnswer(2, routing(3, TargetState.OFFLINE, base=1)))
    assert process.told(HeartbeatAnswer(2, routing(2, TargetState.SERVING))) == []
    assert process.told(HeartbeatAnswer(2, routing(9, TargetState.SERVING, base=8))) == []
    assert not process.membership.serves(process.now_ns, 11)


def test_a_target_that_is_to_give_up_is_gone_when_it_has_stopped_and_until_the_next_version() -> None:
    process = Process().serving()
    order = GiveUp(11, 5, 1, "drained")
    assert StopTarget(11, 1, "drained") in process.told(HeartbeatAnswer(2, None, (order,)))
    assert process.membership.serves(process.now_ns, 11)
    effects = process.feed(TargetStopped(11, 1))
    assert reports(effects) == (TargetReport(11, Condition.GONE, 1, chain=5),)
    assert not process.membership.serves(process.now_ns, 11)
    assert process.told(HeartbeatAnswer(3, None, (order,))) == []
    effects = process.told(HeartbeatAnswer(3, routing(2, TargetState.OFFLINE, base=1), (order,)))
    assert reports(effects) == (TargetReport(11, Condition.ONLINE, 2, chain=5),)
    assert not any(isinstance(one, StopTarget) for one in effects)


def test_a_target_without_a_role_has_none_to_lay_down() -> None:
    process = Process().serving()
    process.told(HeartbeatAnswer(2, routing(2, TargetState.LASTSRV, base=1)))
    process.feed(TargetStopped(11, 2))
    heartbeat = process.tick().request
    assert isinstance(heartbeat, Heartbeat)
    assert heartbeat.reports == (TargetReport(11, Condition.ONLINE, 2, chain=5),)


def test_a_failed_disk_is_gone_in_every_version() -> None:
    process = Process().serving()
    assert reports(process.feed(TargetFailed(11)))[0].condition is Condition.GONE
    effects = process.told(HeartbeatAnswer(3, routing(2, TargetState.SERVING, base=1)))
    assert reports(effects) == (TargetReport(11, Condition.GONE, 2, chain=5),)
    assert not process.membership.serves(process.now_ns, 11)


def test_what_was_synced_is_up_to_date_in_that_version_only_and_sure() -> None:
    process = Process(clean=False).registered()
    effects = process.told(HeartbeatAnswer(1, routing(4, TargetState.SYNCING)))
    assert reports(effects) == (TargetReport(11, Condition.ONLINE, 4, clean=False, chain=5),)
    assert reports(process.feed(TargetSynced(11, 4))) == (TargetReport(11, Condition.UP_TO_DATE, 4, chain=5),)
    effects = process.told(HeartbeatAnswer(3, routing(5, TargetState.SYNCING, base=4)))
    assert reports(effects) == (TargetReport(11, Condition.ONLINE, 5, chain=5),)


def test_another_manager_is_asked_when_one_names_it_and_when_one_is_silent() -> None:
    process = Process("a", "b", "c")
    assert process.tick().manager == "a"
    process.told(NotPrimary("c"))
    assert process.tick().manager == "c"
    process.told(NotPrimary("c"))
    assert process.tick().manager == "b"
    process.told(NotPrimary("elsewhere"))
    assert [process.tick().manager for _ in range(5)] == ["c", "c", "c", "a", "a"]
    process.told(ManagerError("busy", "later"))
    assert process.tick().manager == "a"


def test_two_managers_that_name_each_other_do_not_keep_a_process_from_the_third() -> None:
    process = Process("a", "b", "c")
    asked = []
    for _ in range(6):
        asked.append(process.tick().manager)
        process.told(NotPrimary({"a": "b", "b": "a", "c": ""}[asked[-1]]))
    assert "c" in asked


def test_whoever_wants_routing_has_it_asked_for_soon_but_not_all_the_time() -> None:
    process = Process().serving()
    assert process.feed(RoutingWanted()) == []
    heartbeat = process.tick(20 * MS).request
    assert isinstance(heartbeat, Heartbeat)
    process.now_ns += 10 * MS
    assert process.feed(RoutingWanted()) == []
    process.now_ns += 10 * MS
    assert len(process.feed(RoutingWanted())) == 1


def test_measures_and_broken_paths_go_with_the_next_heartbeat() -> None:
    process = Process().serving()
    assert process.feed(Measured(11, 5, 9)) == []
    assert process.feed(PeersUnreachable((2,))) == []
    heartbeat = process.tick().request
    assert isinstance(heartbeat, Heartbeat)
    assert heartbeat.reports == (TargetReport(11, Condition.ONLINE, 1, True, 5, 9, 5, 0),)
    assert heartbeat.unreachable == (2,)


def test_a_process_that_was_replaced_ends() -> None:
    process = Process().serving()
    (end,) = process.told(Superseded(4))
    assert end == End("process 4 of node 1 has replaced 3")
    assert not process.membership.serves(process.now_ns, 11)
    process.now_ns += TIMEOUT_NS
    assert process.feed(Tick()) == []


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvariantViolation, match="target 12 does not belong to node 1"):
        Process().feed(TargetFailed(12))
    with pytest.raises(UsageError, match="give at least one manager address"):
        NodeMembership(ME, {11: True}, ())
    with pytest.raises(UsageError, match="at most 256 targets"):
        NodeMembership(ME, dict.fromkeys(range(300), True), ("a",))


def said_after_a_move() -> list[tuple[Condition, int, int]]:
    """Of a target that gave up in version 9 of one chain, and is then in version 2 of another."""
    process = Process().registered()
    process.told(HeartbeatAnswer(1, routing(9, TargetState.SERVING)))
    process.feed(TargetStopped(11, 9))
    moved = Chain(6, 2, (Member(12, 2, TargetState.SERVING), Member(11, 1, TargetState.SYNCING)))
    process.now_ns += SECOND
    effects = process.told(HeartbeatAnswer(2, RoutingDelta(0, 10, chains=(moved,))))
    return [(one.condition, one.chain, one.chain_version) for one in reports(effects)]


def test_versions_of_another_chain_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_after_a_move() == [(Condition.ONLINE, 6, 2)]
    another_chains_versions_count(monkeypatch)
    assert said_after_a_move() == [(Condition.GONE, 6, 2)]
