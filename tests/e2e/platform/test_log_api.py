"""Logs through a manager process: what it takes from nodes, and who may read what."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Final

import pytest
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

from fireflyer.base.errors import NotFound, PermissionDenied
from fireflyer.base.units import MIB
from fireflyer.cluster.core.platform.commands import StopTask
from fireflyer.cluster.schema.logs import LogChunk, LogEnd, LogEvent, LogsEnded, LogText
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, Program, TaskSpec

pytestmark = pytest.mark.processes

API: Final = "/api/v1"
RANK_0: Final = "attempt-0-rank-0"
ROUTES: Final = ("", "/search?text=x", "/search?text=x&run=0", "/events?wait=false", f"/0/{RANK_0}")


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with ManagerProcess(tmp_path_factory.mktemp("logs") / "manager", logs_of_run_mib=1) as running:
        wait_for(lambda: running.ask("GET", f"{API}/health").status == 200, "it leads")
        yield running


@pytest.fixture(scope="module")
def agent(manager: ManagerProcess) -> Iterator[ScriptedAgent]:
    with ScriptedAgent(manager, "gpu-1") as joined:
        joined.sync()
        yield joined


@pytest.fixture
def run(manager: ManagerProcess, agent: ScriptedAgent) -> Iterator[tuple[int, str]]:
    """A task that runs on the agent's node, and the token of its run."""
    with manager.client("ada") as ada:
        program = Program(script="train.py", workdir="/")
        (task,) = ada.submit(TaskSpec(name="train", program=program), key=secrets.token_hex(8))
        while not agent.runs:
            agent.sync()
            agent.follow_starts()
        yield task, next(iter(agent.runs))
        if ada.task(task).task.state is not FINISHED:
            ada.command(StopTask(task))
        while agent.runs or ada.task(task).task.state is not FINISHED:
            agent.sync()
            agent.follow()


def test_what_a_node_sends_is_read_by_the_tasks_user_and_operators_alone(
    manager: ManagerProcess, agent: ScriptedAgent, run: tuple[int, str]
) -> None:
    task, token = run
    answer = agent.append_log(task, 0, token, LogChunk(RANK_0, 0, b"hello\nx is 3\n"))
    assert (answer.end, answer.durable) == (13, 0)
    for user, status in (("ada", 200), ("admin", 200), ("bob", 403)):
        for route in ROUTES:
            answered = manager.ask("GET", f"{API}/tasks/{task}/logs{route}", user=user)
            assert answered.status == status, (user, route, answered)
    with manager.client("ada") as ada:
        ((run_logs,), (stream,)) = (ada.task_logs(task).runs, ada.task_logs(task).runs[0].streams)
        assert (run_logs.run, stream.name, stream.rank, stream.end, stream.closed) == (0, RANK_0, 0, 13, False)
        assert ada.log_piece(task, 0, RANK_0, offset=6).data == b"x is 3\n"
        assert [found.line for found in ada.search_logs(task, "X IS")] == ["x is 3"]
        *texts, end = ada.logs(task)
        assert [text.text for text in texts if isinstance(text, LogText)] == ["hello\nx is 3\n"]
        assert isinstance(end, LogsEnded)
        assert end.outcome is None


def test_only_the_node_of_the_launcher_may_send(
    manager: ManagerProcess, agent: ScriptedAgent, run: tuple[int, str]
) -> None:
    task, token = run
    with ScriptedAgent(manager, "gpu-2") as other, pytest.raises(NotFound, match="no launcher on gpu-2"):
        other.append_log(task, 0, token, LogChunk(RANK_0, 0, b"forged\n"))
    for wrong in ((task, 1, token), (task + 1, 0, token), (task, 0, "0" * 32)):
        with pytest.raises(NotFound):
            agent.append_log(*wrong, LogChunk(RANK_0, 0, b"forged\n"))
    with manager.client("admin") as admin:
        assert admin.task_logs(task).runs == ()


