"""The HTTP API of a manager process: who may ask for what, what errors look like, changes as they happen."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from tests.support.patience import allowed_s
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

from fireflyer.base.errors import NotFound, PermissionDenied, Unreachable, UsageError
from fireflyer.cluster.client import Client, Connection
from fireflyer.cluster.core.platform.commands import DrainNode, StopTask
from fireflyer.cluster.manager.web.app import RequestLimits, make_app
from fireflyer.cluster.schema.api import MAX_REASONS
from fireflyer.cluster.schema.execs import ExecProgram, ExecRequest
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, Program, TaskSpec, TaskState

pytestmark = pytest.mark.processes

API: Final = "/api/v1"
SPEC: Final = {"name": "train", "program": {"script": "train.py", "env": {"KEY": "secret"}}}
HOOK: Final = "https://hooks.invalid/a"


class Rights(NamedTuple):
    """What a route answers to each who asks about what is ada's. Braces in `path` and `body` are filled in."""

    method: str
    path: str
    body: Any
    stranger: int
    user: int
    """bob, who has no role."""
    run: int
    """A process of a run of ada."""
    operator: int
    """orla, who is no administrator."""


MATRIX: Final = [
    Rights("POST", "/tasks", {"specs": [SPEC]}, 401, 201, 201, 201),
    Rights("POST", "/tasks/test", SPEC, 401, 200, 200, 200),
    Rights("GET", "/tasks", None, 401, 200, 200, 200),
    Rights("GET", "/tasks/{task}", None, 401, 200, 200, 200),
    Rights("GET", "/tasks/why?task={task}", None, 401, 200, 200, 200),
    Rights("GET", "/tasks/{task}/logs", None, 401, 403, 200, 200),
    Rights("GET", "/tasks/{task}/logs/search?text=x", None, 401, 403, 200, 200),
    Rights("GET", "/tasks/{task}/logs/events", None, 401, 403, 200, 200),
    Rights("GET", "/tasks/{task}/logs/0/launcher", None, 401, 403, 404, 404),
    Rights("POST", "/tasks/{task}/exec", {"program": {"argv": ["true"]}}, 401, 403, 201, 403),
    Rights("WEBSOCKET", "/execs/{session_of_run}", None, 403, 403, 101, 403),
    Rights("WEBSOCKET", "/execs/{session_of_ada}", None, 403, 403, 403, 403),
    Rights("POST", "/commands", {"type": "SetPriority", "task": "{task}", "priority": 5}, 401, 403, 200, 200),
    Rights("POST", "/commands", {"type": "LabelNode", "node": "gpu-1", "labels": ["a"]}, 401, 403, 403, 200),
    Rights("POST", "/commands", {"type": "SetShare", "user": "ada", "nodes": 9.0}, 401, 403, 403, 403),
    Rights("POST", "/snapshots/{hash}", b"", 401, 400, 400, 400),
    Rights("PUT", "/snapshots/{hash}/blobs", b"", 401, 404, 404, 404),
    Rights("POST", "/snapshots/{hash}/seal", None, 401, 404, 404, 404),
    Rights("GET", "/nodes", None, 401, 200, 200, 200),
    Rights("GET", "/nodes/gpu-1", None, 401, 200, 200, 200),
    Rights("GET", "/users", None, 401, 200, 200, 200),
    Rights("GET", "/quota", None, 401, 200, 200, 200),
    Rights("GET", "/limits", None, 401, 200, 200, 200),
    Rights("GET", "/cluster", None, 401, 200, 200, 200),
    Rights("POST", "/machines/gpu-7/token", {}, 401, 403, 403, 201),
    Rights("DELETE", "/machines/gpu-7", None, 401, 403, 403, 200),
    Rights("GET", "/identity/users", None, 401, 403, 403, 200),
    Rights("POST", "/identity/users", {"name": "eve"}, 401, 403, 403, 201),
    Rights("POST", "/identity/users", {"name": "mal", "roles": ["platform:operator"]}, 401, 403, 403, 403),
    Rights("PUT", "/identity/users/eve/roles/platform:admin", None, 401, 403, 403, 403),
    Rights("DELETE", "/identity/users/admin/roles/platform:admin", None, 401, 403, 403, 403),
    Rights("GET", "/identity/users/ada/tokens", None, 401, 403, 403, 200),
    Rights("POST", "/identity/users/ada/tokens", {}, 401, 403, 403, 201),
    Rights("POST", "/identity/users/admin/tokens", {}, 401, 403, 403, 403),
    Rights("DELETE", "/identity/users/ada/tokens/{token_id}", None, 401, 403, 403, 200),
    Rights("DELETE", "/identity/users/admin", None, 401, 403, 403, 403),
    Rights("DELETE", "/identity/users/eve", None, 401, 403, 403, 200),
    Rights("GET", "/webhooks", None, 401, 200, 403, 200),
    Rights("GET", "/webhooks?all=true", None, 401, 403, 403, 200),
    Rights("POST", "/webhooks", {"url": HOOK, "events": ["task.suspended"]}, 401, 201, 403, 201),
    Rights("POST", "/webhooks/{webhook}/test", None, 401, 404, 403, 200),
    Rights("DELETE", "/webhooks/{webhook}", None, 401, 404, 403, 200),
    Rights("GET", "/utilisation", None, 401, 200, 200, 200),
    Rights("GET", "/usage", None, 401, 200, 200, 200),
    Rights("GET", "/history/tasks", None, 401, 200, 200, 200),
    Rights("GET", "/history/tasks/{task}", None, 401, 200, 200, 200),
    Rights("GET", "/history/audit", None, 401, 403, 403, 403),
    Rights("GET", "/history/runs", None, 401, 403, 403, 200),
    Rights("GET", "/history/nodes", None, 401, 403, 403, 200),
    Rights("GET", "/health", None, 200, 200, 200, 200),
    Rights("POST", "/session", {"token": "{token}"}, 401, 201, 401, 201),
    Rights("GET", "/session", None, 401, 200, 200, 200),
    Rights("DELETE", "/session", None, 401, 204, 204, 204),
    Rights("GET", "/events", None, 401, 200, 200, 200),
]
"""Every route; one whose answer depends on what is asked is there several times."""
STRANGERS: Final[tuple[dict[str, str], ...]] = (
    {},
    {"Authorization": "Bearer fft1.0123456789abcdef.false"},
    {"Cookie": "ff_session=AAAA"},
)
UPGRADE: Final = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version": "13",
}


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with ManagerProcess(tmp_path_factory.mktemp("api") / "manager") as running:
        wait_for(lambda: running.ask("GET", f"{API}/health").status == 200, "it leads")
        wait_for(lambda: running.ask("GET", f"{API}/usage", user="admin").status == 200, "the history is open")
        yield running


