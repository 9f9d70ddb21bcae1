"""Who a request is from: a bearer token, or the signed cookie of a session that began with one.

A session's cookie says user, token and end, under a MAC of a key that all managers of the cluster have, so any of them
reads it; nothing is kept on the server. It counts as long as its token does: whoever revokes the token ends its
sessions. The cookie cannot be read by scripts and is not sent from other sites; what changes something must also carry
the session's `csrf` in a header, which another site cannot know.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, NamedTuple, Self

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_msgpack
from fireflyer.base.errors import PermissionDenied

__all__ = ["COOKIE", "SESSION_S", "FindUser", "FoundToken", "Principal", "RunName", "Sessions"]

COOKIE: Final = "ff_session"
SESSION_S: Final = 12 * 3600
MAX_COOKIE_CHARS: Final = 1024
_MAC_BYTES: Final = 32


class RunName(NamedTuple):
    """The run whose processes ask, with its token."""

    task: int
    number: int


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. `csrf` is empty for a bearer token, which no browser sends by itself."""

    user: str
    group: str = ""
    """Whose limits count beside the user's."""
    roles: tuple[str, ...] = ()
    token_id: str = ""
    csrf: str = ""
    expires_s: int = 0
    run: RunName | None = None


class _Claims(msgspec.Struct, frozen=True, array_like=True):
    user: Annotated[str, msgspec.Meta(max_length=80)]
    token_id: Annotated[str, msgspec.Meta(max_length=80)]
    expires_s: int


class FoundToken(msgspec.Struct, frozen=True, kw_only=True):
    """A valid token's user."""

    user: str
    token_id: str
    group: str = ""
    roles: tuple[str, ...] = ()
    run: RunName | None = None


class FindUser:
    """What the sessions ask of the identity store. `verify` raises `PermissionDenied`; `still` is None for a token
    that is revoked or expired."""

    def __init__(
        self,
        verify: Callable[[str], Awaitable[FoundToken]],
        still: Callable[[str], Awaitable[FoundToken | None]],
    ) -> None:
        self.verify = verify
        self.still = still


class Sessions:
    def __init__(self, key: bytes, find: FindUser) -> None:
        """`key`: 32 bytes that the managers of the cluster share."""
        self._key = hashlib.blake2b(b"fireflyer platform session", key=key, digest_size=32).digest()
        self._find = find

    def __deepcopy__(self, _memo: object) -> Self:
        """Litestar copies what a middleware is given; a copy would have an identity store of its own."""
        return self

    async def of_token(self, token: str) -> Principal:
        """Raises `PermissionDenied`."""
        found = await self._find.verify(token)
        return Principal(user=found.user, group=found.group, roles=found.roles, token_id=found.token_id, run=found.run)

    async def still_valid(self, who: Principal, now_s: int) -> bool:
        """Whether the token of somebody who has asked is neither revoked nor expired, and their session goes on."""
        if who.csrf and now_s >= who.expires_s:
            return False
        found = await self._find.still(who.token_id)
        return found is not None and found.user == who.user

    async def still(self, token_id: str) -> FoundToken | None:
        """Whose it is, and what they may; None where it is revoked or has expired."""
        return await self._find.still(token_id)

    async def begin(self, token: str, now_s: int) -> tuple[Principal, str]:
        """A session, and its cookie. Raises `PermissionDenied`."""
        found = await self._find.verify(token)
        if found.run is not None:
            raise PermissionDenied("the token of a run begins no session; log in with a token of your own")
        claims = _Claims(found.user, found.token_id, now_s + SESSION_S)
        data = msgspec.msgpack.encode(claims)
        cookie = base64.urlsafe_b64encode(self._mac(data) + data).decode().rstrip("=")
        return self._principal(claims, found, data), cookie

    async def of_cookie(self, cookie: str, now_s: int) -> Principal:
        """Raises `PermissionDenied`, with one message for every reason."""
        refused = PermissionDenied("the session has ended; log in again")
        if len(cookie) > MAX_COOKIE_CHARS:
            raise refused
        try:
            raw = base64.b64decode(cookie + "=" * (-len(cookie) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise refused from None
        mac, data = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(data)):
            raise refused
        try:
            claims = decode_msgpack(data, _Claims)
        except DECODE_ERRORS:
            raise refused from None
        found = await self._find.still(claims.token_id)
        if now_s >= claims.expires_s or found is None or found.user != claims.user:
            raise refused
        return self._principal(claims, found, data)

    def _principal(self, claims: _Claims, found: FoundToken, data: bytes) -> Principal:
        return Principal(
            user=claims.user,
            group=found.group,
            roles=found.roles,
            token_id=claims.token_id,
            csrf=self._mac(b"csrf" + data).hex()[:32],
            expires_s=claims.expires_s,
        )

    def _mac(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=_MAC_BYTES).digest()
