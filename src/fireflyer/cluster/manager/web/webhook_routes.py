"""Routes of webhooks: for people, since they outlive a run."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody, PathParameter, QueryParameter

from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.core.platform.access import is_operator
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.web.authentication import PEOPLE
from fireflyer.cluster.manager.web.routes import Who
from fireflyer.cluster.schema.api import Commanded
from fireflyer.cluster.schema.webhooks import NewWebhook, ShownWebhook, WebhookView

__all__ = ["ROUTES"]

_Number = Annotated[int, PathParameter(ge=1, le=1 << 53)]


@get("/webhooks", opt={PEOPLE: True})
async def webhooks(
    request: Who, platform: NamedDependency[Platform], everybody: Annotated[bool, QueryParameter(name="all")] = False
) -> list[WebhookView]:
    """Your webhooks, and how their deliveries go. `all`: those of all users, for operators."""
    if everybody and not is_operator(request.user.roles):
        raise PermissionDenied("webhooks of all users are for operators")
    return list(platform.webhooks("" if everybody else request.user.user))


@post("/webhooks", status_code=201, opt={PEOPLE: True})
async def add(request: Who, data: JSONBody[NewWebhook], platform: NamedDependency[Platform]) -> ShownWebhook:
    """Be told of events by POST to a URL. The answer has the secret that signs them, shown this once."""
    return await platform.add_webhook(request.user.user, request.user.roles, data)


@delete("/webhooks/{number:int}", status_code=200, opt={PEOPLE: True})
async def remove(request: Who, number: _Number, platform: NamedDependency[Platform]) -> Commanded:
    """Remove a webhook, with what it had not been told."""
    return await platform.remove_webhook(request.user.user, request.user.roles, number)


@post("/webhooks/{number:int}/test", status_code=200, opt={PEOPLE: True})
async def test(request: Who, number: _Number, platform: NamedDependency[Platform]) -> Commanded:
    """Send an event of type `test`."""
    return await platform.test_webhook(request.user.user, request.user.roles, number)


ROUTES: list[Any] = [webhooks, add, remove, test]