@pytest.fixture(scope="module")
def agent(manager: ManagerProcess) -> Iterator[ScriptedAgent]:
    with ScriptedAgent(manager, "gpu-1") as joined, manager.client("admin") as admin:
        joined.appear(admin)
        yield joined


def spec(name: str, **fields: Any) -> TaskSpec:
    return TaskSpec(name=name, program=Program(script="train.py", workdir="/", env={"KEY": "secret"}), **fields)


def documented() -> list[tuple[str, str]]:
    """Method and path of every route of the API."""
    app = make_app(*[None] * 11, limits=RequestLimits(1, 1), secure=False, version="")  # type: ignore[arg-type]
    return [
        (method, route.path_format.removeprefix(API))
        for route in app.routes
        if route.path.startswith(API)
        for method in (getattr(route, "methods", None) or ("WEBSOCKET",))
        if method != "OPTIONS"
    ]


def route_of(row: Rights, routes: list[tuple[str, str]]) -> tuple[str, str]:
    """Which a request meets: one with fewer parameters comes first."""
    asked = row.path.partition("?")[0]
    fits = [
        (method, path)
        for method, path in routes
        if method == row.method and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), asked)
    ]
    assert fits, f"{row.method} {row.path} is no route"
    return min(fits, key=lambda route: route[1].count("{"))


def test_every_route_is_in_the_matrix() -> None:
    routes = documented()
    named = {route_of(row, routes) for row in MATRIX}
    assert named == set(routes), "write a row for each of these"


