"""Seven faults planted on the nodes of a platform, where the shipped checks find them: in sysfs, in the kernel's log,
in what tools print. Each is acted on as configured, the task ends with the result of an undisturbed run, and each node
returns only when its validation has passed. What each fault cost is told by its cause, in GPU-hours."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import tests.support.planted_health
from tests.support.fake_sysfs import write_tree
from tests.support.platform.agent_process import agent_process, nodes_heard
from tests.support.platform.manager import ManagerProcess
from tests.support.platform.running import task_of, wait_for

from fireflyer.analytics.reliability.characterisation import characterise
from fireflyer.analytics.reliability.local_times import Clock
from fireflyer.analytics.reliability.tables import open_tables
from fireflyer.base.units import SECOND
from fireflyer.cli.reliability.platform_import import import_platform
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.commands import ReturnNode
from fireflyer.cluster.core.platform.views import NodeView, RunView
from fireflyer.cluster.manager.config import HealthConfig
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome
from fireflyer.runtime.disk import RealDisk

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RECORDED: Final = Path(__file__).parents[2] / "unit/validators/checks/recorded"
PORT: Final = "sys/class/infiniband/mlx5_0/ports/1"
MC: Final = "sys/devices/system/edac/mc/mc0"
HEALTHY: Final = {
    "proc/sys/kernel/random/boot_id": "b0\n",
    "proc/meminfo": "MemTotal:  527843596 kB\n",
    "sys/class/infiniband/mlx5_0/node_guid": "0c42:a103:0065:1234\n",
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/phys_state": "5: LinkUp\n",
    f"{PORT}/rate": "200 Gb/sec (4X HDR)\n",
    f"{PORT}/counters/link_downed": "3\n",
    f"{MC}/ue_count": "0\n",
    f"{MC}/ce_count": "0\n",
}
POLICY: Final = """\
[inventory]
gpus = 2
infiniband = {{ mlx5_0 = 200 }}

[[programs]]
name = "site_memory"
argv = ["{tools}/check_memory"]
"""
TOOLS: Final = {"nvidia-smi": "gpus.xml", "df": "df.out", "chronyc": "chronyc.out"}
"""What each prints."""
VALIDATION: Final = """\
import os, sys
with open(os.path.join(os.environ["NODE_DIRECTORY"], "validated"), "a") as file:
    file.write("once\\n")
"""
REMEDIES: Final = ("reset", "reboot", "field diagnosis", "rma")
"""States in which a node waits for a person."""
STEPS: Final = 300
SCRIPT: Final = """\
import hashlib, os, sys, time
state, release = sys.argv[1:3]
try:
    step, digest = open(state).read().split()
except FileNotFoundError:
    step, digest = 0, "begin"
step = int(step)
while step < STEPS or not os.path.exists(release):
    if step < STEPS:
        digest, step = hashlib.sha256(f"{digest} {step}".encode()).hexdigest(), step + 1
        with open(state + ".new", "w") as file:
            file.write(f"{step} {digest}")
        os.replace(state + ".new", state)
    time.sleep(0.01)
""".replace("STEPS", str(STEPS))


def result_of_an_undisturbed_run() -> str:
    digest = "begin"
    for step in range(STEPS):
        digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
    return f"{STEPS} {digest}"


class Node:
    """What the checks of one node see."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.name = directory, directory.name
        (directory / "root").mkdir(parents=True)
        write_tree(RealDisk(), str(directory / "root"), HEALTHY)
        tools = directory / "tools"
        tools.mkdir()
        for tool, said in TOOLS.items():
            (tools / tool).write_text(
                f'#!/bin/sh\nwhile IFS= read -r line; do echo "$line"; done < {directory}/{said}\n'
            )
        (tools / "check_memory").write_text(
            f'#!/bin/sh\nread -r line < {directory}/memory\necho "$line"\nexit ${{line##* }}\n'
        )
        for program in tools.iterdir():
            program.chmod(0o755)
        (directory / "policy.toml").write_text(POLICY.format(tools=tools))
        self.heals()

    def says(self, name: str, text: str) -> None:
        """A file is replaced at once: a check that runs now sees the old one or the new one."""
        new = self.directory / f"{name}.new"
        new.write_text(text)
        new.replace(self.directory / name)

    def heals(self) -> None:
        for path, text in HEALTHY.items():
            self.says(f"root/{path}", text)
        self.says("gpus.xml", (RECORDED / "nvidia_smi_healthy.xml").read_text())
        self.says("df.out", (RECORDED / "df_healthy.out").read_text())
        self.says("chronyc.out", (RECORDED / "chronyc_healthy.out").read_text())
        self.says("memory", "MEMORY OK: 180 GB/s, code 0")
        self.says("kmsg", "")

    # --- faults ---

    def loses_its_link(self) -> None:
        self.says(f"root/{PORT}/phys_state", "2: Polling\n")
        self.says(f"root/{PORT}/state", "1: DOWN\n")

    def has_an_xid_79(self) -> None:
        now_us = time.monotonic_ns() // 1000
        said = "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."
        self.says("kmsg", f"3,1281,{now_us},-;{said}\n")

    def loses_its_gpus(self) -> None:
        self.says("gpus.xml", (RECORDED / "nvidia_smi_none.out").read_text())

    def has_memory_errors(self) -> None:
        self.says(f"root/{MC}/ue_count", "1\n")

    def is_full(self) -> None:
        self.says("df.out", (RECORDED / "df_faulty.out").read_text())

    def has_a_wrong_clock(self) -> None:
        self.says("chronyc.out", (RECORDED / "chronyc_faulty.out").read_text())

    def has_slow_memory(self) -> None:
        self.says("memory", "MEMORY CRITICAL: 12 GB/s, code 2")


