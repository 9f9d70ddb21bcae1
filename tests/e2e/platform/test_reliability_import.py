"""A task of `ff submit` whose node fails, from the managers' history to `why`, `report` and `lemons`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from tests.support.health import fault
from tests.support.platform.agent_process import agent_process, nodes_heard
from tests.support.platform.manager import ManagerProcess
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.analytics.reliability.signals import node_signals
from fireflyer.analytics.reliability.tables import open_tables
from fireflyer.cli.main import main
from fireflyer.cluster.client import Client, Connection
from fireflyer.cluster.core.platform.commands import ReturnNode
from fireflyer.cluster.manager.config import HealthConfig
from fireflyer.cluster.schema.tasks import FINISHED, Outcome
from fireflyer.identity.private_files import write_private_file

pytestmark = [pytest.mark.processes, pytest.mark.slow]

Capture = pytest.CaptureFixture[str]
PROGRAM: Final = """\
import json, os, time
with open(os.path.join(os.environ["NODE_DIRECTORY"], "fault")) as file:
    found = json.loads(file.read() or "{}")
print(json.dumps({"check": "gpu_xid", "severity": "ok", **found, "seen_ns": time.time_ns()}))
"""
SCRIPT: Final = """\
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
DIFFERS: Final = """\
import sys
from fireflyer.runtime.environment import read_environment
from fireflyer.runtime.reporter import Reporter
with Reporter.from_environment(read_environment()) as reporter:
    reporter.corruption(step=7, suspects=[1], decided=True, reason="ranks [1] differ from the majority of [0, 1, 2]")
sys.exit(1)
"""
"""What a trainer's rank says whose guard has found that replicas differ."""
VALIDATION: Final = """\
import os, sys
here = os.environ["NODE_DIRECTORY"]
with open(os.path.join(here, "validated"), "a") as file:
    file.write("once\\n")
print("GEMM gave another result")
sys.exit(2 if os.path.exists(os.path.join(here, "wrong")) else 0)
"""
XID_79: Final = fault("gpu_xid", cause="xid_79", part="gpu:0000:3b:00.0", at_once=True, words="fallen off the bus")


def says(directory: Path, text: bytes) -> None:
    (directory / "fault.new").write_bytes(text)
    (directory / "fault.new").replace(directory / "fault")