def filled(value: Any, objects: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: filled(one, objects) for key, one in value.items()}
    if not isinstance(value, str) or "{" not in value:
        return value
    return objects[value[1:-1]] if value[1:-1] in objects else value.format_map(objects)


def status_of(manager: ManagerProcess, row: Rights, objects: dict[str, Any], headers: dict[str, str]) -> int:
    """Of the answer, which is not read: some do not end."""
    connection = http.client.HTTPConnection(manager.url.partition("://")[2], timeout=allowed_s(30))
    method, more = ("GET", UPGRADE) if row.method == "WEBSOCKET" else (row.method, {"Content-Type": "application/json"})
    body = filled(row.body, objects)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with contextlib.closing(connection):
        key = {"Idempotency-Key": secrets.token_hex(8)}
        connection.request(method, API + filled(row.path, objects), data, {**more, **key, **headers})
        return connection.getresponse().status


def test_who_may_ask_what(manager: ManagerProcess, agent: ScriptedAgent) -> None:
    with manager.client("admin") as admin, manager.client("ada") as ada, contextlib.ExitStack() as stack:
        admin.create_user("orla", roles=("platform:operator",))
        tokens = {"user": manager.tokens["bob"], "operator": admin.issue_token("orla").token}
        (task,) = ada.submit(spec("rights"), key="rights")
        wait_for(lambda: any(run.launch and run.launch.task == task for run in agent.sync().runs), "it is to start")
        tokens["run"] = agent.run_token(task)
        agent.follow_starts()
        agent.sync()
        objects: dict[str, Any] = {"task": task, "hash": "0" * 64}
        objects["token_id"] = ada.issue_token("ada").token.split(".")[1]
        objects["webhook"] = ada.add_webhook(HOOK, events=("task.suspended",)).id
        process = stack.enter_context(Client(Connection(url=manager.url, token=tokens["run"])))
        true = ExecRequest(program=ExecProgram(argv=("true",)))

        wrong = []
        for row in MATRIX:
            for who in ("stranger", "user", "run", "operator"):
                if row.method == "WEBSOCKET":  # each session is for one connection
                    objects["session_of_run"] = process.ask_exec(task, true).id
                    objects["session_of_ada"] = ada.ask_exec(task, true).id
                objects["token"] = tokens.get(who, "fft1.none.none")
                asking = ({"Authorization": f"Bearer {tokens[who]}"},) if who in tokens else STRANGERS
                for headers in asking:
                    status = status_of(manager, row, objects, headers)
                    if status != getattr(row, who):
                        wrong.append(f"{row.method} {row.path} {row.body}: {who} got {status}")
        assert not wrong, "\n".join(wrong)

        for one in admin.tasks(state="unfinished").tasks:
            admin.command(StopTask(one.id))
        while admin.tasks(state="unfinished").tasks:
            agent.sync()
            agent.follow()
        admin.remove_user("orla")


def test_a_task_from_its_submission_to_its_end(manager: ManagerProcess, agent: ScriptedAgent) -> None:
    with manager.client("ada") as ada:
        (task,) = ada.submit(spec("whole"), key="whole")
        assert ada.submit(spec("whole"), key="whole") == (task,), "the same key makes no second task"
        while ada.task(task).task.state is not FINISHED:
            agent.sync()
            agent.follow()
        answer = ada.task(task)
        assert answer.task.outcome is Outcome.SUCCEEDED
        assert answer.task.ended_ns is not None
        assert answer.task.account.total_ns == answer.task.ended_ns - answer.task.submitted_ns
        assert [node.state for node in ada.nodes() if node.name == "gpu-1"] == ["idle"]
        assert task in [one.id for one in ada.tasks(state="finished").tasks]


