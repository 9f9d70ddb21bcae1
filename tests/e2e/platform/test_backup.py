"""A backup is read into an empty store: what it knows goes on, what came after it is ended, and nothing runs twice."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from tests.support.kvstore.postgres import PostgresServer
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

from fireflyer.base.errors import Busy
from fireflyer.cli import main
from fireflyer.cluster.client import Client
from fireflyer.cluster.schema.sync import RunStatus
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, Program, TaskSpec, TaskState

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LIMITS: Final = {"stop_after_ms": 1000, "stop_slack_ms": 2000}
"""Of the configuration with which the store is restored. Those of the managers are longer: no run ends by silence."""


def spec(name: str) -> TaskSpec:
    return TaskSpec(name=name, program=Program(script="train.py"))


def start_all(agent: ScriptedAgent) -> None:
    """What it is told to run, runs, and goes on running."""
    for order in agent.sync(hold=False).runs:
        if order.wanted == "run" and order.run_token not in agent.runs:
            lead = order.launch is not None
            agent.runs[order.run_token] = RunStatus(token=order.run_token, state="running", lead=lead)


def runs(client: Client, task: int, agents: list[ScriptedAgent]) -> bool:
    """All agents start what they are told to; whether the manager has heard that the task runs. One that has lost the
    lead for a moment, as its store was slow, is asked again, as real agents do."""
    try:
        for agent in agents:
            start_all(agent)
    except Busy:
        return False
    return client.task(task).task.state is TaskState.RUNNING


def told(agents: list[ScriptedAgent]) -> None:
    """They follow their orders, and programs end at once."""
    for agent in agents:
        agent.sync(hold=False)
        agent.follow()


def orders_of(agent: ScriptedAgent) -> dict[str, str]:
    return {order.run_token: order.wanted for order in agent.sync().runs}


def test_runs_of_the_backup_go_on_and_later_ones_end_before_anything_starts(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    directory, file = tmp_path / "managers", tmp_path / "platform.backup"
    with ManagerProcess(directory, name="old", store=postgres_server.url()) as old:
        wait_for(lambda: old.ask("GET", "/api/v1/health").status == 200, "it leads")
        agents = [ScriptedAgent(old, name) for name in ("gpu-1", "gpu-2")]
        with old.client("ada") as client:
            (known,) = client.submit(spec("known"), key="known")
            wait_for(lambda: runs(client, known, agents), "the first task runs")
            assert main(["manager", "backup", str(directory / "old.toml"), str(file)]) == 0, "while it runs"
            (lost,) = client.submit(spec("lost"), key="lost")
            wait_for(lambda: runs(client, lost, agents), "the second task runs too")
            token_of = {task: client.task(task).runs[0].token for task in (known, lost)}
    agents.sort(key=lambda agent: token_of[known] not in agent.runs)

    new = ManagerProcess(directory, name="new", store=postgres_server.url())
    ManagerProcess(directory, name="short", store=new.store, **LIMITS)
    assert main(["manager", "restore", str(directory / "short.toml"), str(file)]) == 0
    assert main(["manager", "restore", str(directory / "short.toml"), str(file)]) == 2, "the store is not empty"
    with new:
        wait_for(lambda: new.ask("GET", "/api/v1/health").status == 200, "it leads")
        with new.client("ada") as client:
            assert client.task(known).task.state is TaskState.RUNNING
            again = client.submit(spec("lost"), key="lost")[0]
            assert again > 1_000_000, "the number of a lost task is not given again"
            for agent in agents:
                agent.move_to(new)
            term = agents[0].orders.term
            assert orders_of(agents[0]) == {token_of[known]: "run"}
            assert agents[0].orders.term > term, "agents follow no older leader"
            assert orders_of(agents[1]) == {token_of[lost]: "stop"}
            agents[1].follow()
            assert agents[1].runs[token_of[lost]].state == "gone"

            wait_for(lambda: runs(client, again, agents), "the task that was submitted again starts", limit_s=60)
            assert client.task(again).runs[0].token not in token_of.values(), "no token is given twice"

            def ended() -> bool:
                told(agents)
                return all(client.task(task).task.state is FINISHED for task in (known, again))

            wait_for(ended, "both end", limit_s=60)
            assert [len(client.task(task).runs) for task in (known, again)] == [1, 1]
            assert client.task(known).task.outcome is Outcome.SUCCEEDED


def test_a_backup_is_written_once_and_a_damaged_one_leaves_the_store_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, file = tmp_path / "manager", tmp_path / "platform.backup"
    with ManagerProcess(directory, name="old") as old:
        wait_for(lambda: old.ask("GET", "/api/v1/health").status == 200, "it leads")
    assert main(["manager", "backup", str(directory / "old.toml"), str(file)]) == 0
    assert file.stat().st_mode & 0o077 == 0, "it has keys of machines"
    assert main(["manager", "backup", str(directory / "old.toml"), str(file)]) == 2, "it is not written over"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    ManagerProcess(directory, name="new", store=f"embedded:{tmp_path / 'store'}")
    assert main(["manager", "restore", str(directory / "new.toml"), str(tmp_path / "damaged")]) == 1
    assert str(tmp_path / "damaged") in capsys.readouterr().err
    assert main(["manager", "restore", str(directory / "new.toml"), str(file)]) == 0, "nothing was written before"