def test_logs_over_the_quota_of_their_run_are_cut_and_say_so(
    manager: ManagerProcess, agent: ScriptedAgent, run: tuple[int, str]
) -> None:
    task, token = run
    line = b"y" * 65_535 + b"\n"
    for offset in range(0, MIB, len(line)):
        assert not agent.append_log(task, 0, token, LogChunk(RANK_0, offset, line)).cut
    assert agent.append_log(task, 0, token, LogChunk(RANK_0, MIB, b"more\n")).cut
    with manager.client("ada") as ada:
        ((stream,),) = (one.streams for one in ada.task_logs(task).runs)
        assert (stream.end, stream.cut) == (MIB, True)


def test_who_follows_hears_the_last_line_and_how_the_task_ended(
    manager: ManagerProcess, agent: ScriptedAgent, run: tuple[int, str]
) -> None:
    """The task has finished before its node has sent the end of its logs."""
    task, token = run
    agent.append_log(task, 0, token, LogChunk(RANK_0, 0, b"begin\n"))
    with manager.client("ada") as ada, manager.client("ada") as asking:
        events = ada.logs(task, follow=True)
        heard: list[LogEvent] = []
        while not any(isinstance(event, LogText) for event in heard):
            heard.append(next(events))
        while asking.task(task).task.state is not FINISHED:
            agent.sync()
            agent.follow()
        agent.append_log(task, 0, token, LogChunk(RANK_0, 6, b"end"))
        agent.end_log(task, 0, token, LogEnd(RANK_0, 9))
        agent.append_log(task, 0, token, LogChunk("launcher", 0))
        agent.end_log(task, 0, token, LogEnd("launcher", 0))
        heard += events
    assert "".join(event.text for event in heard if isinstance(event, LogText)) == "begin\nend"
    end = heard[-1]
    assert isinstance(end, LogsEnded)
    assert (end.outcome, end.exit_code, end.complete) == (Outcome.SUCCEEDED, 0, True)


def test_a_node_whose_credential_is_revoked_sends_nothing_more(manager: ManagerProcess) -> None:
    with ScriptedAgent(manager, "gpu-3") as leaving, manager.client("admin") as admin:
        admin.revoke_machine("gpu-3")
        with pytest.raises(PermissionDenied):
            leaving.append_log(1, 0, "0" * 32, LogChunk(RANK_0, 0, b"x"))


def test_what_is_not_there_is_said_in_one_line(
    manager: ManagerProcess, agent: ScriptedAgent, run: tuple[int, str]
) -> None:
    task, token = run
    agent.append_log(task, 0, token, LogChunk("launcher", 0, b"x"))
    for route, status, word in (
        ("/tasks/99999/logs", 404, "99999"),
        ("/tasks/99999/logs/events", 404, "99999"),
        (f"/tasks/{task}/logs/search", 400, "text"),
        (f"/tasks/{task}/logs/search?text=x&after=1.2", 400, "no position"),
        (f"/tasks/{task}/logs/0/..", 400, "stream"),
        (f"/tasks/{task}/logs/0/Launcher", 400, "stream"),
        (f"/tasks/{task}/logs/0/rank-9", 404, "rank-9"),
        (f"/tasks/{task}/logs/7/launcher", 404, "run 7"),
        (f"/tasks/{task}/logs/0/launcher?limit=0", 400, "limit"),
        (f"/tasks/{task}/logs/0/launcher?offset=-1", 400, "offset"),
        (f"/tasks/{task}/logs/events?rank=-1", 400, "rank"),
    ):
        answered = manager.ask("GET", API + route, user="ada")
        assert answered.status == status, answered
        assert word in answered.body["message"]
        assert "\n" not in answered.body["message"]


def test_positions_in_a_header_are_checked(manager: ManagerProcess, run: tuple[int, str]) -> None:
    task, _ = run
    asked = f"{API}/tasks/{task}/logs/events?wait=false"
    answered = manager.ask("GET", asked, user="ada", headers={"Last-Event-ID": "1.2.x"})
    assert (answered.status, answered.body["code"]) == (400, "usage")
