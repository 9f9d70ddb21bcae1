"""Several managers over one PostgreSQL database: one leads, and another goes on when it is killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.support.kvstore.postgres import PostgresServer
from tests.support.network.free_ports import free_port
from tests.support.patience import allowed_s
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

from fireflyer.base.errors import FireflyerError, TransientError
from fireflyer.cluster.client import Client, Connection, ManagerAddress
from fireflyer.cluster.schema.api import Change
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, Program, TaskSpec

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TASKS: Final = 40
KILL_AFTER: Final = (12, 25)
"""Submitted tasks after which the leader is killed."""
NODES: Final = 3


class Managers:
    """Three of them, and how clients and agents reach all of them."""

    def __init__(self, directory: Path, store: str) -> None:
        ports = [free_port() for _ in range(6)]
        agents = tuple(f"127.0.0.1:{port}" for port in ports[3:])
        self.all = [
            ManagerProcess(
                directory,
                name=f"m{number}",
                store=store,
                listen=f"127.0.0.1:{ports[number]}",
                listen_agents=agents[number],
                managers=agents,
                settle_ms=1000,
            )
            for number in range(3)
        ]

    def leader(self) -> ManagerProcess:
        found: list[ManagerProcess] = []

        def leads() -> bool:
            found[:] = [one for one in self.all if one.runs and one.ask("GET", "/api/v1/health").status == 200]
            assert len(found) <= 1, "two managers lead"
            return bool(found)

        wait_for(leads, "a manager leads")
        return found[0]

    def connection(self, user: str) -> Connection:
        """With a follower first, so that the client has to find the leader."""
        leader = self.leader()
        first, second = (one for one in self.all if one is not leader)
        others = tuple(ManagerAddress(url=one.url) for one in (second, leader))
        return Connection(url=first.url, token=leader.tokens[user], others=others)


class Node(threading.Thread):
    """An agent whose programs end at once, and that counts how often each run was started."""

    def __init__(self, agent: ScriptedAgent) -> None:
        super().__init__(daemon=True)
        self._agent = agent
        self.started: list[int] = []
        self.ending = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ending.is_set():
            try:
                orders = self._agent.sync()
            except FireflyerError:  # it does not lead, is dead, or has not yet read that this machine has joined
                self._agent.next_manager()
                self.ending.wait(0.1)
                continue
            launched = [order for order in orders.runs if order.launch is not None]
            for order in launched:
                if order.run_token not in self._agent.runs and order.wanted == "run" and order.launch is not None:
                    self.started.append(order.launch.task)
            self._agent.follow()


def end(nodes: list[Node]) -> None:
    for node in nodes:
        node.ending.set()
    for node in nodes:
        node.join()


@pytest.fixture
def managers(tmp_path: Path, postgres_server: PostgresServer) -> Iterator[Managers]:
    three = Managers(tmp_path / "managers", postgres_server.url())
    with contextlib.ExitStack() as stack:
        for one in three.all:
            stack.enter_context(one)
        yield three


def spec(name: str) -> TaskSpec:
    return TaskSpec(name=name, program=Program(script="train.py"))


def test_no_task_is_lost_and_none_is_started_twice_when_leaders_are_killed(managers: Managers) -> None:
    leader = managers.leader()
    addresses = tuple(one.agents for one in managers.all)
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(ScriptedAgent(leader, f"gpu-{number}", addresses=addresses)) for number in range(NODES)
        ]
        nodes = [Node(agent) for agent in agents]
        client = stack.enter_context(Client(managers.connection("ada")))
        stack.callback(end, nodes)
        submitted: dict[str, int] = {}
        for number in range(TASKS):
            if number in KILL_AFTER:
                leader = managers.leader()
                leader.end(signal.SIGKILL)
            began_s = time.monotonic()
            (task,) = client.submit(spec(f"t{number}"), key=f"key-{number}")
            assert time.monotonic() - began_s < allowed_s(12), "another manager leads within 10 s"
            submitted[f"t{number}"] = task
            if number in KILL_AFTER:
                leader.start()
        for number in range(TASKS):  # a client that never got the answer asks again
            assert client.submit(spec(f"t{number}"), key=f"key-{number}") == (submitted[f"t{number}"],)
        assert sorted(submitted.values()) == list(range(1, TASKS + 1)), "one task for each key"
        for task in submitted.values():
            wait_for(lambda task=task: client.task(task).task.state is FINISHED, "the end", limit_s=60)  # type: ignore[misc]
            answer = client.task(task)
            assert answer.task.outcome is Outcome.SUCCEEDED
            assert len(answer.runs) == 1
    started = sorted(task for node in nodes for task in node.started)
    assert started == sorted(submitted.values()), "each was started once"


def test_who_follows_changes_goes_on_with_the_next_leader(managers: Managers) -> None:
    with Client(managers.connection("ada")) as following, Client(managers.connection("ada")) as client:
        changes = following.changes()
        assert next(changes) is None, "it follows"
        client.submit(spec("first"), key="1")
        first = _next(changes)
        assert first.name == "1"
        managers.leader().end(signal.SIGKILL)
        with pytest.raises(TransientError):
            _next(changes)
        client.submit(spec("second"), key="2")
        later = _next(following.changes(first.number))
        assert later.number > first.number or later.what == "gap"


def _next(changes: Iterator[Change | None]) -> Change:
    return next(change for change in changes if change is not None)


def test_ff_login_keeps_all_managers_and_commands_find_the_leader(managers: Managers, tmp_path: Path) -> None:
    connection = managers.connection("ada")
    token = tmp_path / "token"
    token.write_text(connection.token)
    token.chmod(0o600)
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def ff(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "fireflyer", *words],
            capture_output=True, text=True, timeout=allowed_s(60), check=False, env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    urls = [manager.url for manager in connection.managers]
    assert ff("login", *urls, "--token-file", str(token)).startswith("logged in as ada")
    kept = msgspec.json.decode((tmp_path / "config/fireflyer/platform.json").read_bytes(), type=Connection)
    assert [manager.url for manager in kept.managers] == urls
    assert "gpu" not in ff("nodes")
    managers.leader().end(signal.SIGKILL)
    assert "TASK" in ff("ps")
