"""Strangers at the ports of agents, of `ff agent token`, of a platform's manager, and of jobs that run there; see
`test_strangers`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.e2e.jobs.test_agents import AGENT, HOME, issue, join
from tests.e2e.jobs.test_strangers import (
    CALLERS,
    TRAINING,
    all_ready,
    but_torchs,
    costs,
    digests,
    flood,
    grown,
    reported,
    spec_in,
    undisturbed,
)
from tests.support.jobs.launching import leftovers, wait_until
from tests.support.machines.machines import USER, Machine, Machines, needs_machines
from tests.support.network.strangers import places_of
from tests.support.patience import allowed_s
from tests.support.platform.running import RunningPlatform, task_of

from fireflyer.runtime.processes.guarded import descendants

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT: Final = Path(__file__).parents[3]
RANKS: Final = 2
COUNTS: Final = [2000, pytest.param(50_000, marks=pytest.mark.campaign)]
"""Of each of two tests."""


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Machines(["a"]) as machines:
        yield machines


@needs_machines
@pytest.mark.parametrize("count", COUNTS)
def test_a_job_by_an_agent_with_a_torch_group_computes_the_same_bits_while_another_machine_may_join(
    count: int, tmp_path: Path, machines: Machines
) -> None:
    calm = undisturbed(spec_in(tmp_path / "calm", "torch", ranks=RANKS, nodes=1))
    assert len(calm) == RANKS
    one = machines["a"]
    issuer, tokens = issue(machines, "a")
    assert join(one, tokens["a"]).returncode == 0
    assert issuer.wait(allowed_s(20)) == 0
    agent = one.start(AGENT, user=USER, stdout=subprocess.PIPE)
    assert agent.stdout is not None
    assert agent.stdout.readline().startswith("ready")
    waiting, _ = issue(machines, "another", expires="3600s")
    assert waiting.stderr is not None
    threading.Thread(target=waiting.stderr.read, daemon=True).start()  # it logs strangers, and nobody may hold it up
    one.run(["mkdir", f"{HOME}/job"], user=USER, check=True)
    directory = one.path(f"{HOME}/job")
    (directory / "job.py").write_text((tmp_path / "calm" / "job.py").read_text())
    options = ["--hosts=a", "--via=agent", f"--ranks-per-node={RANKS}", "--devices=cpu", f"--run-dir={HOME}/run"]
    command = ["ff", "run", "--quiet", *options, "job.py", f"{HOME}/job", "torch"]
    said = tmp_path / "said"
    with said.open("w") as log:
        job = one.start(command, cwd=f"{HOME}/job", user=USER, stdout=log, stderr=subprocess.STDOUT)
    wait_until(lambda: job.poll() is not None or (directory / "ready-1").exists(), allowed_s(60))
    assert job.poll() is None, said.read_text()
    all_ready(directory, one.path(f"{HOME}/run/events.jsonl"), RANKS)
    _flood_inside(one, directory, count)
    assert job.wait(allowed_s(60)) == 0, said.read_text()[-3000:]
    assert digests(directory) == calm


def _flood_inside(one: Machine, directory: Path, count: int) -> None:
    """As `flood`: all processes of the machine, and strangers that come from there."""
    proc, net = str(one.path("/proc")), f"/proc/{one.first}/net"
    pids = [pid for pid, _ in one.processes()]
    found = but_torchs(places_of(pids, proc=proc, net=net), directory, RANKS)
    assert len(found) >= 3 + 2 * RANKS, "the agent, `ff agent token`, the launcher, and two for each rank"
    before = costs(pids, proc)
    (directory / "start").touch()
    program = [sys.executable, "-m", "tests.support.network.strangers", json.dumps(found), str(count // CALLERS)]
    callers = [one.start([*program, str(seed)], cwd=ROOT, stdout=subprocess.PIPE) for seed in range(CALLERS)]
    assert sum(int(caller.communicate()[0]) for caller in callers) > 0.9 * count, "most of them were accepted"
    wait_until(lambda: not grown(before, proc), allowed_s(30), lambda: f"grown: {grown(before, proc)}")
    (directory / "flooded").touch()


@pytest.mark.parametrize("count", COUNTS)
def test_a_job_of_a_platform_computes_the_same_bits(count: int, tmp_path: Path) -> None:
    calm = undisturbed(spec_in(tmp_path / "calm", ranks=RANKS))
    directory = tmp_path / "disturbed"
    spec = spec_in(directory, ranks=RANKS)
    assert TRAINING in Path(spec.script).read_text()
    with RunningPlatform(tmp_path / "platform") as platform:
        admin = platform.client()
        (task,) = admin.submit(task_of(Path(spec.script), "job", *spec.args, nodes=RANKS), key="job")
        wait_until(lambda: len(list(directory.glob("ready-?"))) == RANKS, allowed_s(60))
        wait_until(lambda: sum(map(reported, tmp_path.glob("platform/**/events.jsonl"))) >= RANKS, allowed_s(60))
        known = [pid for pid, _ in leftovers(str(tmp_path))]
        pids = sorted({*known, *(pid for one in known for pid in descendants(one))})  # the launcher names no directory
        flood(directory, pids, count, places=2 + RANKS + 1 + 2 * RANKS, ranks=RANKS)
        platform.finished(admin, task)
    assert digests(directory) == calm
