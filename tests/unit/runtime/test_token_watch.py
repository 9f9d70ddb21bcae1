"""Tokens of open connections are looked up again."""

from __future__ import annotations

import pytest
from tests.support.loops import on_loop
from tests.support.network.known_users import known

from fireflyer.base.errors import DataCorruption, Unreachable
from fireflyer.identity.account import Account
from fireflyer.identity.handshake import Role, Session, UserKey
from fireflyer.runtime.token_watch import AT_ONCE, RECHECK_S, TokenWatch

ANN = Account("ann", 1001, 1001)
KEY = UserKey("ann", b"k" * 32, ANN)


def session(token_id: str, user: UserKey = KEY) -> Session:
    """As a handshake with this token makes it."""
    role: Role = "user" if token_id else "node"
    return Session(role, user.user, "test", b"k" * 32, token_id, user.account, user.roles)


@on_loop
async def test_connections_of_a_token_that_is_gone_are_cut_and_no_others() -> None:
    users = {"one": KEY, "two": KEY}
    cut: list[int] = []
    watch: TokenWatch[int] = TokenWatch(known(users), cut.append)
    for token, connection in (("one", 1), ("one", 2), ("two", 3), ("", 4)):
        watch.add(session(token), connection)
    await watch.look()
    assert cut == []
    del users["one"]
    await watch.look()
    assert sorted(cut) == [1, 2]
    watch.remove("one", 1)
    await watch.look()
    assert sorted(cut) == [1, 2, 2], "who is still there is cut again"
    watch.remove("one", 2)
    users.clear()
    await watch.look()
    assert sorted(cut) == [1, 2, 2, 3]


@on_loop
@pytest.mark.parametrize(
    "later",
    [
        UserKey("bob", b"k" * 32, ANN, ("fs:admin",)),
        UserKey("ann", b"k" * 32, Account("ann", 1002, 1002), ("fs:admin",)),
        UserKey("ann", b"k" * 32, ANN, ()),
    ],
    ids=["another user", "another uid", "a role less"],
)
async def test_connections_of_a_user_who_is_another_one_by_now_are_cut(later: UserKey) -> None:
    users = {"one": UserKey("ann", b"k" * 32, ANN, ("fs:admin",))}
    cut: list[int] = []
    watch: TokenWatch[int] = TokenWatch(known(users), cut.append)
    watch.add(session("one", users["one"]), 1)
    await watch.look()
    assert cut == []
    users["one"] = later
    await watch.look()
    assert cut == [1]


@on_loop
async def test_a_store_that_cannot_be_read_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def away(_: str) -> UserKey | None:
        raise Unreachable("no manager answers")

    cut: list[int] = []
    watch = TokenWatch(away, cut.append)
    watch.add(session("one"), 1)
    await watch.look()
    assert cut == []
    assert "tokens cannot be looked up; connections stay as they are reason=no manager answers" in caplog.text


@on_loop
async def test_one_row_that_is_damaged_does_not_keep_others_from_being_cut() -> None:
    tokens = [f"t{number}" for number in range(3 * AT_ONCE)]

    async def find(token_id: str) -> UserKey | None:
        if token_id == "t0":
            raise DataCorruption("its row is damaged")
        return None

    cut: list[int] = []
    watch: TokenWatch[int] = TokenWatch(find, cut.append)
    for number, token in enumerate(tokens):
        watch.add(session(token), number)
    await watch.look()
    assert cut == list(range(1, 3 * AT_ONCE))


def test_it_keeps_nothing_of_who_has_gone_and_nothing_where_there_are_no_users() -> None:
    without: TokenWatch[int] = TokenWatch(None, lambda _: None)
    without.add(session("one"), 1)
    watch: TokenWatch[int] = TokenWatch(known({"one": KEY}), lambda _: None)
    watch.add(session("one"), 1)
    watch.remove("one", 1)
    watch.remove("one", 1)
    assert not watch._connections
    assert not without._connections


def test_it_looks_often_enough() -> None:
    """Twice in the time that is promised: one look may be late."""
    assert 2 * RECHECK_S < 10
