"""Sessions of browsers: signed cookies that count as long as their token does."""

from __future__ import annotations

import asyncio
import base64

import pytest

from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.manager.web.sessions import SESSION_S, FindUser, FoundToken, Sessions

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
NOW = 1_700_000_000


class Users:
    """One user with one token, which can be revoked."""

    def __init__(self) -> None:
        self.valid = True

    async def verify(self, token: str) -> FoundToken:
        if token != "right" or not self.valid:
            raise PermissionDenied("the token is unknown")
        return FoundToken(user="ada", token_id="t1", roles=("platform:operator",))

    async def still(self, token_id: str) -> FoundToken | None:
        return await self.verify("right") if self.valid and token_id == "t1" else None


def sessions_of(users: Users, key: bytes = KEY) -> Sessions:
    return Sessions(key, FindUser(users.verify, users.still))


def begin(sessions: Sessions) -> str:
    return asyncio.run(sessions.begin("right", NOW))[1]


def refused(sessions: Sessions, cookie: str, now_s: int = NOW) -> None:
    with pytest.raises(PermissionDenied, match="log in again"):
        asyncio.run(sessions.of_cookie(cookie, now_s))


def test_a_session_says_who_its_token_was_from() -> None:
    sessions = sessions_of(Users())
    principal = asyncio.run(sessions.of_cookie(begin(sessions), NOW + 5))
    assert (principal.user, principal.roles, principal.expires_s) == ("ada", ("platform:operator",), NOW + SESSION_S)


def test_another_manager_with_the_same_key_reads_the_session() -> None:
    users = Users()
    assert asyncio.run(sessions_of(users).of_cookie(begin(sessions_of(users)), NOW)).user == "ada"


def test_each_session_has_a_csrf_value_of_its_own_and_a_token_has_none() -> None:
    sessions = sessions_of(Users())
    first, _ = asyncio.run(sessions.begin("right", NOW))
    second, _ = asyncio.run(sessions.begin("right", NOW + 1))
    assert first.csrf
    assert first.csrf != second.csrf
    assert asyncio.run(sessions.of_token("right")).csrf == ""


def test_a_session_ends_by_its_time() -> None:
    sessions = sessions_of(Users())
    refused(sessions, begin(sessions), NOW + SESSION_S)


def test_a_session_ends_when_its_token_is_revoked() -> None:
    users = Users()
    sessions = sessions_of(users)
    cookie = begin(sessions)
    users.valid = False
    refused(sessions, cookie)


def test_a_session_of_another_cluster_is_refused() -> None:
    users = Users()
    refused(sessions_of(users, OTHER_KEY), begin(sessions_of(users)))


def test_no_byte_of_a_cookie_may_change() -> None:
    sessions = sessions_of(Users())
    cookie = begin(sessions)
    raw = bytearray(base64.urlsafe_b64decode(cookie + "=" * (-len(cookie) % 4)))
    for at in range(len(raw)):
        changed = bytes(raw[:at]) + bytes([raw[at] ^ 1]) + bytes(raw[at + 1 :])
        refused(sessions, base64.urlsafe_b64encode(changed).decode().rstrip("="))


@pytest.mark.parametrize("cookie", ["", "x", "=" * 8, "é", "A" * 2000, "-_-_" * 20])
def test_what_is_no_cookie_is_refused(cookie: str) -> None:
    refused(sessions_of(Users()), cookie)
