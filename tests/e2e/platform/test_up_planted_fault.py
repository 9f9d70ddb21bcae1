"""`ff up` with a file, as a user has it, and a fault planted on one of its nodes: the task there ends on another one as
if there had been none, the node returns by its validation alone, and the time that was lost has the planted cause."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Final

import pytest
from tests.support.health import only_program
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.analytics.reliability.characterisation import characterise
from fireflyer.analytics.reliability.local_times import Clock
from fireflyer.analytics.reliability.tables import open_tables
from fireflyer.base.units import SECOND
from fireflyer.cli.reliability.platform_import import import_platform
from fireflyer.cluster.client import Client
from fireflyer.cluster.schema.tasks import Outcome

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PERIOD_S: Final = 3
UP: Final = f"""\
agents = 4
[health]
enabled = true
policy = "policy.toml"
period = "{PERIOD_S}s"
"""
CHECK: Final = """\
bad={directory}/platform/$(cat {directory}/broken 2>/dev/null || echo none)/state/health
case "$(tr '\\0' ' ' < /proc/$PPID/cmdline)" in
*"$bad"*) echo "MEMORY CRITICAL: 12 GB/s"; exit 2 ;;
esac
echo "MEMORY OK: 180 GB/s"
"""
"""All agents are on one machine: which of them looks stands in the state directory of the checks that run this."""
STEPS: Final = 200
TRAIN: Final = f"""\
import hashlib, os, sys, time
state, release = sys.argv[1:]
try:
    step, digest = open(state).read().split()
except FileNotFoundError:
    step, digest = 0, "begin"
step = int(step)
while step < {STEPS} or not os.path.exists(release):
    if step < {STEPS}:
        digest, step = hashlib.sha256(f"{{digest}} {{step}}".encode()).hexdigest(), step + 1
        with open(state + ".new", "w") as file:
            file.write(f"{{step}} {{digest}}")
        os.replace(state + ".new", state)
    time.sleep(0.01)
"""


def undisturbed() -> str:
    digest = "begin"
    for step in range(STEPS):
        digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
    return f"{STEPS} {digest}"


def state_of(client: Client, node: str) -> str:
    health = client.node(node).health
    return "healthy" if health is None else health.state


def test_slow_memory_of_a_node_of_ff_up_moves_its_task_and_costs_what_it_costs(tmp_path: Path) -> None:
    (tmp_path / "up.toml").write_text(UP)
    (tmp_path / "check.sh").write_text(CHECK.format(directory=tmp_path))
    (tmp_path / "policy.toml").write_text(only_program("site_memory", tmp_path / "check.sh"))
    (tmp_path / "train.py").write_text(TRAIN)
    state, release = tmp_path / "digest", tmp_path / "release"
    with RunningPlatform(tmp_path / "platform", file=tmp_path / "up.toml") as platform:
        client = platform.client()
        task = task_of(tmp_path / "train.py", "t", str(state), str(release), max_requeues=0)
        (number,) = client.submit(task, key="t")
        begun = platform.until(client, number, lambda found: found.task.state.value == "running", "it runs")
        place = begun.task.nodes[0]
        wait_for(lambda: state.exists(), "it trains")

        (tmp_path / "broken").write_text(f"{place}\n")
        planted_s = time.monotonic()
        wait_for(lambda: state_of(client, place) not in ("healthy", "suspect"), f"{place} is out", limit_s=60)
        acted_s = time.monotonic() - planted_s
        moved = platform.until(
            client, number,
            lambda found: found.task.state.value == "running" and found.task.nodes[:1] not in ((), (place,)),
            "it runs elsewhere", limit_s=90,
        )  # fmt: skip
        health = client.node(place).health
        assert health is not None
        assert "12 GB/s" in health.reason
        assert state_of(client, place) != "healthy"

        (tmp_path / "broken").unlink()
        wait_for(lambda: state_of(client, place) in ("probation", "returned"), f"{place} returns", limit_s=90)
        release.touch()
        ended = platform.finished(client, number)
        assert (ended.task.outcome, ended.task.requeues) == (Outcome.SUCCEEDED, 0)
        assert state.read_text() == undisturbed()
        first, last = ended.runs
        assert (first.nodes, last.nodes) == ((place,), moved.task.nodes)
        assert "12 GB/s" in first.leave_reason
        assert first.ended_ns is not None
        wait_for(lambda: any(one.id == number for one in client.past_tasks().tasks), "the history has it", limit_s=60)
        import_platform(client, str(tmp_path / "tables"), clock=Clock())

    with open_tables(str(tmp_path / "tables")) as tables:
        found = characterise(tables, gpus_per_node=8)
    (cost,) = found.losses.causes
    assert (cost.failures, [one.node for one in found.losses.nodes]) == (1, [place])
    assert cost.wait == pytest.approx((last.scheduled_ns - first.ended_ns) * 8 / (3600 * SECOND))
    assert cost.lost > 0
    print(f"acted on after {acted_s:.1f} s of a period of {PERIOD_S} s")
