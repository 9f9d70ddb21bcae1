"""Tokens of open connections are looked up again."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import DataCorruption
from fireflyer.identity.handshake import UserKey
from fireflyer.runtime.token_watch import RECHECK_S, TokenWatch

KEY = UserKey("ann", b"k" * 32)


def test_connections_of_a_token_that_is_gone_are_cut_and_no_others() -> None:
    known = {"one": KEY, "two": KEY}
    cut: list[int] = []
    watch: TokenWatch[int] = TokenWatch(known.get, cut.append)
    for token, connection in (("one", 1), ("one", 2), ("two", 3), ("", 4)):
        watch.add(token, connection)
    watch.look()
    assert cut == []
    del known["one"]
    watch.look()
    assert sorted(cut) == [1, 2]
    watch.remove("one", 1)
    watch.look()
    assert sorted(cut) == [1, 2, 2], "who is still there is cut again"
    watch.remove("one", 2)
    known.clear()
    watch.look()
    assert sorted(cut) == [1, 2, 2, 3]


def test_a_file_that_cannot_be_read_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def damaged(_: str) -> UserKey | None:
        raise DataCorruption("token file is damaged")

    cut: list[int] = []
    watch = TokenWatch(damaged, cut.append)
    watch.add("one", 1)
    watch.look()
    assert cut == []
    assert "tokens cannot be read; connections stay as they are reason=token file is damaged" in caplog.text


def test_it_keeps_nothing_of_who_has_gone_and_nothing_where_there_are_no_users() -> None:
    without: TokenWatch[int] = TokenWatch(None, lambda _: None)
    without.add("one", 1)
    watch: TokenWatch[int] = TokenWatch(lambda _: KEY, lambda _: None)
    watch.add("one", 1)
    watch.remove("one", 1)
    watch.remove("one", 1)
    assert not watch._connections
    assert not without._connections


def test_it_looks_often_enough() -> None:
    """Twice in the time that is promised: one look may be late."""
    assert 2 * RECHECK_S < 10
