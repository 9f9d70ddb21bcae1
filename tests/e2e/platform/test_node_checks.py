"""A task that fails: on a node that the site's program finds at fault it goes on elsewhere, on others it has ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.platform.agent_process import agent_process, nodes_heard
from tests.support.platform.manager import ManagerProcess
from tests.support.platform.running import task_of, wait_for

from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.commands import DrainNode, ResumeNode
from fireflyer.cluster.core.platform.views import TaskAnswer
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CHECK: Final = """\
import os, runpy, sys
if "/bad/" in os.environ["FF_RUN_DIR"]:
    print("suspect: memory: mc0 counts 2 uncorrected errors")
    sys.stdout.flush()
    os._exit(2)
sys.argv[1:] = ["--memory", "32MiB"]
runpy.run_module("fireflyer.validators", run_name="__main__")
"""
SCRIPT: Final = """\
import os, sys
sys.exit(7 if sys.argv[1] in os.environ["FF_RUN_DIR"] else 0)
"""
"""Exits with 7 on nodes whose directory has the name of its argument."""


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[tuple[Client, Client]]:
    """A user and an operator of nodes `bad`, which the check finds at fault, and `good`."""
    check = tmp_path / "check.py"
    check.write_text(CHECK)
    (tmp_path / "train.py").write_text(SCRIPT)
    with contextlib.ExitStack() as stack:
        command = (sys.executable, str(check))
        manager = stack.enter_context(ManagerProcess(tmp_path / "manager", node_check=command))
        for name in ("bad", "good"):
            stack.enter_context(agent_process(manager, tmp_path / name))
        admin = stack.enter_context(manager.client("admin"))
        wait_for(lambda: nodes_heard(admin) == 2, "both nodes are there")
        admin.command(DrainNode(node="good", reason="so that a task begins on the other one"))
        yield stack.enter_context(manager.client("ada")), admin


def finished(client: Client, task: int) -> TaskAnswer:
    wait_for(lambda: client.task(task).task.state is FINISHED, f"the end of task {task}", limit_s=90)
    return client.task(task)


def test_a_task_goes_on_elsewhere_where_the_node_is_at_fault_and_ends_where_it_is_not(
    clients: tuple[Client, Client], tmp_path: Path
) -> None:
    ada, admin = clients
    moved, broken = (
        ada.submit(task_of(tmp_path / "train.py", name, failing), key=name)[0]
        for name, failing in (("moved", "/bad/"), ("broken", "/"))
    )
    wait_for(lambda: bool(ada.task(moved).runs), "its first run is on the bad node")
    admin.command(ResumeNode(node="good"))
    found = finished(ada, moved)
    assert found.task.outcome is Outcome.SUCCEEDED
    assert [(run.nodes, run.cause) for run in found.runs] == [
        (("bad",), Cause.INFRASTRUCTURE),
        (("good",), Cause.SUCCEEDED),
    ]
    assert found.runs[0].end_reason.startswith(
        "bad: the check found the node at fault: memory: mc0 counts 2 uncorrected errors; rank 0 exited with code 7"
    )
    ended = finished(ada, broken)
    assert ended.task.outcome is Outcome.FAILED
    assert (ended.runs[-1].nodes, ended.runs[-1].cause) == (("good",), Cause.PROGRAM)
    assert "at fault" not in ended.runs[-1].end_reason
