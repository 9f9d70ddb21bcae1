"""Which versions of a chain may have acknowledged anything."""

from __future__ import annotations

import pytest

from fireflyer.fs.core.manager.acknowledged import AcknowledgedVersions
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
