"""Nodes that complain of others: when a role is taken for it, and how long who had it is not synced again."""

from __future__ import annotations

import pytest
from tests.unit.fs.manager.test_manager import TIMEOUT_NS, Desk, cluster, register

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.manager.health import HOLD_OFF, Health, NodeHealth
from fireflyer.fs.schema.manager import Condition, GiveUp, Heartbeat, HeartbeatAnswer, Registered, TargetReport


class Pair:
    """The nodes 1 and 2 of a chain; each is heard once in a second unless it stands still."""

    def __init__(self) -> None:
        self.desk: Desk = cluster()
        self.incarnations = {1: 1, 2: 1}
        self.sequences = {1: 0, 2: 0}
        self.asked: list[GiveUp] = []
        """Of node 2."""

    def beat(
        self, node: int, condition: Condition = Condition.ONLINE, *, known: int | None = None, complains: bool = False
    ) -> None:
        self.sequences[node] += 1
        report = TargetReport(10 + node, condition, self.desk.chain().version, True)
        answer = self.desk.ask(
            Heartbeat(
                node, self.incarnations[node], self.sequences[node], self.version if known is None else known,
                (report,), (2,) if complains else (),
            )
        )  # fmt: skip
        assert isinstance(answer, HeartbeatAnswer), answer
        if node == 2:
            self.asked += answer.give_up

    @property
    def version(self) -> int:
        """Of the routing."""
        ledger = self.desk.manager._ledger
        assert ledger is not None
        return ledger.state.version

    def seconds(self, count: float, *, complains: bool, stands_still: bool = False) -> None:
        for _ in range(round(count)):
            self.desk.pass_time(SECOND)
            self.beat(1, complains=complains)
            if not stands_still:
                self.beat(2)

    def restart(self) -> None:
        """Of node 2."""
        answer = self.desk.ask(register(2, f"y{self.incarnations[2]}", previous=self.incarnations[2]))
        assert isinstance(answer, Registered)
        self.incarnations[2], self.sequences[2] = answer.incarnation, 0

    def loses_its_role(self) -> None:
        assert self.asked, "it is not asked to give up"
        self.asked.clear()
        self.beat(2, Condition.GONE)
        assert self.desk.states() == "11=serving 12=offline"


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.seconds(2, complains=False)
    return pair


def test_a_broken_path_costs_the_role_at_once_and_for_a_while(pair: Pair) -> None:
    pair.seconds(2, complains=True)
    pair.loses_its_role()
    pair.seconds(HOLD_OFF * TIMEOUT_NS // SECOND - 2, complains=False)
    assert pair.desk.states() == "11=serving 12=offline"
    pair.seconds(4, complains=False)
    assert pair.desk.states() == "11=serving 12=syncing"


def test_a_node_that_stood_still_keeps_its_role_when_it_is_heard_again(pair: Pair) -> None:
    pair.seconds(4, complains=True, stands_still=True)
    pair.seconds(1, complains=True)  # the neighbour has not had its answers yet
    pair.seconds(20, complains=False)
    assert not pair.asked
    assert pair.desk.states() == "11=serving 12=serving"


def test_a_node_that_stood_still_is_excused_until_t_after_it_was_heard_and_no_longer(pair: Pair) -> None:
    pair.seconds(4, complains=True, stands_still=True)
    pair.seconds(1, complains=True)
    assert not pair.asked
    pair.seconds(2, complains=True)
    pair.loses_its_role()


def test_a_node_that_stands_still_again_and_again_is_excused_once(pair: Pair) -> None:
    began_ns = pair.desk.now_ns
    while not pair.asked and pair.desk.now_ns - began_ns < 60 * SECOND:
        pair.seconds(3, complains=True, stands_still=True)
        pair.beat(2)
    assert pair.desk.now_ns - began_ns <= TIMEOUT_NS + 3 * SECOND
    pair.loses_its_role()


def test_much_later_it_is_excused_anew(pair: Pair) -> None:
    for _ in range(2):
        pair.seconds(4, complains=True, stands_still=True)
        pair.seconds(1, complains=True)
        pair.seconds(HOLD_OFF * TIMEOUT_NS // SECOND, complains=False)
    assert not pair.asked


def test_a_complaint_of_the_process_before_does_not_count_against_the_next_one(pair: Pair) -> None:
    before = pair.version
    pair.desk.pass_time(SECOND)
    pair.beat(1, complains=True)
    pair.restart()
    pair.beat(2)
    assert pair.desk.states() == "11=serving 12=syncing"
    pair.beat(1, complains=True, known=before)
    pair.beat(2)
    assert not pair.asked
    pair.beat(1, complains=True)  # it knows the new one, and cannot reach it either
    pair.beat(2)
    assert pair.asked


def test_a_process_that_starts_is_not_kept_out_for_what_the_one_before_was_asked(pair: Pair) -> None:
    pair.seconds(2, complains=True)
    pair.loses_its_role()
    pair.restart()
    pair.beat(2)
    assert pair.desk.states() == "11=serving 12=syncing"


def test_restarts_over_a_broken_path_end_the_time_without_a_role_once(pair: Pair) -> None:
    for expected in ("syncing", "offline"):
        pair.seconds(2, complains=True)
        pair.loses_its_role()
        pair.restart()
        pair.beat(2)
        assert pair.desk.states() == f"11=serving 12={expected}"


def test_who_stands_still_for_t_is_dead_as_ever(pair: Pair) -> None:
    pair.seconds(6, complains=True, stands_still=True)
    assert pair.desk.states() == "11=serving 12=offline"
    pair.beat(2)
    pair.beat(2)
    assert pair.desk.states() == "11=serving 12=syncing"


def test_without_the_bound_a_node_that_stands_still_again_and_again_would_keep_its_role(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_excuse(self: Health, node: NodeHealth, now_ns: int) -> bool:
        return now_ns - node.heard_ns >= 1500 * MS

    monkeypatch.setattr(Health, "_is_excuse", is_excuse)
    with pytest.raises(AssertionError):
        test_a_node_that_stands_still_again_and_again_is_excused_once(pair)