def test_operators_manage_users_without_roles_and_administrators_all(manager: ManagerProcess) -> None:
    with manager.client("admin") as admin:
        admin.create_user("opal", roles=("platform:operator",))
        token = admin.issue_token("opal").token
        with Client(Connection(url=manager.url, token=token)) as opal:
            assert opal.create_user("eve").roles == ()
            assert opal.issue_token("eve", lifetime_s=60).expires_s is not None
            for refused in (
                lambda: opal.create_user("mallory", roles=("platform:operator",)),
                lambda: opal.grant_role("eve", "platform:admin"),
                lambda: opal.grant_role("opal", "platform:admin"),
                lambda: opal.issue_token("admin"),
                lambda: opal.tokens("admin"),
                lambda: opal.remove_user("admin"),
            ):
                with pytest.raises(PermissionDenied):
                    refused()
            assert opal.remove_user("eve")
        assert "mallory" not in [user.name for user in admin.known_users()]
        assert admin.revoke_role("opal", "platform:operator")
        with Client(Connection(url=manager.url, token=token)) as opal, pytest.raises(PermissionDenied):
            opal.create_user("eve")
        admin.remove_user("opal")
        for mistake in (lambda: admin.remove_user("admin"), lambda: admin.create_user("1st")):
            with pytest.raises(UsageError):
                mistake()


def test_a_user_has_their_own_tokens_and_one_that_is_revoked_ends_requests_and_the_stream(
    manager: ManagerProcess,
) -> None:
    with manager.client("ada") as ada:
        other = ada.issue_token("ada", label="laptop").token
        assert [token.label for token in ada.tokens("ada")][-1] == "laptop"
        with pytest.raises(PermissionDenied):
            ada.tokens("bob")
        with pytest.raises(PermissionDenied):
            ada.tokens("nobody-of-that-name")
        laptop = Client(Connection(url=manager.url, token=other))
        assert laptop.whoami().user == "ada"
        changes = laptop.changes()
        assert next(changes) is None
        assert ada.revoke_token("ada", ada.tokens("ada")[-1].id)
        began_s = time.monotonic()
        with pytest.raises(Unreachable):
            list(changes)
        assert time.monotonic() - began_s < allowed_s(10)
        with pytest.raises(PermissionDenied):
            laptop.whoami()
        laptop.close()
        with pytest.raises(NotFound):
            ada.revoke_token("ada", "0f")


def test_what_waits_says_why(manager: ManagerProcess, agent: ScriptedAgent) -> None:
    assert agent.orders.term > 0
    with manager.client("ada") as ada:
        (task,) = ada.submit(spec("huge", least_nodes=8, most_nodes=8), key="huge")
        answer = ada.task(task)
        assert answer.task.state is TaskState.QUEUED
        assert "8 nodes" in answer.why.text
        assert ada.command(StopTask(task))
        assert ada.task(task).task.outcome is Outcome.STOPPED


def test_many_tasks_are_asked_at_once_why_they_wait_and_each_is_told_what_it_is_told_alone(
    manager: ManagerProcess, agent: ScriptedAgent
) -> None:
    assert agent.orders.term > 0
    with manager.client("ada") as ada, manager.client("bob") as bob:
        tasks = ada.submit(spec("large", array=2, least_nodes=8, most_nodes=8), key="large")
        for client in (ada, bob):  # whose a task is makes no difference, as for one task
            assert client.reasons([*tasks, 99999, tasks[0]]) == {task: client.task(task).why for task in tasks}
        answered = manager.ask("GET", f"{API}/tasks/why?task=99999&task={tasks[1]}", user="bob")
        assert [(one["task"], one["why"] is None) for one in answered.body["reasons"]] == [
            (99999, True),
            (tasks[1], False),
        ]
        for task in tasks:
            ada.command(StopTask(task))
        assert "stopped" in bob.reasons(tasks)[tasks[0]].text
        many = range(1, 2 * MAX_REASONS + 2)
        assert set(tasks) <= set(ada.reasons(many)) <= set(many), "in several requests"