class Platform:
    def __init__(self, nodes: dict[str, Node], admin: Client, ada: Client) -> None:
        self.nodes, self.admin, self.ada = nodes, admin, ada
        self._validated_before: dict[str, int] = {}

    def plant(self, node: str, fault: Callable[[Node], None]) -> None:
        """Before it, no validation of this fault can have begun. A later count may already have the one that passes:
        in a probe the validation runs before the checks, so the fault may be repaired between the two."""
        self._validated_before[node] = self.validated(node)
        fault(self.nodes[node])

    def view(self, node: str) -> NodeView:
        return self.admin.node(node)

    def state_of(self, node: str) -> str:
        health = self.view(node).health
        return "healthy" if health is None else health.state

    def reason_of(self, node: str) -> str:
        health = self.view(node).health
        return "" if health is None else health.reason

    def wait_until_out(self, node: str) -> None:
        wait_for(
            lambda: self.state_of(node) in ("drained", "testing", *REMEDIES),
            f"{node} is out: {self.reason_of(node)}",
            limit_s=60,
        )

    def repairs(self, node: str) -> None:
        """It is out until the fault is gone and its validation has passed."""
        self.nodes[node].heals()

        def returns() -> bool:
            state = self.state_of(node)
            if state in REMEDIES:  # also while it was tested: a probe from before the repair was the last of a test
                self.admin.command(ReturnNode(node, "repaired"))
            return state in ("probation", "returned", "healthy")

        wait_for(returns, f"{node} returns", limit_s=60)
        assert self.validated(node) > self._validated_before[node]

    def validated(self, node: str) -> int:
        path = self.nodes[node].directory / "validated"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def node_of(self, task: int, *, other_than: str = "") -> str:
        def found() -> bool:
            view = self.ada.task(task).task
            return view.state.value == "running" and len(view.nodes) == 1 and view.nodes[0] != other_than

        wait_for(found, f"task {task} runs elsewhere than on {other_than!r}", limit_s=90)
        return self.ada.task(task).task.nodes[0]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "validate.py").write_text(VALIDATION)
    health = HealthConfig(
        program=(sys.executable, tests.support.planted_health.__file__),
        validation=(sys.executable, str(tmp_path / "validate.py")),
        required=("infiniband", "gpu_count"), breaker_share=0.5, period_ms=1500, test_every_ms=500, back_off_ms=0,
        probation_ms=1, probe_spacing_ms=50,
    )  # fmt: skip
    nodes = {name: Node(tmp_path / name) for name in ("a", "b", "c", "d")}
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(
            ManagerProcess(tmp_path / "manager", health=health, history=f"sqlite:///{tmp_path / 'history.db'}")
        )
        admin, ada = (stack.enter_context(manager.client(name)) for name in ("admin", "ada"))
        for node in nodes.values():
            stack.enter_context(agent_process(manager, node.directory, NODE_DIRECTORY=str(node.directory)))
        wait_for(lambda: nodes_heard(admin) == len(nodes), "all nodes are there")
        yield Platform(nodes, admin, ada)


