"""From what a check prints to a task that runs elsewhere, and back to a node that returns after its repair; operators
type what docs/how-to/node-health.md says."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.support.health import fault
from tests.support.how_to import Shell
from tests.support.patience import allowed_s
from tests.support.platform.agent_process import agent_process, nodes_heard
from tests.support.platform.manager import ManagerProcess
from tests.support.platform.running import task_of, wait_for

from fireflyer.base.errors import UsageError
from fireflyer.base.health_event import HealthEvent
from fireflyer.cluster.client import Client, Connection
from fireflyer.cluster.core.platform.commands import ReturnNode
from fireflyer.cluster.core.platform.views import HealthView
from fireflyer.cluster.manager.config import HealthConfig
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome
from fireflyer.identity.private_files import write_private_file

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
FOLLOWER: Final = """\
import os, socket, sys
from fireflyer.cli import main
from fireflyer.validators.checks import rounds
here = os.environ["NODE_DIRECTORY"]
log = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
log.connect(os.path.join(here, "kmsg"))
log.setblocking(False)
rounds.open_kmsg = log.detach
sys.exit(main(["health", "--follow", "--no-rounds", "--state", os.path.join(here, "counters")]))
"""
"""`ff health` with another kernel log."""
SCRIPT: Final = """\
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
LINK: Final = fault("infiniband", cause="link_down", part="mlx5_0", at_once=True, words="port 1 is down")
XID_79: Final = fault("gpu_xid", cause="xid_79", part="gpu:0000:3b:00.0", serial="1650", at_once=True)


PAGE: Final = (Path(__file__).parents[3] / "docs" / "how-to" / "node-health.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


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

    def types(self, line: str) -> str:
        return Shell(self.directory).run(*shlex.split(line))

    def wait_for_state(self, node: str, *states: str) -> None:
        wait_for(lambda: self.health(node).state in states, f"node {node} is {' or '.join(states)}", limit_s=30)

    def wait_for_run(self, task: int, node: str) -> None:
        wait_for(
            lambda: (found := self.ada.task(task)).task.nodes == (node,) and found.task.state.value == "running",
            f"task {task} runs on {node}", limit_s=60,
        )  # fmt: skip


@contextlib.contextmanager
def two_nodes(tmp_path: Path, period_ms: int, follow: tuple[str, ...] = ()) -> Iterator[Nodes]:
    program = tmp_path / "health.py"
    program.write_text(PROGRAM)
    (tmp_path / "train.py").write_text(SCRIPT)
    health = HealthConfig(
        program=(sys.executable, str(program)), follow=follow, version=3, period_ms=period_ms, test_every_ms=200,
        back_off_ms=0, probation_ms=1000, probe_spacing_ms=50,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(ManagerProcess(tmp_path / "manager", health=health))
        found = Nodes(
            tmp_path, stack.enter_context(manager.client("admin")), stack.enter_context(manager.client("ada"))
        )
        for name in ("a", "b"):
            (tmp_path / name).mkdir(exist_ok=True)
            found.breaks(name)
            stack.enter_context(agent_process(manager, tmp_path / name, NODE_DIRECTORY=str(tmp_path / name)))
        wait_for(lambda: nodes_heard(found.admin) == 2, "both nodes are there")
        connection = Connection(url=manager.url, token=manager.tokens["admin"], fingerprint=manager.fingerprint)
        write_private_file(str(tmp_path / "connection"), msgspec.json.encode(connection))
        yield found


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("FIREFLYER_PLATFORM", str(tmp_path / "connection"))
    with two_nodes(tmp_path, period_ms=300) as found:
        yield found


def test_the_page_says_what_a_manager_and_a_check_take() -> None:
    table, of_group = blocks("toml")
    health = msgspec.toml.decode(table, type=dict[str, HealthConfig])["health"]
    assert health.policy().required == ("mounts", "validation")
    both = msgspec.toml.decode(f"{table}\n{of_group}", type=dict[str, HealthConfig])["health"]
    assert both.policy().required_of("gpu") == ("gpu_count", "gpu_xid", "validation")
    keys = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")))
    assert not {key for key in keys if key.endswith("_ms") and key not in HealthConfig.__struct_fields__}
    events = [msgspec.json.decode(line, type=HealthEvent) for line in blocks("json")[0].splitlines()]
    assert [(event.check, event.severity) for event in events] == [("infiniband", "high"), ("mounts", "ok")]


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
    look, repair = (block.replace("gpu-7", other).splitlines() for block in blocks(""))
    listed, shown = (nodes.types(line) for line in look)
    assert re.search(rf"^{other} .*drained: reboot: gpu_xid \(xid_79\)", listed, re.MULTILINE)
    assert "reboot is due" in shown
    assert "serial 1650" in shown

    assert "is tested after reboot" in nodes.types(repair[0])
    nodes.wait_for_state(other, "field diagnosis")  # its checks fail still
    nodes.breaks(other)
    assert "returns when all required checks pass" in nodes.types(repair[1])
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


def test_an_xid_takes_a_node_out_long_before_the_next_round_is_due(tmp_path: Path) -> None:
    follower = tmp_path / "follower.py"
    follower.write_text(FOLLOWER)
    with contextlib.ExitStack() as stack:
        logs = {}
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            logs[name] = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            logs[name].bind(str(tmp_path / name / "kmsg"))
            logs[name].listen()
            logs[name].settimeout(allowed_s(60))
        nodes = stack.enter_context(two_nodes(tmp_path, 86_400_000, (sys.executable, str(follower))))
        kernel = stack.enter_context(logs["a"].accept()[0])
        kernel.send(b"6,6,0,-;usb 1-1: reset")
        kernel.send(b"3,7,%d,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711\n" % (time.monotonic_ns() // 1000))
        nodes.wait_for_state("a", "reboot")
        assert "xid_79" in nodes.health("a").reason
        assert nodes.health("b").state == "healthy"
