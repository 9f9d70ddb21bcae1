"""Routes of the history: tasks that have ended, utilisation, usage, the audit."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from litestar import get
from litestar.di import NamedDependency
from litestar.params import PathParameter, QueryParameter

from fireflyer.cluster.core.platform.history_pages import NodePage, RunPage
from fireflyer.cluster.core.platform.reports import MAX_STEPS
from fireflyer.cluster.core.platform.views import AuditPage, PastTaskAnswer, PastTaskPage, UsageReport
from fireflyer.cluster.manager.history import History
from fireflyer.cluster.manager.web.routes import Who
from fireflyer.cluster.schema.api import MAX_PAGE, UtilisationReport

__all__ = ["ROUTES"]

_Task = Annotated[int, PathParameter(ge=1, le=1 << 53)]
_Time = Annotated[int | None, QueryParameter(ge=0, le=1 << 62)]
_Steps = Annotated[int, QueryParameter(ge=1, le=MAX_STEPS)]
_Limit = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)]
_Text = Annotated[str, QueryParameter(max_length=80)]
_Change = Annotated[int, QueryParameter(ge=0, le=1 << 62)]
_After = Annotated[str, QueryParameter(max_length=120)]


@get("/utilisation")
async def utilisation(
    history: NamedDependency[History], start_ns: _Time = None, end_ns: _Time = None, steps: _Steps = 96
) -> UtilisationReport:
    """Node-seconds that were healthy, allocated and productive, in steps of equal length; by default of the last day.
    Productive time is that of runs that have ended."""
    return await history.utilisation(start_ns, end_ns, steps)


@get("/usage")
async def usage(
    history: NamedDependency[History],
    start_ns: _Time = None,
    end_ns: _Time = None,
    by: Annotated[Literal["user", "group"], QueryParameter()] = "user",
) -> UsageReport:
    """What users, or groups, had of the cluster in a span; by default in the last day."""
    return await history.usage(start_ns, end_ns, by)


@get("/history/tasks")
async def past_tasks(
    history: NamedDependency[History],
    user: _Text = "",
    outcome: Annotated[Literal["", "succeeded", "failed", "stopped"], QueryParameter()] = "",
    name: _Text = "",
    since_ns: _Time = None,
    until_ns: _Time = None,
    after: _After = "",
    limit: _Limit = 100,
) -> PastTaskPage:
    """Tasks that have ended, also those that the manager has forgotten. The one that ended last is first."""
    return await history.tasks(
        user=user, outcome=outcome, name=name, since_ns=since_ns, until_ns=until_ns, after=after, limit=limit
    )


@get("/history/tasks/{number:int}")
async def past_task(history: NamedDependency[History], number: _Task) -> PastTaskAnswer:
    """A task with its runs, and where the time of each went."""
    return await history.task(number)


@get("/history/audit")
async def audit(
    request: Who,
    history: NamedDependency[History],
    user: _Text = "",
    command: _Text = "",
    target: _Text = "",
    since_ns: _Time = None,
    until_ns: _Time = None,
    after: _After = "",
    limit: _Limit = 100,
) -> AuditPage:
    """Who changed what, the newest first. For administrators."""
    return await history.audit(
        request.user.roles, user=user, command=command, target=target, since_ns=since_ns, until_ns=until_ns,
        after=after, limit=limit,
    )  # fmt: skip


@get("/history/runs")
async def runs(
    request: Who, history: NamedDependency[History], cluster: _Text = "", since: _Change = 0, limit: _Limit = MAX_PAGE
) -> RunPage:
    """Runs of all users whose last change has this number or a later one, in the order of changes; a page may have
    fewer than `limit`. For operators."""
    return await history.run_page(request.user.roles, cluster=cluster, since=since, limit=limit)


@get("/history/nodes")
async def nodes(
    request: Who, history: NamedDependency[History], cluster: _Text = "", since: _Change = 0, limit: _Limit = MAX_PAGE
) -> NodePage:
    """What happened to nodes from a change on: faults, drains, repairs, returns. For operators."""
    return await history.node_page(request.user.roles, cluster=cluster, since=since, limit=limit)


ROUTES: list[Any] = [utilisation, usage, past_tasks, past_task, audit, runs, nodes]
