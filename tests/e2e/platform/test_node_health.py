"""From what a check prints to a task that runs elsewhere, and back to a node that returns after its repair."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.support.health import fault
from tests.support.platform.agent_process import agent_process, nodes_heard
from tests.support.platform.manager import ManagerProcess
from tests.support.platform.running import task_of, wait_for

from fireflyer.base.errors import UsageError
from fireflyer.base.health_event import HealthEvent
from fireflyer.cli.platform.nodes import _shown
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.platform.commands import RecordRepair, ReturnNode
from fireflyer.cluster.core.platform.views import HealthView
from fireflyer.cluster.manager.config import HealthConfig
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM: Final = """\
import json, os, sys, time
only = sys.argv[2] if sys.argv[1:2] == ["--check"] else ""
with open(os.path.join(os.environ["NODE_DIRECTORY"], "faults")) as file:
    found = [json.loads(line) for line in file]
for check in ("gpu_xid", "infiniband", "mounts"):
    if only not in ("", check):
        continue
    mine = [event for event in found if event["check"] == check]
    for event in mine or [{"check": check, "severity": "ok"}]:
        print(json.dumps({**event, "seen_ns": time.time_ns()}))
"""
SCRIPT: Final = """\
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
LINK: Final = fault("infiniband", cause="link_down", part="mlx5_0", at_once=True, words="port 1 is down")
XID_79: Final = fault("gpu_xid", cause="xid_79", part="gpu:0000:3b:00.0", serial="1650", at_once=True)


class Nodes:
    """`a` and `b`, as their operator and a user see them."""

    def __init__(self, directory: Path, admin: Client, ada: Client) -> None:
        self.directory, self.admin, self.ada = directory, admin, ada

    def breaks(self, node: str, *events: HealthEvent) -> None:
        """As long as nothing else is said; without events it is repaired."""
        new = self.directory / node / "faults.new"
        new.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
        new.replace(self.directory / node / "faults")

    def health(self, node: str) -> HealthView:
        return self.admin.node(node).health or HealthView(
            state="healthy", since_ns=0, reason="", hold="none", until_ns=None, faults=0, policy=0
        )

    def wait_for_state(self, node: str, *states: str) -> None:
        wait_for(lambda: self.health(node).state in states, f"node {node} is {' or '.join(states)}", limit_s=30)

    def wait_for_run(self, task: int, node: str) -> None:
        wait_for(
            lambda: (found := self.ada.task(task)).task.nodes == (node,) and found.task.state.value == "running",
            f"task {task} runs on {node}", limit_s=60,
        )  # fmt: skip


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    program = tmp_path / "health.py"
    program.write_text(PROGRAM)
    (tmp_path / "train.py").write_text(SCRIPT)
    health = HealthConfig(
        program=(sys.executable, str(program)), version=3, period_ms=300, test_every_ms=200, back_off_ms=0,
        probation_ms=1000, probe_spacing_ms=50,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(ManagerProcess(tmp_path / "manager", health=health))
        found = Nodes(
            tmp_path, stack.enter_context(manager.client("admin")), stack.enter_context(manager.client("ada"))
        )
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            found.breaks(name)
            stack.enter_context(agent_process(manager, tmp_path / name, NODE_DIRECTORY=str(tmp_path / name)))
        wait_for(lambda: nodes_heard(found.admin) == 2, "both nodes are there")
        yield found


def test_a_link_then_a_gpu_is_lost_and_each_time_the_task_goes_on_elsewhere(nodes: Nodes, tmp_path: Path) -> None:
    release = tmp_path / "release"
    (task,) = nodes.ada.submit(task_of(tmp_path / "train.py", "t", str(release), max_requeues=0), key="t")
    wait_for(lambda: bool(nodes.ada.task(task).task.nodes), "the task has a node")
    first = nodes.ada.task(task).task.nodes[0]
    other = "b" if first == "a" else "a"
    nodes.wait_for_run(task, first)
    nodes.breaks(first, fault("mounts", "warn", words="/data is nearly full"))
    nodes.breaks(first, LINK)
    nodes.wait_for_run(task, other)
    nodes.wait_for_state(first, "reboot")  # a link is tested first, and the test fails
    assert "port 1 is down" in nodes.health(first).reason

    nodes.breaks(first)
    nodes.admin.command(ReturnNode(first, "the cable was loose"))
    nodes.wait_for_state(first, "probation", "returned")
    nodes.breaks(other, XID_79)
    nodes.wait_for_run(task, first)
    nodes.wait_for_state(other, "reboot")
    shown = _shown(nodes.admin.node(other))
    assert "xid_79" in shown
    assert "reboot is due" in shown
    assert "serial 1650" in shown

    nodes.admin.command(RecordRepair(other, Remedy.REBOOT, "power cycled"))
    nodes.wait_for_state(other, "field diagnosis")  # its checks fail still
    nodes.breaks(other)
    nodes.admin.command(ReturnNode(other, "the riser was loose"))
    nodes.wait_for_state(other, "probation", "returned")
    ticket = nodes.admin.node(other).health
    nodes.wait_for_state(other, "returned")
    with pytest.raises(UsageError, match="is returned"):
        nodes.admin.command(ReturnNode(other))
    if ticket is not None and ticket.ticket is not None:
        done = [(one.by, one.what) for one in ticket.ticket.actions]
        assert [what for _, what in done][:4] == ["drain", "reboot", "test failed", "return asked"]
        assert ("admin", "return asked") in done

    release.touch()
    wait_for(lambda: nodes.ada.task(task).task.state is FINISHED, "the end of the task", limit_s=60)
    ended = nodes.ada.task(task)
    assert (ended.task.outcome, ended.task.requeues) == (Outcome.SUCCEEDED, 0)
    assert [run.nodes for run in ended.runs] == [(first,), (other,), (first,)]
    assert [run.cause for run in ended.runs][-1] is Cause.SUCCEEDED
    assert "xid_79" in ended.runs[1].leave_reason
