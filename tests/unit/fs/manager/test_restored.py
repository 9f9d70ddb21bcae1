"""Who may serve a chain of a dump that was loaded: those who served last, when everybody has said when that was."""

from __future__ import annotations

import pytest

from fireflyer.fs.core.chain.served_notes import ServedNote, note_of, notes_due
from fireflyer.fs.core.manager.chains import next_chain
from fireflyer.fs.core.manager.restored import restored
from fireflyer.fs.schema.manager import Condition, HeartbeatAnswer, TargetReport
from fireflyer.fs.schema.routing import Chain, Member, RoutingDelta, TargetState

SERVING, OFFLINE, LASTSRV = TargetState.SERVING, TargetState.OFFLINE, TargetState.LASTSRV
DUMPED = Chain(1, 10, (Member(1, 1, SERVING), Member(2, 2, SERVING), Member(3, 3, OFFLINE)))
LOADED = restored(DUMPED, 1000)
ALL = (1, 2, 3)


def said(target: int, served_in: int, members: tuple[int, ...] = ALL, **fields: int) -> TargetReport:
    condition = Condition.GONE if fields.get("gone") else Condition.ONLINE
    version = fields.get("version", 1000)
    return TargetReport(target, condition, version, chain=1, served_in=served_in, served_with=members)


def states(chain: Chain) -> dict[int, str]:
    return {member.target: str(member.state) for member in chain.members}


def told(*reports: TargetReport) -> dict[int, TargetReport]:
    return {one.target: one for one in reports}


def test_those_who_served_in_the_newest_version_may_bring_it_back_whatever_the_dump_says() -> None:
    following, reason = next_chain(LOADED, told(said(1, 10), said(2, 11), said(3, 12)))
    assert states(following) == {1: "waiting", 2: "waiting", 3: "lastsrv"}
    assert (following.version, following.restored) == (1001, False)
    assert "the last version in which a target served is 12" in reason
    again, _ = next_chain(following, told(*(said(one, 0, version=1001) for one in ALL)))
    assert states(again) == {3: "serving", 1: "syncing", 2: "waiting"}


def test_all_who_served_in_it_may() -> None:
    following, _ = next_chain(LOADED, told(said(1, 12), said(2, 12), said(3, 7)))
    assert states(following) == {1: "lastsrv", 2: "lastsrv", 3: "waiting"}


@pytest.mark.parametrize(
    ("third", "why"),
    [
        (None, "waiting for target 3 to say in which version it last served"),
        (said(3, 9, version=10), "waiting for target 3"),
        (said(3, 0), "target 3 does not know in which version it last served"),
        (said(3, 9, (1, 2, 3, 4)), "since the dump target 4 has been in the chain"),
    ],
    ids=["silent", "of another version", "made anew", "with another one"],
)
def test_nobody_serves_while_it_is_not_known_who_served_last(third: TargetReport | None, why: str) -> None:
    reports = told(said(1, 12), said(2, 12), *([] if third is None else [third]))
    same, reason = next_chain(LOADED, reports)
    assert same is LOADED
    assert why in reason
    assert all(member.state is LASTSRV for member in same.members)


def test_a_target_whose_disk_has_failed_says_what_it_has_noted() -> None:
    following, _ = next_chain(LOADED, told(said(1, 12), said(2, 11), said(3, 9, gone=1)))
    assert states(following)[1] == "lastsrv"


def chain(version: int, *roles: TargetState, members: tuple[int, ...] = ALL) -> Chain:
    return Chain(1, version, tuple(Member(one, one, role) for one, role in zip(members, roles, strict=True)))


def test_a_target_notes_each_version_in_which_it_serves_and_who_is_in_the_chain() -> None:
    first = note_of(chain(5, SERVING, SERVING, OFFLINE), 1, None)
    assert first == ServedNote(1, 5, ALL)
    assert note_of(chain(6, OFFLINE, SERVING, SERVING), 1, first) == first
    wider = chain(7, OFFLINE, SERVING, SERVING, OFFLINE, members=(1, 2, 3, 4))
    assert note_of(wider, 1, first) == ServedNote(1, 5, (1, 2, 3, 4))
    assert note_of(chain(4, SERVING, SERVING, SERVING), 1, first) == first, "an answer that was overtaken"
    assert note_of(LOADED, 1, first) == first, "what a dump says is nothing that was done"
    assert note_of(chain(6, OFFLINE, SERVING, SERVING), 1, None) is None, "it never served"


def test_what_is_due_is_due_before_the_answer_is_taken_over_and_once() -> None:
    routing = RoutingDelta(0, 9, (), (chain(5, SERVING, SERVING, OFFLINE),))
    answer = HeartbeatAnswer(1, routing)
    assert notes_due(answer, [1, 3, 8], {}) == {1: ServedNote(1, 5, ALL)}
    assert notes_due(answer, [1, 3, 8], {1: ServedNote(1, 5, ALL)}) == {}
    assert notes_due(HeartbeatAnswer(1, None), [1], {}) == {}