class Site:
    def __init__(self, directory: Path, manager: ManagerProcess, admin: Client, ada: Client) -> None:
        self.directory, self.manager, self.admin, self.ada = directory, manager, admin, ada

    def connection_of(self, user: str) -> str:
        path = self.directory / f"{user}.json"
        known = Connection(url=self.manager.url, fingerprint=self.manager.fingerprint, token=self.manager.tokens[user])
        write_private_file(str(path), msgspec.json.encode(known))
        return str(path)

    def node_of(self, task: int, *, other_than: str = "") -> str:
        def runs_there() -> bool:
            view = self.ada.task(task).task
            return view.state.value == "running" and other_than not in view.nodes

        wait_for(runs_there, f"task {task} runs elsewhere than on {other_than!r}", limit_s=60)
        return self.ada.task(task).task.nodes[0]

    def is_copied(self, task: int) -> bool:
        return any(one.id == task for one in self.admin.past_tasks().tasks)

    def history_of(self, node: str) -> list[str]:
        return [one.state for one in self.admin.node_page().entries if one.node == node]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "checks.py").write_text(PROGRAM)
    (tmp_path / "validate.py").write_text(VALIDATION)
    health = HealthConfig(
        program=(sys.executable, str(tmp_path / "checks.py")),
        validation=(sys.executable, str(tmp_path / "validate.py")), required=(), breaker_share=0.5, period_ms=500,
        test_every_ms=200, back_off_ms=0, probation_ms=1, probe_spacing_ms=50,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(
            ManagerProcess(tmp_path / "manager", health=health, history=f"sqlite:///{tmp_path / 'history.db'}")
        )
        admin, ada = (stack.enter_context(manager.client(name)) for name in ("admin", "ada"))
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            says(tmp_path / name, b"")
            stack.enter_context(agent_process(manager, tmp_path / name, NODE_DIRECTORY=str(tmp_path / name)))
        wait_for(lambda: nodes_heard(admin) == 2, "both nodes are there")
        yield Site(tmp_path, manager, admin, ada)


def asked(capsys: Capture, *words: str) -> Any:
    assert main(["reliability", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_fault_of_a_node_is_what_its_task_failed_of(site: Site, capsys: Capture) -> None:
    release, tables = site.directory / "release", str(site.directory / "tables")
    (task,) = site.ada.submit(task_of(site.directory / "train.py", "t", str(release)), key="t")
    bad = site.node_of(task)
    admin = site.connection_of("admin")
    assert asked(capsys, "import", tables, "--platform", admin)[0]["jobs"] <= 1, "it runs"
    says(site.directory / bad, msgspec.json.encode(XID_79))
    site.node_of(task, other_than=bad)
    says(site.directory / bad, b"")
    site.admin.command(ReturnNode(bad, "looked at"))
    release.touch()
    wait_for(lambda: site.ada.task(task).task.state is FINISHED, "the end of the task", limit_s=60)
    assert site.ada.task(task).task.outcome is Outcome.SUCCEEDED
    wait_for(lambda: site.is_copied(task), "the history has its end")
    wait_for(lambda: site.history_of(bad)[-1] == "returned", "the history has the return", limit_s=60)

    imported = asked(capsys, "import", tables, "--platform", admin)
    assert sum(one["jobs"] for one in imported) == 2
    assert all(not one["rejected"] for one in imported)
    found = asked(capsys, "why", str(task), "--from", tables)
    assert found["hypotheses"][0]["nodes"] == [bad]
    assert "xid_79" in found["hypotheses"][0]["evidence"][0]
    report = asked(capsys, "report", tables, "--gpus-per-node", "1")
    assert {state["state"]: state["attempts"] for state in report["states"]} == {"COMPLETED": 1, "NODE_FAIL": 1}
    with open_tables(tables) as connection:
        (signals,) = (one for one in node_signals(connection) if one.node == bad)
    assert (signals.tickets, signals.out_count, signals.xid_cnt) == (1, 1, 1)

    nothing = asked(capsys, "import", tables, "--platform", admin)
    assert [one["lines"] for one in nothing] == [0, 0], "only what is new is read"
    os.unlink(os.path.join(tables, "platform.json"))  # as if it had been killed before it wrote that
    asked(capsys, "import", tables, "--platform", admin)
    assert asked(capsys, "report", tables, "--gpus-per-node", "1") == report, "once each"
    whole = str(site.directory / "whole")
    asked(capsys, "import", whole, "--platform", admin)
    assert asked(capsys, "report", whole, "--gpus-per-node", "1") == report, "in parts as at once"

    assert main(["reliability", "import", tables, "--platform", site.connection_of("ada")]) == 1
    assert "needs the role platform:operator" in capsys.readouterr().err
    assert site.manager.ask("GET", "/api/v1/history/runs?since=-1", user="admin").status == 400
    assert site.manager.ask("GET", "/api/v1/history/nodes?limit=100000", user="admin").status == 400


def test_a_node_whose_rank_differed_from_its_replicas_is_validated_and_not_taken_out_for_it(
    site: Site, capsys: Capture
) -> None:
    (site.directory / "train.py").write_text(DIFFERS)
    tables, admin = str(site.directory / "tables"), site.connection_of("admin")
    (task,) = site.ada.submit(task_of(site.directory / "train.py", "t", nodes=2), key="t")
    wait_for(lambda: site.ada.task(task).task.state is FINISHED, "its end", limit_s=60)
    good, bad = site.ada.task(task).runs[0].nodes
    wait_for((site.directory / bad / "validated").exists, f"{bad} is validated", limit_s=60)
    wait_for(lambda: site.admin.node(bad).state == "idle", "it is sound", limit_s=60)
    assert not (site.directory / good / "validated").exists(), "nothing speaks against the other one"
    assert "drained" not in site.history_of(bad)
    wait_for(lambda: site.history_of(bad)[-1] == "warned", "the history has the warning", limit_s=60)
    asked(capsys, "import", tables, "--platform", admin)
    found = asked(capsys, "why", str(task), "--from", tables)
    assert "Replicas of the training state differ" in [one["title"] for one in found["hypotheses"]]
    with open_tables(tables) as connection:
        signals = {one.node: one for one in node_signals(connection)}
    assert (signals[bad].corruptions, signals[bad].incidents) == (1, 0)


def test_the_platform_of_ff_up_is_found_where_it_is(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print('done')\n")
    monkeypatch.chdir(tmp_path)
    for name in ("FIREFLYER_PLATFORM", "FF_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with RunningPlatform(tmp_path / "platform", nodes=1) as platform:
        client = platform.client()
        (task,) = client.submit(task_of(tmp_path / "train.py", "t"), key="t")
        wait_for(lambda: any(one.id == task for one in client.past_tasks().tasks), "its end is in the history")
        assert main(["reliability", "import", "tables", "--platform"]) == 0
        assert "1 jobs of" in capsys.readouterr().out
    assert asked(capsys, "report", "tables")["states"][0]["state"] == "COMPLETED"
