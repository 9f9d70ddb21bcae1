"""Managers and agents one release apart, as processes: managers are upgraded first, then agents, while tasks run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

import pytest
from tests.support.network.free_ports import free_port
from tests.support.patience import allowed_s
from tests.support.platform import older_release
from tests.support.platform.manager import ManagerProcess
from tests.support.platform.older_release import older_fields
from tests.support.platform.running import task_of, wait_for

from fireflyer.base.errors import TransientError
from fireflyer.cluster.agent.join import join
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.views import TaskAnswer
from fireflyer.cluster.schema.sync import REVISION
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, TaskState

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT: Final = """\
import os, sys, time
where = f"{sys.argv[1]}/{sys.argv[2]}"
with open(f"{where}.{os.environ['RANK']}", "a") as file:
    file.write(f"{os.getpid()}\\n")
while not os.path.exists(f"{where}.go"):
    time.sleep(0.05)
print("went on", flush=True)
"""
OLDER: Final = (older_release.PROGRAM,)
NEWER: Final = ("-m", "fireflyer")


class AgentProcess:
    """`ff agent run` of one release or another, on the same directory."""

    def __init__(self, manager: ManagerProcess, name: str, directory: Path) -> None:
        self._directory = AgentDirectory(str(directory / name))
        self._log = directory / f"{name}.log"
        with manager.client("admin") as admin:
            token = admin.join_token(name)
        asyncio.run(join(self._directory, token, issuer=manager.agents, port=free_port(), address="127.0.0.1"))
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, release: tuple[str, ...]) -> None:
        command = [sys.executable, "-P", *release, "agent", "run", "--dir", self._directory.path, "--own-user"]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("ready"), self.log()

    def end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(allowed_s(20))
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ManagerProcess]:
    made = ManagerProcess(
        tmp_path / "manager",
        listen=f"127.0.0.1:{free_port()}",
        listen_agents=f"127.0.0.1:{free_port()}",
        settle_ms=1000,
    )
    yield made
    made.end()


def leads(manager: ManagerProcess) -> None:
    wait_for(lambda: manager.ask("GET", "/api/v1/health").status == 200, "the manager leads")


def answer_when(client: Client, task: int, state: TaskState) -> TaskAnswer:
    found: list[TaskAnswer] = []

    def reached() -> bool:
        try:
            found[:] = [client.task(task)]
        except TransientError:
            return False
        return found[0].task.state is state

    wait_for(reached, f"task {task} is {state.value}: {found}", limit_s=60)
    return found[0]


def test_tasks_run_on_while_managers_and_then_agents_are_upgraded(manager: ManagerProcess, tmp_path: Path) -> None:
    known = older_fields()
    assert "corrupt" not in known["EndedRun"], "the release before did not say it"
    assert "resumed_ns" not in known["NodeRow"]
    script, results = tmp_path / "run.py", tmp_path / "results"
    script.write_text(SCRIPT)
    results.mkdir()
    with ExitStack() as stack:
        manager.start(OLDER)
        leads(manager)
        agents = [stack.enter_context(AgentProcess(manager, name, tmp_path)) for name in ("n0", "n1")]
        for agent in agents:
            agent.start(OLDER)
        ada = stack.enter_context(manager.client("ada"))

        def submitted(name: str) -> int:
            (task,) = ada.submit(task_of(script, name, str(results), name, nodes=2), key=name)
            return task

        def running(task: int, name: str) -> None:
            answer_when(ada, task, TaskState.RUNNING)
            wait_for(lambda: all((results / f"{name}.{rank}").exists() for rank in (0, 1)), f"ranks of {name}")

        def ends(task: int, name: str) -> None:
            (results / f"{name}.go").write_text("")
            answer = answer_when(ada, task, FINISHED)
            assert (answer.task.outcome, answer.task.runs, answer.task.requeues) == (Outcome.SUCCEEDED, 1, 0), answer
            for rank in (0, 1):
                assert len((results / f"{name}.{rank}").read_text().split()) == 1, "one process, as it was started"

        first, second = submitted("first"), submitted("second")
        running(first, "first")
        manager.end()
        manager.start(NEWER)
        leads(manager)
        ends(first, "first")

        running(second, "second")  # a new manager, agents of the release before
        for agent in agents:
            agent.end()
            agent.start(NEWER)
        assert answer_when(ada, second, TaskState.RUNNING).task.runs == 1
        ends(second, "second")

        third = submitted("third")
        running(third, "third")
        ends(third, "third")


def test_an_agent_two_releases_away_is_refused_with_both_releases_and_what_to_do(
    manager: ManagerProcess, tmp_path: Path
) -> None:
    manager.start()
    leads(manager)
    with AgentProcess(manager, "n0", tmp_path) as agent, manager.client("admin") as admin:
        agent.start((older_release.PROGRAM, f"--revision={REVISION + 2}"))
        said = (
            f"the agent of n0 is of release 0.1.0 (revision {REVISION + 2}), this manager of 0.1.0 (revision "
            f"{REVISION}); they may be 1 apart: upgrade the managers, one release after the other"
        )
        wait_for(lambda: said in agent.log(), "the agent's log says it")
        assert said in manager.log()
        assert all(node.silent_ns is None for node in admin.nodes())
        agent.end()
        agent.start((older_release.PROGRAM, f"--revision={REVISION + 1}"))
        wait_for(lambda: any(node.silent_ns is not None for node in admin.nodes()), "one apart is heard")
