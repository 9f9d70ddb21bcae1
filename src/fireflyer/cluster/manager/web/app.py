"""The ASGI application of a manager."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from litestar import Litestar, Router
from litestar.di import Provide
from litestar.middleware import DefineMiddleware
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.static_files import create_static_files_router
from litestar.types import Message, Scope

from fireflyer.base.decoding import prepare
from fireflyer.cluster.history.audit import AuditLog
from fireflyer.cluster.manager.agents import AgentService
from fireflyer.cluster.manager.changes import Changes
from fireflyer.cluster.manager.execs import Execs
from fireflyer.cluster.manager.history import History
from fireflyer.cluster.manager.logs import Logs
from fireflyer.cluster.manager.machines import Machines
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.snapshots import Snapshots
from fireflyer.cluster.manager.users import Users
from fireflyer.cluster.manager.web import (
    entry,
    exec_routes,
    history_routes,
    identity,
    log_routes,
    routes,
    webhook_routes,
)
from fireflyer.cluster.manager.web import snapshots as snapshot_routes
from fireflyer.cluster.manager.web.authentication import Authentication
from fireflyer.cluster.manager.web.errors import HANDLERS
from fireflyer.cluster.manager.web.rates import Rates
from fireflyer.cluster.manager.web.sessions import Sessions
from fireflyer.cluster.schema.api import API

__all__ = ["RequestLimits", "make_app"]

MAX_BODY_BYTES: Final = 1 << 20
AT_ONCE: Final = 8
"""So many seconds' requests of a user may come at once."""
_PAGE: Final = os.path.join(os.path.dirname(__file__), "page")
"""Files of the web page, which are made by hand: there is nothing to build, and nothing comes from elsewhere."""
_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class RequestLimits(NamedTuple):
    of_user_per_s: int
    failed_per_minute: int
    """From one address: requests that do not prove who asks."""


def make_app(
    platform: Platform,
    machines: Machines,
    agents: AgentService,
    sessions: Sessions,
    changes: Changes,
    users: Users,
    logs: Logs,
    snapshots: Snapshots,
    history: History,
    audit: AuditLog,
    execs: Execs,
    *,
    limits: RequestLimits,
    secure: bool,
    version: str,
) -> Litestar:
    """`secure`: it is served over TLS."""
    authentication = DefineMiddleware(
        Authentication,
        sessions=sessions,
        users=Rates(limits.of_user_per_s, AT_ONCE * limits.of_user_per_s),
        strangers=Rates(limits.failed_per_minute / 60, limits.failed_per_minute),
    )
    app = Litestar(
        [
            Router(
                API,
                route_handlers=[
                    *routes.ROUTES,
                    *log_routes.ROUTES,
                    *exec_routes.ROUTES,
                    *snapshot_routes.ROUTES,
                    *history_routes.ROUTES,
                    *identity.ROUTES,
                    *entry.ROUTES,
                    *webhook_routes.ROUTES,
                ],
                middleware=[authentication],
            ),
            create_static_files_router(path="/", directories=[_PAGE], html_mode=True, include_in_schema=False),
        ],
        dependencies={
            "platform": Provide(lambda: platform, sync_to_thread=False),
            "machines": Provide(lambda: machines, sync_to_thread=False),
            "agents": Provide(lambda: agents, sync_to_thread=False),
            "sessions": Provide(lambda: sessions, sync_to_thread=False),
            "changes": Provide(lambda: changes, sync_to_thread=False),
            "known_users": Provide(lambda: users, sync_to_thread=False),
            "logs": Provide(lambda: logs, sync_to_thread=False),
            "snapshots": Provide(lambda: snapshots, sync_to_thread=False),
            "history": Provide(lambda: history, sync_to_thread=False),
            "audit": Provide(lambda: audit, sync_to_thread=False),
            "execs": Provide(lambda: execs, sync_to_thread=False),
            "secure": Provide(lambda: secure, sync_to_thread=False),
        },
        exception_handlers=HANDLERS,
        request_max_body_size=MAX_BODY_BYTES,
        before_send=[_add_headers],
        openapi_config=OpenAPIConfig(
            title="Fire-Flyer platform",
            version=version,
            path="/schema",
            render_plugins=[JsonRenderPlugin()],
            use_handler_docstrings=True,
            components=Components(security_schemes={"token": SecurityScheme(type="http", scheme="bearer")}),
            security=[{"token": []}],
        ),
        logging_config=None,
        debug=False,
        pdb_on_exception=False,
    )
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            if (
                handler.parsed_data_field is not None
            ):  # the library decodes bodies; other threads decode these types too
                prepare(handler.parsed_data_field.annotation)
    return app


async def _add_headers(message: Message, _scope: Scope) -> None:
    """To every answer, files and errors too."""
    if message["type"] == "http.response.start":
        ours = {name for name, _ in _HEADERS}
        message["headers"] = [*(pair for pair in message["headers"] if pair[0].lower() not in ours), *_HEADERS]
