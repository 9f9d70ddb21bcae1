"""The states of a chain's targets: every chain of up to four members against a table that is written out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.support.campaigns.shards import campaign

from fireflyer.fs.core.manager.chains import next_chain
from fireflyer.fs.schema.manager import Condition, TargetReport
from fireflyer.fs.schema.routing import Chain, Member, TargetState

VERSION = 7
STATES = ("serving", "lastsrv", "syncing", "waiting", "offline")
SAID = ("silent", "gone", "online", "unclean", "synced")
Case = tuple[tuple[str, str], ...]

# What becomes of a target in this state of which this is said: when somebody serves afterwards, and when nobody does.
# "sync": syncing if it is the first one that can, else waiting. "on": syncing, before those. "first": serving if it is
# the first such one, else as "sync". "stay": lastsrv if it is the only one that is left, else waiting.
TABLE = {
    ("serving", "silent"): ("serving", "-"),
    ("serving", "gone"): ("offline", "lastsrv"),
    ("serving", "online"): ("serving", "-"),
    ("serving", "unclean"): ("serving", "-"),
    ("serving", "synced"): ("serving", "-"),
    ("lastsrv", "silent"): ("offline", "lastsrv"),
    ("lastsrv", "gone"): ("offline", "lastsrv"),
    ("lastsrv", "online"): ("first", "-"),
    ("lastsrv", "unclean"): ("sync", "stay"),
    ("lastsrv", "synced"): ("first", "-"),
    ("syncing", "silent"): ("on", "waiting"),
    ("syncing", "gone"): ("offline", "offline"),
    ("syncing", "online"): ("on", "waiting"),
    ("syncing", "unclean"): ("on", "waiting"),
    ("syncing", "synced"): ("serving", "-"),
    ("waiting", "silent"): ("waiting", "waiting"),
    ("waiting", "gone"): ("offline", "offline"),
    ("waiting", "online"): ("sync", "waiting"),
    ("waiting", "unclean"): ("sync", "waiting"),
    ("waiting", "synced"): ("sync", "waiting"),
    ("offline", "silent"): ("offline", "offline"),
    ("offline", "gone"): ("offline", "offline"),
    ("offline", "online"): ("sync", "waiting"),
    ("offline", "unclean"): ("sync", "waiting"),
    ("offline", "synced"): ("sync", "waiting"),
}


def expected(case: Case) -> list[str]:
    """The states by the table, in the order of `case`."""
    had_serving = any(state == "serving" for state, _ in case)
    served = any(TABLE[one][0] == "serving" for one in case)
    returns = next((place for place, one in enumerate(case) if TABLE[one][0] == "first"), None)
    if served or had_serving:
        returns = None
    column = 0 if served or returns is not None else 1
    result = [TABLE[one][column] for one in case]
    for place, (state, said) in enumerate(case):
        if state == "lastsrv" and column == 1 and had_serving:  # its time is over: those that served are newer
            result[place] = "waiting" if said in ("online", "unclean", "synced") else "offline"
        elif result[place] == "first":
            result[place] = "serving" if place == returns else "sync"
    unclean = [place for place, word in enumerate(result) if word == "stay"]
    others = "lastsrv" in result
    for place in unclean:
        result[place] = "lastsrv" if not others and place == unclean[0] else "waiting"
    going_on = [place for place, word in enumerate(result) if word == "on"]
    beginning = [place for place, word in enumerate(result) if word == "sync"]
    chosen = (going_on or beginning or [-1])[0]
    return ["syncing" if p == chosen else "waiting" if w in ("on", "sync") else w for p, w in enumerate(result)]


def reports_of(case: Case) -> dict[int, TargetReport]:
    conditions = {"gone": Condition.GONE, "online": Condition.ONLINE, "unclean": Condition.ONLINE}
    reports = {}
    for target, (_, said) in enumerate(case):
        if said != "silent":
            condition = conditions.get(said, Condition.UP_TO_DATE)
            reports[target] = TargetReport(target, condition, VERSION, clean=said != "unclean")
    return reports


def chain_of(case: Case) -> Chain:
    return Chain(
        1, VERSION, tuple(Member(target, 10 + target, TargetState(state)) for target, (state, _) in enumerate(case))
    )


def in_order(size: int) -> Iterator[Case]:
    for states in itertools.combinations_with_replacement(STATES, size):
        for said in itertools.product(SAID, repeat=size):
            yield tuple(zip(states, said, strict=True))


def in_any_order(size: int) -> Iterator[Case]:
    return itertools.product(itertools.product(STATES, SAID), repeat=size)


def check(case: Case) -> None:
    chain, reports = chain_of(case), reports_of(case)
    following, reason = next_chain(chain, reports)
    wanted = expected(case)
    assert {one.target: str(one.state) for one in following.members} == dict(enumerate(wanted)), (case, reason)
    ranks = [STATES.index(one.state) for one in following.members]
    assert ranks == sorted(ranks), case
    if following is chain:
        assert reason == "no change"
    else:
        assert following.version == VERSION + 1
        assert following.members != chain.members
    for state in STATES:  # among those that stay what they were, the order stays
        stayed = [p for p, (old, _) in enumerate(case) if old == wanted[p] == state]
        assert [one.target for one in following.members if one.target in stayed] == stayed


def test_every_chain_of_up_to_four_members_follows_the_table() -> None:
    cases = itertools.chain(in_any_order(1), in_any_order(2), in_order(3), in_order(4))
    for case in cases:
        check(case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("members", [3, pytest.param(4, marks=campaign(expected_s=15))])
def test_members_in_any_order_follow_the_table(members: int) -> None:
    """Orders that the rules never make: nothing depends on who stands where."""
    for case in in_any_order(members):
        check(case)


def test_reports_of_another_version_say_nothing() -> None:
    for case in in_order(3):
        chain = chain_of(case)
        for version in (VERSION - 1, VERSION + 1):
            old = {one.target: TargetReport(one.target, one.condition, version) for one in reports_of(case).values()}
            assert next_chain(chain, old) == next_chain(chain, {})


def test_who_has_missed_nothing_is_waited_for_with_the_last_and_unused_while_one_serves() -> None:
    chain = chain_of((("serving", ""), ("syncing", ""), ("waiting", ""), ("offline", "")))
    lost, _ = next_chain(chain, reports_of((("", "gone"), ("", "gone"), ("", "online"), ("", "silent"))), (2, 3))
    assert {one.target: str(one.state) for one in lost.members} == {
        0: "lastsrv",
        1: "offline",
        2: "lastsrv",
        3: "lastsrv",
    }
    back, _ = next_chain(lost, {2: TargetReport(2, Condition.ONLINE, lost.version)}, (2, 3))
    assert [(one.target, str(one.state)) for one in back.members if one.target == 2] == [(2, "serving")]
    same, _ = next_chain(chain, {}, (2, 3))
    assert same is chain


def test_all_that_were_serving_at_the_end_may_come_back_and_who_left_before_may_not() -> None:
    chain = chain_of((("serving", "gone"), ("serving", "gone"), ("offline", "online")))
    lost, reason = next_chain(chain, reports_of((("", "gone"), ("", "gone"), ("", "online"))))
    assert [str(one.state) for one in lost.members] == ["lastsrv", "lastsrv", "waiting"]
    assert "target 0 serving -> lastsrv (gone)" in reason
    back = {1: TargetReport(1, Condition.ONLINE, lost.version), 2: TargetReport(2, Condition.ONLINE, lost.version)}
    again, _ = next_chain(lost, back)
    assert [(one.target, str(one.state)) for one in again.members] == [(1, "serving"), (2, "syncing"), (0, "offline")]
