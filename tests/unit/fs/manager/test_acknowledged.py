"""Which versions of a chain may have acknowledged anything."""

from __future__ import annotations

import pytest

from fireflyer.fs.core.manager.acknowledged import AcknowledgedVersions, unchanged
from fireflyer.fs.schema.manager import Condition, TargetReport
from fireflyer.fs.schema.routing import Chain, Member, TargetState

LETTERS = {"S": "serving", "L": "lastsrv", "Y": "syncing", "W": "waiting", "O": "offline"}


class Told:
    """A chain whose target t is on node t; a version is a letter for each target."""

    def __init__(self, states: str) -> None:
        self.learned = AcknowledgedVersions()
        self.chain = self.version(1, states)

    def version(self, number: int, states: str) -> Chain:
        members = (Member(target, target, TargetState(LETTERS[state])) for target, state in enumerate(states))
        return Chain(1, number, tuple(members))

    def then(self, states: str, *told: int) -> Told:
        following = self.version(self.chain.version + 1, states)
        self.learned.committed(self.chain, following)
        self.chain = following
        for node in told:
            self.learned.answered(node, [1])
        return self

    @property
    def complete(self) -> tuple[int, ...]:
        return self.learned.complete(1)


def test_a_new_primary_takes_what_it_has_loaded_for_told() -> None:
    assert Told("SSO").complete == ()


@pytest.mark.parametrize(("nodes", "complete"), [([1], (0, 1, 2)), ([2], (0, 1, 2)), ([1, 2], ()), ([0, 2], (0, 1, 2))])
def test_who_served_before_is_complete_until_all_that_serve_now_are_told(
    nodes: list[int], complete: tuple[int, ...]
) -> None:
    assert Told("SSS").then("OSS", *nodes).complete == complete


def test_a_tail_that_was_not_the_tail_before_may_show_what_it_had_pending() -> None:
    """The old tail may never have got that; and a head that still believes the old version acknowledges it."""
    assert Told("SSS").then("SSO", 0).complete == (0, 1, 2)
    assert Told("SSS").then("SSO", 1).complete == ()
    assert Told("SSS").then("SSO", 0).then("SOO", 0).complete == ()
    assert Told("SSS").then("SSO").then("OSO").then("OLO").complete == (0, 1, 2)


def test_versions_of_which_somebody_was_never_told_do_not_count() -> None:
    assert Told("SSS").then("OSS", 1).then("OOS").then("LLL").complete == (0, 1, 2)
    assert Told("SSS").then("OSS", 1, 2).then("OOS").complete == (1, 2)
    assert Told("SSS").then("OSS", 2).then("OOS", 2).complete == ()


def test_who_is_synced_and_who_has_left_the_chain_is_not_complete() -> None:
    assert Told("SSS").then("WSS").then("YSS").complete == (0, 1, 2)
    assert Told("SSS").then("WSS").then("YSS", 1).complete == (1, 2)
    assert Told("SSS").then("WSS").then("YSS", 2).then("WSS").complete == (1, 2)
    assert Told("SSS").then("OSS").then("SS").complete == (0, 1)


def test_who_was_synced_is_complete_when_it_has_served() -> None:
    assert Told("SY").then("SS").complete == (0,)
    assert Told("SY").then("SS").then("OS").complete == (0, 1)
    assert Told("SY").then("SS", 1).complete == ()


def test_after_the_end_of_all_nobody_is_waited_for_only_because_it_came_up_last() -> None:
    assert Told("SS").then("SO").then("SY").then("LL").complete == (0, 1)
    assert Told("SS").then("SO").then("SY", 0).then("LY").complete == (0,)


def test_one_that_came_back_and_died_before_it_was_told_changes_nothing() -> None:
    assert Told("SSO").then("LLO").then("SOO").complete == (0, 1)
    assert Told("SSO").then("LLO").then("SOO", 0).complete == ()


def test_the_first_version_of_a_chain_has_nobody_before_it() -> None:
    learned = AcknowledgedVersions()
    first = Told("SS").chain
    learned.committed(None, first)
    assert learned.complete(1) == ()


def gone(target: int, changed_in: int, version: int = 9) -> dict[int, TargetReport]:
    return {target: TargetReport(target, Condition.GONE, version, chain=1, changed_in=changed_in)}


def test_who_left_before_the_tail_changed_anything_more_is_complete() -> None:
    chain = Told("SSO").version(9, "OWSS")
    left = {0: 6, 1: 8, 2: 0, 3: 0}
    assert unchanged(chain, gone(3, changed_in=5), left) == (0, 1)
    assert unchanged(chain, gone(3, changed_in=6), left) == (0, 1)
    assert unchanged(chain, gone(3, changed_in=7), left) == (1,)
    assert unchanged(chain, gone(3, changed_in=9), left) == ()


def test_only_the_tail_knows_what_may_have_been_shown_and_only_when_it_is_gone() -> None:
    chain = Told("SSO").version(9, "OWSS")
    left = {0: 6, 1: 8}
    assert unchanged(chain, gone(2, changed_in=5), left) == ()
    assert unchanged(chain, gone(3, changed_in=0), left) == ()
    assert unchanged(chain, gone(3, changed_in=5, version=8), left) == ()
    there = {3: TargetReport(3, Condition.ONLINE, 9, chain=1, changed_in=5)}
    assert unchanged(chain, there, left) == ()
    assert unchanged(Told("SSO").version(9, "OLL"), gone(2, changed_in=5), left) == ()


def test_who_has_begun_to_be_synced_since_it_left_is_not_complete() -> None:
    assert unchanged(Told("SSO").version(9, "OYS"), gone(2, changed_in=1), {0: 0, 1: 5}) == ()
