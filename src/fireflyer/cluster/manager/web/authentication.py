"""What every request meets before its handler: who asks, how often, and from which site."""

from __future__ import annotations

import hmac
import time
from typing import Any, Final

from litestar.connection import ASGIConnection
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult
from litestar.types import ASGIApp

from fireflyer.base.errors import PermissionDenied
from fireflyer.base.units import SECOND
from fireflyer.cluster.manager.web.errors import TooOften, Unauthenticated
from fireflyer.cluster.manager.web.rates import Rates
from fireflyer.cluster.manager.web.sessions import COOKIE, Principal, Sessions
from fireflyer.cluster.schema.api import CSRF_HEADER

__all__ = ["OPEN", "PEOPLE", "Authentication"]

OPEN: Final = "exclude_from_auth"
"""Option of a handler that anybody may ask."""
PEOPLE: Final = "people_only"
"""Option of a handler that the processes of a run may not ask: what it does outlives the run, or gives more rights."""
_SAFE: Final = ("GET", "HEAD")
_BEARER: Final = "bearer "


class Authentication(AbstractAuthenticationMiddleware):
    """Raises `Unauthenticated` (401), `PermissionDenied` (403: a forged request) and `TooOften` (429)."""

    def __init__(self, app: ASGIApp, sessions: Sessions, users: Rates, strangers: Rates) -> None:
        super().__init__(app, exclude_from_auth_key=OPEN, scopes=None)
        self._sessions, self._users, self._strangers = sessions, users, strangers

    async def authenticate_request(self, connection: ASGIConnection[Any, Any, Any, Any]) -> AuthenticationResult:
        try:
            principal = await self._principal(connection)
        except PermissionDenied as error:
            client = connection.client
            _within(self._strangers, client.host if client is not None else "")
            raise Unauthenticated(error.message) from None
        if principal.run is not None and connection.scope["route_handler"].opt.get(PEOPLE):
            raise PermissionDenied("the token of a run may not do this; use a token of your own")
        if principal.csrf and connection.scope.get("method") not in _SAFE:
            _same_site(connection, principal)
        _within(self._users, principal.user)
        return AuthenticationResult(user=principal, auth=principal.token_id)

    async def _principal(self, connection: ASGIConnection[Any, Any, Any, Any]) -> Principal:
        header = connection.headers.get("authorization", "")
        if header[: len(_BEARER)].lower() == _BEARER:
            return await self._sessions.of_token(header[len(_BEARER) :].strip())
        cookie = connection.cookies.get(COOKIE)
        if cookie is None:
            raise PermissionDenied("send your token: Authorization: Bearer TOKEN")
        return await self._sessions.of_cookie(cookie, int(time.time()))


def _within(rates: Rates, who: str) -> None:
    wait_ns = rates.wait_ns(who, time.monotonic_ns())
    if wait_ns:
        raise TooOften(f"too many requests; try again in {wait_ns / SECOND:.1f} s", retry_ns=wait_ns)


def _same_site(connection: ASGIConnection[Any, Any, Any, Any], principal: Principal) -> None:
    given = connection.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(given.encode(), principal.csrf.encode()):
        raise PermissionDenied(f"a session sends its csrf value in the header {CSRF_HEADER}")
    if connection.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise PermissionDenied("requests of other sites are refused")