def test_environment_variables_are_shown_to_their_user_alone(manager: ManagerProcess) -> None:
    with manager.client("ada") as ada, manager.client("bob") as bob, manager.client("admin") as admin:
        (task,) = ada.submit(spec("hidden", least_nodes=8, most_nodes=8), key="hidden")
        shown = [client.task(task).task.spec for client in (ada, bob, admin)]
        assert [one.program.env["KEY"] for one in shown if one] == ["secret", "(hidden)", "secret"]
        with pytest.raises(PermissionDenied):
            bob.command(StopTask(task))
        ada.command(StopTask(task))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word"),
    [
        ("GET", "/tasks/99999", None, 404, "99999"),
        ("GET", "/tasks/none", None, 404, "Not Found"),
        ("GET", "/nodes/none", None, 404, "none"),
        ("GET", "/tasks/why", None, 400, "task"),
        ("GET", "/tasks/why?task=0", None, 400, "task"),
        ("GET", "/tasks/why?task=none", None, 400, "task"),
        ("GET", f"/tasks/why?{'&task=1' * (MAX_REASONS + 1)}", None, 400, f"{MAX_REASONS}"),
        ("GET", "/tasks?limit=0", None, 400, "limit"),
        ("GET", "/tasks?state=asleep", None, 400, "states are"),
        ("POST", "/tasks", b"{", 400, "truncated"),
        ("POST", "/tasks", {"specs": []}, 400, "length"),
        ("POST", "/tasks", {"specs": [{"name": "<script>", "program": {"script": "x"}}]}, 400, "name"),
        ("POST", "/tasks", {"specs": [{**SPEC, "least_nodes": 4}]}, 400, "4:1"),
        ("POST", "/commands", {"type": "Explode"}, 400, "Explode"),
        ("PUT", "/tasks", None, 405, ""),
        ("GET", "/nowhere", None, 404, ""),
    ],
)
def test_errors_are_one_line_of_json(
    manager: ManagerProcess, method: str, path: str, body: Any, status: int, word: str
) -> None:
    answered = manager.ask(method, API + path, user="ada", body=body, headers={"Idempotency-Key": "x"})
    assert answered.status == status, answered
    assert word in answered.body["message"]
    assert "\n" not in answered.body["message"]
    assert answered.body["code"]


def test_bodies_are_bounded(manager: ManagerProcess) -> None:
    """Said before it is read: whoever goes on sending finds the connection closed."""
    connection = http.client.HTTPConnection(manager.url.partition("://")[2], timeout=allowed_s(30))
    with contextlib.closing(connection):
        connection.putrequest("POST", f"{API}/tasks")
        headers = {"Authorization": f"Bearer {manager.tokens['ada']}", "Content-Length": str(2 << 20)}
        for name, value in {**headers, "Content-Type": "application/json", "Idempotency-Key": "x"}.items():
            connection.putheader(name, value)
        connection.endheaders(b" " * 1000)
        assert connection.getresponse().status == 413


def test_who_proves_nothing_may_not_ask_for_ever(tmp_path: Path) -> None:
    with ManagerProcess(tmp_path / "manager", failed_logins_per_minute=3) as manager:
        statuses = [manager.ask("GET", f"{API}/tasks").status for _ in range(5)]
        assert statuses[:3] == [401] * 3
        refused = manager.ask("GET", f"{API}/tasks")
        assert (refused.status, refused.body["code"]) == (429, "too_often")
        assert int(refused.headers["retry-after"]) >= 1
        assert manager.ask("GET", f"{API}/session", user="ada").status == 200, "who has a token is not kept out"


def test_every_answer_carries_the_headers_that_protect_a_browser(manager: ManagerProcess) -> None:
    for path in ("/", "/app.js", f"{API}/health", f"{API}/nowhere", "/schema/openapi.json"):
        headers = manager.ask("GET", path).headers
        assert "default-src 'self'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"


def test_a_session_needs_its_csrf_value_to_change_something(manager: ManagerProcess) -> None:
    begun = manager.ask("POST", f"{API}/session", body={"token": manager.tokens["ada"]})
    assert begun.status == 201
    cookie = begun.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    sent = {"Cookie": cookie.split(";")[0]}
    assert manager.ask("GET", f"{API}/session", headers=sent).body["user"] == "ada"
    stop = {"type": "StopTask", "task": 99999}
    refused = manager.ask("POST", f"{API}/commands", body=stop, headers=sent)
    assert (refused.status, refused.body["code"]) == (403, "permission_denied")
    right = {**sent, "X-FF-CSRF": begun.body["csrf"]}
    assert manager.ask("POST", f"{API}/commands", body=stop, headers=right).status == 404
    other = {**right, "Sec-Fetch-Site": "cross-site"}
    assert manager.ask("POST", f"{API}/commands", body=stop, headers=other).status == 403


