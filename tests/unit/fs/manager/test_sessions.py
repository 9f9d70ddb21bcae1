"""Sessions of clients: ids that are given once, and a list that every storage process comes to have."""

from __future__ import annotations

import contextlib
import random

import pytest

from fireflyer.base.errors import Busy, PermissionDenied, StaleVersion
from fireflyer.base.units import SECOND
from fireflyer.fs.core.chain.node_membership import (
    ManagerReply,
    NodeMembership,
    OpenFence,
    ProcessIdentity,
    TakeRouting,
    TakeSessions,
    Tick,
)
from fireflyer.fs.core.manager import sessions
from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.core.manager.sessions import MAX_LOGGED, LiveSessions, SessionTable, apply_sessions
from fireflyer.fs.schema.manager import HeartbeatAnswer, Registered
from fireflyer.fs.schema.routing import RoutingDelta
from fireflyer.fs.schema.sessions import EndSession, OpenSession, SessionsDelta

LIFETIME_NS = 60 * SECOND


class Book:
    """One primary's; `load` is what the next one has."""

    def __init__(self, rows: dict[bytes, bytes] | None = None, term: int = 1) -> None:
        self.rows = dict(rows or {})
        self.term = term
        self.ledger = Ledger(term, 6 * SECOND)
        self.ledger.load(sorted(self.rows.items()))
        self.book = SessionTable(self.ledger, LIFETIME_NS, 0)

    def commit(self, now_ns: int = 0) -> None:
        pending = self.ledger.pending()
        assert pending is not None
        for key, value in pending[0]:
            if value is None:
                self.rows.pop(key)
            else:
                self.rows[key] = value
        changes = dict(self.ledger.sessions.changes())
        self.ledger.commit()
        self.book.committed(changes, now_ns)

    def open(self, nonce: str, user: str = "ann", now_ns: int = 0) -> int:
        client = self.book.open(OpenSession(nonce), user, now_ns).client
        if any(True for _ in self.ledger.sessions.changes()):
            self.commit(now_ns)
        return client

    def end(self, client: int) -> None:
        self.book.end(EndSession(client), "ann", trusted=False)
        self.commit()

    def next_primary(self) -> Book:
        return Book(self.rows, self.term + 1)


def test_an_id_is_never_given_again_whoever_ends_and_whoever_is_primary() -> None:
    book = Book()
    assert [book.open("a"), book.open("b")] == [1, 2]
    book.end(2)
    assert book.open("c") == 3
    book.end(3)
    assert book.next_primary().open("d") == 4


def test_an_id_of_a_draft_that_was_dropped_may_be_given_since_nobody_was_told() -> None:
    book = Book()
    book.book.open(OpenSession("a"), "ann", 0)
    book.ledger.rollback()
    assert book.open("b") == 1


def test_the_same_request_gets_the_same_session_and_is_a_sign_of_life() -> None:
    book = Book()
    assert [book.open("a"), book.open("a", now_ns=50 * SECOND), book.open("a", "bob")] == [1, 1, 2]
    assert book.book.silent(70 * SECOND) == [2]
    twice = [book.book.open(OpenSession("n"), "ann", 0).client for _ in range(2)]
    assert twice == [3, 3]


def test_only_its_user_or_an_administrator_ends_a_session() -> None:
    book = Book()
    book.open("a")
    with pytest.raises(PermissionDenied, match="session 1 belongs to another user"):
        book.book.end(EndSession(1), "bob", trusted=False)
    assert not book.book.living(1, "bob", trusted=False)
    assert book.book.living(1, "bob", trusted=True)
    book.book.end(EndSession(1), "root", trusted=True)
    book.commit()
    assert not book.book.living(1, "ann", trusted=False)


def test_one_user_takes_half_of_all_sessions_the_next_one_half_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 16)

    def opened(book: Book, user: str) -> int:
        for number in range(16):
            with contextlib.suppress(Busy):
                book.open(f"{user} {book.ledger.state.next_client} {number}", user)
        return sum(row.user == user for row in book.ledger.sessions.committed.values())

    book = Book()
    assert [opened(book, user) for user in ("ann", "bob", "cyd")] == [8, 4, 2]
    with pytest.raises(Busy, match="user ann has 8 sessions, as many as all others have free; close some clients"):
        book.open("one more")
    book = book.next_primary()
    assert opened(book, "ann") == 8
    book.end(1)
    assert opened(book, "ann") == 7, "one who ends some makes room for others"
    for nonce in ("x", "y"):
        book.book.open(OpenSession(nonce), "dan", 0)
    with pytest.raises(Busy, match="user dan has 2 sessions"):
        book.book.open(OpenSession("z"), "dan", 0)
    book.ledger.rollback()
    assert opened(book, "") == 3