def test_each_of_seven_faults_is_acted_on_and_the_task_ends_as_if_there_had_been_none(
    platform: Platform, tmp_path: Path
) -> None:
    state, release = tmp_path / "digest", tmp_path / "release"
    (task,) = platform.ada.submit(
        task_of(tmp_path / "train.py", "t", str(state), str(release), max_requeues=0), key="t"
    )
    place = platform.node_of(task)
    moves = []
    for fault, cause in (
        (Node.loses_its_link, "infiniband (down)"),
        (Node.has_an_xid_79, "xid_79"),
        (Node.loses_its_gpus, "missing"),
        (Node.has_memory_errors, "uncorrected"),
    ):
        platform.plant(place, fault)
        moved_to = platform.node_of(task, other_than=place)
        platform.wait_until_out(place)
        moves.append((place, cause))
        assert cause in platform.reason_of(place)
        platform.repairs(place)
        place = moved_to

    idle = [name for name in platform.nodes if name != place]
    platform.plant(idle[0], Node.has_a_wrong_clock)
    platform.plant(idle[1], Node.has_slow_memory)
    for name, words in zip(idle, ("offset", "12 GB/s"), strict=False):
        platform.wait_until_out(name)
        assert words in platform.reason_of(name)
        platform.repairs(name)

    platform.plant(place, Node.is_full)  # a user can have done it: the run stays, and no other one comes
    wait_for(lambda: platform.state_of(place) == "suspect", f"{place} is held: {platform.reason_of(place)}", limit_s=60)
    release.touch()
    wait_for(lambda: platform.ada.task(task).task.state is FINISHED, "the end of the task", limit_s=60)
    platform.wait_until_out(place)
    assert "space" in platform.reason_of(place)
    platform.repairs(place)

    ended = platform.ada.task(task)
    assert (ended.task.outcome, ended.task.requeues) == (Outcome.SUCCEEDED, 0)
    assert state.read_text() == result_of_an_undisturbed_run()
    assert [run.nodes for run in ended.runs] == [*((name,) for name, _ in moves), (place,)]
    for run, (_, cause) in zip(ended.runs, moves, strict=False):
        assert (run.cause, cause in run.leave_reason) == (Cause.STOPPED, True), "what it cost is the fault's"
    assert ended.runs[-1].cause is Cause.SUCCEEDED
    assert all(run.ended_ns is None or run.ended_ns - run.scheduled_ns < 600 * SECOND for run in ended.runs)
    each_cause_has_what_it_cost(platform, tmp_path / "tables", task, ended.runs)


CAUSES: Final = (("ib_link", "down"), ("gpu_unavailable", "xid_79"), ("gpu_unavailable", "missing"),
                  ("main_memory", "uncorrected"))  # fmt: skip
"""As the tables know the faults that moved the task, in their order."""


def each_cause_has_what_it_cost(platform: Platform, tables: Path, task: int, runs: tuple[RunView, ...]) -> None:
    """GPU-hours of nodes of 8: of each run that a fault ended, its work, as no checkpoint was told of, the wait for the
    next run, and its restart."""
    wait_for(
        lambda: any(one.id == task for one in platform.admin.past_tasks().tasks), "the history has the end", limit_s=60
    )
    import_platform(platform.admin, str(tables), clock=Clock())
    with open_tables(str(tables)) as connection:
        found = characterise(connection, gpus_per_node=8)
    causes = {(one.symptom, one.cause): one for one in found.losses.causes}
    assert set(causes) == set(CAUSES)
    known = {entry.number: entry for entry in platform.admin.run_page().entries if entry.task == task}
    begin_ns = {number: entry.ready_ns or 0 for number, entry in known.items()}
    for kind, run, following in zip(CAUSES, runs[:-1], runs[1:], strict=True):
        assert run.ended_ns is not None
        cost, hours = causes[kind], 8 / (3600 * SECOND)
        assert cost.failures == 1
        restarted_ns = begin_ns[run.number] if run is not runs[0] else 0
        assert cost.work == pytest.approx((run.ended_ns - run.scheduled_ns - restarted_ns) * hours)
        assert cost.wait == pytest.approx((following.scheduled_ns - run.ended_ns) * hours)
        assert cost.restart == pytest.approx(begin_ns[following.number] * hours)
        assert cost.lost == pytest.approx(cost.work + cost.wait + cost.restart)
        assert cost.lost > 0
    by_node: dict[str, float] = {}
    for kind, run in zip(CAUSES, runs, strict=False):
        by_node[run.nodes[0]] = by_node.get(run.nodes[0], 0.0) + causes[kind].lost
    assert {one.node: one.lost for one in found.losses.nodes} == pytest.approx(by_node)
