"""The SQL history as a manager has it: its copier while it leads, and answers to who asks.

Who asks needs no key-value store, but the counters of utilisation until now are the leader's: so the leader answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal, TypeVar

from sqlalchemy import Connection

from fireflyer.base.errors import Busy, NotFound, PermissionDenied
from fireflyer.cluster.core.platform.access import ADMIN, OPERATOR, is_operator
from fireflyer.cluster.core.platform.history_pages import NodePage, RunPage
from fireflyer.cluster.core.platform.reports import Span
from fireflyer.cluster.core.platform.store.retention import HistoryKeep
from fireflyer.cluster.core.platform.views import AuditPage, PastTaskAnswer, PastTaskPage, UsageReport
from fireflyer.cluster.history import pages, queries
from fireflyer.cluster.history.copier import Copier, Outbox
from fireflyer.cluster.history.database import Database
from fireflyer.cluster.history.retention import Retention
from fireflyer.cluster.history.sizes import HistorySizes
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.schema.api import UtilisationReport
from fireflyer.kvstore import Engine

__all__ = ["History"]

T = TypeVar("T")
DEFAULT_SPAN_NS = 24 * 3600 * 10**9


class _Leader:
    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def outbox(self) -> Outbox | None:
        return Outbox(*self._platform.outbox()) if self._platform.leads else None

    def copied(self, until: int) -> None:
        self._platform.copied(until)


class History:
    """`url` empty: none is kept. All answers raise `Elsewhere` where this manager does not lead, and `Busy` where the
    database does not answer."""

    def __init__(self, url: str, platform: Platform, engine: Engine, keep: HistoryKeep) -> None:
        self._platform = platform
        self._database = Database(url) if url else None
        self._copier: Copier | None = None
        self._retention: Retention | None = None
        if self._database is not None:
            leader = _Leader(platform)
            self._copier = Copier(leader, engine, self._database)
            self._retention = Retention(leader, lambda: platform.totals().at_ns, self._database, keep)

    @property
    def failing(self) -> str:
        """Why nothing is copied, or nothing removed now."""
        if self._copier is None or self._retention is None:
            return ""
        return self._copier.failing or self._retention.failing

    @property
    def sizes(self) -> HistorySizes | None:
        """At the last sweep of this manager; None: there was none."""
        return self._retention.sizes if self._retention is not None else None

    async def run(self) -> None:
        """Until it is cancelled."""
        if self._copier is None or self._retention is None or self._database is None:
            return
        copier = self._copier
        try:
            await asyncio.gather(copier.run(), self._retention.run(lambda: copier.prepared))
        finally:
            with contextlib.suppress(Exception):  # the process ends
                await asyncio.shield(self._database.close())

    async def utilisation(self, start_ns: int | None, end_ns: int | None, steps: int) -> UtilisationReport:
        """By default of the last day. Raises `UsageError`."""
        now = self._platform.totals()
        until_ns = end_ns if end_ns is not None else now.at_ns
        span = Span.of(start_ns if start_ns is not None else max(0, until_ns - DEFAULT_SPAN_NS), until_ns, steps)
        return await self._ask(lambda connection: queries.utilisation_report(connection, span, now))

    async def usage(self, start_ns: int | None, end_ns: int | None, by: Literal["user", "group"]) -> UsageReport:
        """By default of the last day. Raises `UsageError`."""
        cluster, now_ns = self._platform.outbox()[0], self._platform.totals().at_ns
        until_ns = end_ns if end_ns is not None else now_ns
        span = Span.of(start_ns if start_ns is not None else max(0, until_ns - DEFAULT_SPAN_NS), until_ns, 1)
        return await self._ask(
            lambda connection: queries.usage_report(connection, cluster, span.start_ns, span.end_ns, by, now_ns)
        )

    async def task(self, number: int) -> PastTaskAnswer:
        self._platform.require_lead()
        return await self._ask(lambda connection: queries.past_task(connection, number))

    async def tasks(
        self,
        *,
        user: str,
        outcome: str,
        name: str,
        since_ns: int | None,
        until_ns: int | None,
        after: str,
        limit: int,
    ) -> PastTaskPage:
        self._platform.require_lead()
        return await self._ask(
            lambda connection: queries.past_tasks(
                connection,
                user=user,
                outcome=outcome,
                name=name,
                since_ns=since_ns,
                until_ns=until_ns,
                after=after,
                limit=limit,
            )
        )

    async def audit(
        self,
        roles: tuple[str, ...],
        *,
        user: str,
        command: str,
        target: str,
        since_ns: int | None,
        until_ns: int | None,
        after: str,
        limit: int,
    ) -> AuditPage:
        """Raises `PermissionDenied` for who is no administrator."""
        if ADMIN not in roles:
            raise PermissionDenied(f"the audit needs the role {ADMIN}; ask an administrator")
        self._platform.require_lead()
        return await self._ask(
            lambda connection: queries.audit_page(
                connection,
                user=user,
                command=command,
                target=target,
                since_ns=since_ns,
                until_ns=until_ns,
                after=after,
                limit=limit,
            )
        )

    async def run_page(self, roles: tuple[str, ...], *, cluster: str, since: int, limit: int) -> RunPage:
        """Raises `PermissionDenied` for who is no operator, as `node_page`."""
        current = self._for_operators(roles)
        return await self._ask(
            lambda connection: pages.run_page(connection, current=current, cluster=cluster, since=since, limit=limit)
        )

    async def node_page(self, roles: tuple[str, ...], *, cluster: str, since: int, limit: int) -> NodePage:
        current = self._for_operators(roles)
        return await self._ask(
            lambda connection: pages.node_page(connection, current=current, cluster=cluster, since=since, limit=limit)
        )

    def _for_operators(self, roles: tuple[str, ...]) -> str:
        """The word of the cluster."""
        if not is_operator(roles):
            raise PermissionDenied(f"the history of all runs and nodes needs the role {OPERATOR}; ask an operator")
        return self._platform.outbox()[0]

    async def _ask(self, work: Callable[[Connection], T]) -> T:
        if self._database is None or self._copier is None:
            raise NotFound("this platform keeps no history; set `history` in the configuration of its managers")
        if not self._copier.prepared:
            raise Busy(self._copier.failing or "the history is being opened; try again in a moment")
        return await self._database.call(work)