def test_who_is_silent_for_its_lifetime_is_over_and_a_new_primary_gives_it_all_of_it_again() -> None:
    book = Book()
    for nonce in ("a", "b"):
        book.open(nonce)
    book.book.heard(2, 10 * SECOND)
    assert book.book.silent(LIFETIME_NS - 1) == []
    assert book.book.silent(LIFETIME_NS) == [1]
    book.book.restart_clocks(5 * SECOND)
    assert book.book.silent(LIFETIME_NS) == []
    assert book.next_primary().book.silent(LIFETIME_NS - 1) == []


def test_every_process_has_the_list_after_any_history_of_answers() -> None:
    rng = random.Random(1)
    book = Book()
    processes = [LiveSessions() for _ in range(4)]
    for step in range(600):
        living = list(book.ledger.sessions.committed)
        if living and rng.random() < 0.45:
            book.end(rng.choice(living))
        else:
            book.open(f"n{step}")
        if rng.random() < 0.01:
            book = book.next_primary()
        for number, live in enumerate(processes):
            if rng.random() < (0.9, 0.3, 0.05, 0.01)[number]:
                delta = book.book.delta(live.version)
                processes[number] = apply_sessions(live, delta) if delta is not None else live
    for live in processes:
        delta = book.book.delta(live.version)
        last = apply_sessions(live, delta) if delta is not None else live
        assert sorted(last.clients) == sorted(book.ledger.sessions.committed)
        for client in range(1, last.next_client):
            assert last.over(client) != last.admits(client)
        assert not last.over(last.next_client)
        assert not last.admits(last.next_client)


def test_who_knows_less_than_is_remembered_gets_the_whole_list() -> None:
    book = Book()
    first = book.open("a")
    early = book.book.delta(0)
    for number in range(MAX_LOGGED // 2 + 1):
        book.open(f"n{number}")
        book.end(number + 2)
    assert early is not None
    live = apply_sessions(LiveSessions(), early)
    delta = book.book.delta(live.version)
    assert delta is not None
    assert (delta.base, delta.opened, delta.ended) == (0, (first,), ())
    assert list(apply_sessions(live, delta).clients) == [first]


def test_changes_that_do_not_fit_are_not_applied() -> None:
    live = LiveSessions(3, 5, {1: None})
    assert apply_sessions(live, SessionsDelta(1, 3, 5, (9,))) is live
    with pytest.raises(StaleVersion, match="since 4 do not apply to version 3"):
        apply_sessions(live, SessionsDelta(4, 5, 6, (5,)))


def registered() -> NodeMembership:
    membership = NodeMembership(ProcessIdentity(1, "n", "a:1", "m", "b"), {11: True}, ["a"])
    membership.handle(0, Tick())
    membership.handle(0, ManagerReply(1, Registered(1, 6 * SECOND)))
    return membership


def test_the_list_is_taken_before_the_routing_and_the_fence() -> None:
    membership = registered()
    answer = HeartbeatAnswer(1, RoutingDelta(0, 1), (), SessionsDelta(0, 2, 4, (1, 3)))
    effects = membership.handle(1, ManagerReply(2, answer))
    assert [type(one) for one in effects[:3]] == [TakeSessions, TakeRouting, OpenFence]
    assert isinstance(effects[0], TakeSessions)
    assert effects[0].ended == ()
    assert membership.sessions.over(2)
    later = HeartbeatAnswer(1, None, (), SessionsDelta(2, 3, 4, (), (3,)))
    (taken,) = [one for one in membership.handle(2, ManagerReply(3, later)) if isinstance(one, TakeSessions)]
    assert taken.ended == (3,)


@pytest.mark.parametrize(
    "answer",
    [
        HeartbeatAnswer(1, RoutingDelta(0, 1), (), SessionsDelta(7, 8, 9)),
        HeartbeatAnswer(1, RoutingDelta(5, 6), (), SessionsDelta(0, 8, 9)),
    ],
)
def test_of_an_answer_of_which_a_part_does_not_fit_nothing_is_taken(answer: HeartbeatAnswer) -> None:
    membership = registered()
    assert membership.handle(1, ManagerReply(2, answer)) == []
    assert (membership.sessions.version, membership.routing.version) == (0, 0)
