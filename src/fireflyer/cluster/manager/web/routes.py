"""Routes of tasks, nodes and the cluster."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import HeaderParameter, JSONBody, PathParameter, QueryParameter

from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.core.platform.commands import Command
from fireflyer.cluster.core.platform.views import (
    ClusterView,
    LimitUse,
    NodeView,
    QuotaView,
    TaskAnswer,
    TaskPage,
    TaskReasons,
    UserView,
    Why,
)
from fireflyer.cluster.history.audit import AuditLog
from fireflyer.cluster.manager.agents import AgentService
from fireflyer.cluster.manager.machines import Machines
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.rights import OPERATORS, shown_to
from fireflyer.cluster.manager.snapshots import Snapshots
from fireflyer.cluster.manager.web.authentication import OPEN, PEOPLE
from fireflyer.cluster.manager.web.sessions import Principal
from fireflyer.cluster.schema.api import (
    MAX_PAGE,
    MAX_REASONS,
    Commanded,
    JoinTokenAnswer,
    JoinTokenRequest,
    Submission,
    Submitted,
)
from fireflyer.cluster.schema.tasks import TaskSpec

__all__ = ["ROUTES", "Who", "address_of"]

Who = Request[Principal, str, State]
_Task = Annotated[int, PathParameter(ge=1, le=1 << 53)]
_Tasks = Annotated[
    list[Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]],
    QueryParameter(min_items=1, max_items=MAX_REASONS),
]
_Key = Annotated[str, HeaderParameter(name="Idempotency-Key", min_length=1, max_length=80, pattern=r"^[!-~]+$")]
_Limit = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)]
_Before = Annotated[int | None, QueryParameter(ge=1, le=1 << 53)]
_Text = Annotated[str, QueryParameter(max_length=80)]
_Node = Annotated[str, PathParameter(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
_After = Annotated[str, QueryParameter(max_length=80)]


def address_of(request: Who) -> str:
    """Of who asks, as the audit has it; that of a proxy where one stands before the manager."""
    return request.client.host if request.client is not None else ""


@post("/tasks", status_code=201)
async def submit(
    request: Who,
    data: JSONBody[Submission],
    platform: NamedDependency[Platform],
    snapshots: NamedDependency[Snapshots],
    key: _Key,
) -> Submitted:
    """Submit tasks, or an array of them. The same key again answers with the same tasks."""
    async with snapshots.held(request.user.user, (spec.program.snapshot for spec in data.specs)):
        who = request.user
        address = address_of(request)
        return await platform.submit(who.user, who.roles, data.specs, key, who.group, address=address)


@post("/tasks/test", status_code=200)
async def test_start(request: Who, data: JSONBody[TaskSpec], platform: NamedDependency[Platform]) -> Why:
    """When the task would start if it was submitted now; nothing is submitted."""
    return platform.would_start(request.user.user, request.user.group, data)


@get("/tasks")
async def tasks(
    platform: NamedDependency[Platform],
    user: _Text = "",
    task_state: Annotated[str, QueryParameter(name="state", max_length=80)] = "",
    name: _Text = "",
    before: _Before = None,
    limit: _Limit = 100,
) -> TaskPage:
    """Tasks, newest first. `state`: a state of tasks, or `unfinished`."""
    return platform.tasks(user=user, state=task_state, name=name, before=before, limit=limit)


@get("/tasks/why")
async def why(platform: NamedDependency[Platform], task: _Tasks) -> TaskReasons:
    """Why tasks are in their state. `task`: the number of one; repeated, at most 100 times."""
    return platform.reasons(task)


@get("/tasks/{number:int}")
async def task(request: Who, platform: NamedDependency[Platform], number: _Task) -> TaskAnswer:
    """A task with all its runs, and why it is in its state."""
    return shown_to(platform.task(number), request.user.user, request.user.roles)


@post("/commands", status_code=200)
async def command(request: Who, data: JSONBody[Command], platform: NamedDependency[Platform]) -> Commanded:
    """Stop, suspend, resume or reprioritise a task; drain, resume, label, move or remove a node; set limits, shares,
    reservations and policy. `type` says which."""
    return await platform.command(request.user.user, request.user.roles, data, address=address_of(request))


@get("/nodes")
async def nodes(platform: NamedDependency[Platform], after: _After = "", limit: _Limit = MAX_PAGE) -> list[NodeView]:
    """Nodes by name, those after `after`."""
    return list(platform.nodes(after=after, limit=limit))


@get("/nodes/{name:str}")
async def node(platform: NamedDependency[Platform], name: _Node) -> NodeView:
    """One node."""
    return platform.node(name)


@get("/users")
async def users(platform: NamedDependency[Platform]) -> list[UserView]:
    """Users who have tasks, usage or a share."""
    return list(platform.users())


@get("/quota")
async def quota(request: Who, platform: NamedDependency[Platform]) -> QuotaView:
    """What limits the tasks of the user who asks, and what of it they use."""
    return platform.quota(request.user.user, request.user.group)


@get("/limits")
async def limits(platform: NamedDependency[Platform]) -> list[LimitUse]:
    """All limits, and what is used of each."""
    return list(platform.limits())


@get("/cluster")
async def cluster(platform: NamedDependency[Platform]) -> ClusterView:
    """Counts of nodes and tasks, utilisation, goodput, and what the site has set."""
    return platform.cluster()


@post("/machines/{name:str}/token", status_code=201, opt={PEOPLE: True})
async def join_token(
    request: Who,
    name: _Node,
    data: JSONBody[JoinTokenRequest],
    machines: NamedDependency[Machines],
    agents: NamedDependency[AgentService],
    audit: NamedDependency[AuditLog],
) -> JoinTokenAnswer:
    """A token with which the machine `name` joins, once; others of it are not valid any more. For operators."""
    _require_operator(request.user)
    now_s = int(time.time())
    async with audit.entry(request.user.user, "IssueJoinToken", name, address=address_of(request)):
        token = await machines.issue(name, now_s, data.lifetime_s)
    return JoinTokenAnswer(token, now_s + data.lifetime_s, agents.managers)


@delete("/machines/{name:str}", status_code=200, opt={PEOPLE: True})
async def revoke(
    request: Who, name: _Node, machines: NamedDependency[Machines], audit: NamedDependency[AuditLog]
) -> Commanded:
    """Take the credential of a machine back: its agent is let in no more. For operators."""
    _require_operator(request.user)
    async with audit.entry(request.user.user, "RevokeMachine", name, address=address_of(request)):
        await machines.revoke(name)
    return Commanded(f"the credential of {name} is revoked; remove the node when its runs have ended")


def _require_operator(principal: Principal) -> None:
    if not any(role in OPERATORS for role in principal.roles):
        raise PermissionDenied(f"only operators may do this, and {principal.user} is none")


@get("/health", opt={OPEN: True})
async def health(platform: NamedDependency[Platform]) -> Response[dict[str, str]]:
    """200 from the manager that leads, 503 from the others: for load balancers."""
    state = "leads" if platform.leads else "follows"
    return Response({"state": state}, status_code=200 if platform.leads else 503)


ROUTES: list[Any] = [
    submit,
    test_start,
    tasks,
    why,
    task,
    command,
    nodes,
    node,
    users,
    quota,
    limits,
    cluster,
    join_token,
    revoke,
    health,
]