def test_a_revoked_token_is_out_at_once_and_so_are_its_sessions(manager: ManagerProcess) -> None:
    token = manager.users.issue("bob", 0)
    headers = {"Authorization": f"Bearer {token}"}
    begun = manager.ask("POST", f"{API}/session", body={"token": token})
    sent = {"Cookie": begun.headers["set-cookie"].split(";")[0]}
    assert manager.ask("GET", f"{API}/session", headers=headers).status == 200
    manager.users.revoke(token.split(".")[1])
    assert manager.ask("GET", f"{API}/session", headers=headers).status == 401
    assert manager.ask("GET", f"{API}/session", headers=sent).status == 401


def test_changes_are_told_as_they_happen_and_none_is_missed(manager: ManagerProcess, agent: ScriptedAgent) -> None:
    assert agent.orders.term > 0
    with manager.client("ada") as ada, manager.client("ada") as asking:
        before = asking.cluster().changes
        (task,) = asking.submit(spec("watched", least_nodes=8, most_nodes=8), key="watched")
        asking.command(StopTask(task))
        heard: list[tuple[int, str]] = []
        for change in ada.changes(before):
            if change is not None and change.what == "task" and change.name == str(task):
                heard.append((change.number, change.state))
            if heard and heard[-1][1] == "finished":
                break
        assert [state for _, state in heard] == ["queued", "finished"]
        assert [number for number, _ in heard] == sorted({number for number, _ in heard})


def test_an_array_is_one_submission(manager: ManagerProcess) -> None:
    with manager.client("ada") as ada:
        tasks = ada.submit(spec("sweep", array=50, least_nodes=8, most_nodes=8), key="sweep")
        assert tasks == tuple(range(tasks[0], tasks[0] + 50))
        assert [ada.task(task).task.array_index for task in tasks[:3]] == [0, 1, 2]
        for task in tasks:
            ada.command(StopTask(task))


def test_a_key_for_something_else_is_refused(manager: ManagerProcess) -> None:
    with manager.client("ada") as ada:
        (task,) = ada.submit(spec("one", least_nodes=8, most_nodes=8), key="twice")
        with pytest.raises((UsageError, PermissionDenied)):
            ada.submit(spec("other", least_nodes=8, most_nodes=8), key="twice")
        ada.command(StopTask(task))


def test_a_machine_without_credential_is_not_heard(manager: ManagerProcess) -> None:
    with ScriptedAgent(manager, "gpu-9") as joined, manager.client("admin") as admin:
        joined.appear(admin)
        admin.command(DrainNode("gpu-9", "it has no agent"))  # else tasks of other tests would wait on it
        admin.revoke_machine("gpu-9")
        with pytest.raises(PermissionDenied):
            joined.sync()
        with pytest.raises(NotFound):
            admin.revoke_machine("gpu-9")


def test_the_openapi_document_describes_all_routes(manager: ManagerProcess) -> None:
    with urllib.request.urlopen(f"{manager.url}/schema/openapi.json", timeout=allowed_s(30)) as response:
        document = json.load(response)
    paths = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert {(method, API + path) for method, path in documented() if method != "WEBSOCKET"} == paths


@pytest.mark.slow  # test_webhooks and test_run_tokens kill theirs in every run
def test_a_manager_that_was_killed_has_lost_nothing(tmp_path: Path) -> None:
    manager = ManagerProcess(tmp_path / "manager", lease_ms=2000)
    with manager:
        wait_for(lambda: manager.ask("GET", f"{API}/health").status == 200, "it leads")
        with manager.client("ada") as ada:
            (task,) = ada.submit(spec("kept", least_nodes=2, most_nodes=2), key="kept")
        manager.end(signal.SIGKILL)
        manager.start()
        wait_for(lambda: manager.ask("GET", f"{API}/health").status == 200, "it leads again")
        with manager.client("ada") as ada:
            assert ada.task(task).task.state is TaskState.QUEUED
            assert ada.submit(spec("kept", least_nodes=2, most_nodes=2), key="kept") == (task,)
