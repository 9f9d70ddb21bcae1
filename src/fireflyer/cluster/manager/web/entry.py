"""Routes of sessions, and the stream of changes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import Response, delete, get, post
from litestar.datastructures import Cookie
from litestar.di import NamedDependency
from litestar.params import HeaderParameter, JSONBody
from litestar.response import ServerSentEvent, ServerSentEventMessage

from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.manager.changes import Changes
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.web.authentication import OPEN
from fireflyer.cluster.manager.web.errors import Unauthenticated
from fireflyer.cluster.manager.web.routes import Who
from fireflyer.cluster.manager.web.sessions import COOKIE, SESSION_S, Principal, Sessions
from fireflyer.cluster.manager.web.streams import while_valid
from fireflyer.cluster.schema.api import Change, Identity, Login

__all__ = ["ROUTES"]

_Heard = Annotated[int | None, HeaderParameter(name="last-event-id", ge=0, le=1 << 62)]


@post("/session", status_code=201, opt={OPEN: True})
async def log_in(
    data: JSONBody[Login], sessions: NamedDependency[Sessions], secure: NamedDependency[bool]
) -> Response[Identity]:
    """Begin a session of a browser with a token. The answer's cookie cannot be read by scripts."""
    try:
        principal, cookie = await sessions.begin(data.token, int(time.time()))
    except PermissionDenied as error:
        raise Unauthenticated(error.message) from None
    kept = Cookie(
        key=COOKIE, value=cookie, path="/", httponly=True, samesite="strict", secure=secure, max_age=SESSION_S
    )
    return Response(_view(principal), cookies=[kept], status_code=201)


@get("/session")
async def session(request: Who) -> Identity:
    """The session of the cookie, or of the bearer token."""
    return _view(request.user)


@delete("/session", status_code=204)
async def log_out(secure: NamedDependency[bool]) -> Response[None]:
    """End the session in this browser. To end all sessions of a token, revoke it."""
    gone = Cookie(key=COOKIE, value="", path="/", httponly=True, samesite="strict", secure=secure, max_age=0)
    return Response(None, cookies=[gone], status_code=204)


@get("/events")
async def events(
    request: Who,
    platform: NamedDependency[Platform],
    changes: NamedDependency[Changes],
    sessions: NamedDependency[Sessions],
    heard: _Heard = None,
) -> ServerSentEvent:
    """Server-sent events: one for each change of a task or node, from now on, or after `last-event-id`. They end when
    the token that asked is revoked or expires."""
    platform.require_lead()
    return ServerSentEvent(_messages(while_valid(changes.follow(heard), sessions, request.user)))


async def _messages(events: AsyncIterator[Change | None]) -> AsyncIterator[ServerSentEventMessage]:
    yield ServerSentEventMessage(data=None, comment="fireflyer")
    async for change in events:
        if change is None:
            yield ServerSentEventMessage(data=None, comment="nothing changed")
        else:
            yield ServerSentEventMessage(id=change.number, data=msgspec.json.encode(change).decode())


def _view(principal: Principal) -> Identity:
    task, run = principal.run if principal.run is not None else (None, None)
    return Identity(principal.user, principal.roles, principal.csrf, principal.expires_s, task, run)


ROUTES: list[Any] = [log_in, session, log_out, events]
