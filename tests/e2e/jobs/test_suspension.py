"""Jobs that are suspended: real launchers, supervisors and ranks, and SIGUSR1."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.support.jobs.launching import events_of, started_launcher, wait_until, write_script
from tests.support.patience import allowed_s

from fireflyer.base.events import JobEvent, RankExited, Suspended, SuspendRequested
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.schema.job import JobSpec, Timeouts
from fireflyer.cluster.sdk import SUSPENDED_EXIT_CODE

pytestmark = pytest.mark.processes

TRAINING = str(Path(__file__).parents[2] / "support" / "jobs" / "suspended_training.py")
QUICK = Timeouts(stop_grace_ns=300 * MS, suspend_settle_ns=300 * MS)

ASKS = """
from fireflyer.cluster.sdk import go_suspend, should_suspend, suspend_deadline_ns
for step in range(1, 100_000):
    print("step", step, flush=True)
    if should_suspend():
        print("left at", step, flush=True)
        print("time left", suspend_deadline_ns() - time.monotonic_ns(), flush=True)
        go_suspend()
    time.sleep(0.005)
"""


def spec_of(directory: Path, script: str, **changes: object) -> JobSpec:
    spec = JobSpec(script=script, run_dir=str(directory / "run"), nodes=2, ranks_per_node=2, devices="cpu")
    return msgspec.structs.replace(spec, **changes)


def printed(spec: JobSpec) -> str:
    return Path(spec.run_dir + ".out").read_text()


def suspend(spec: JobSpec, *, when: str = r"\[{rank}\] step", after_s: float = 0) -> tuple[int, list[JobEvent]]:
    """Runs the job, suspends it when every rank has printed a line like `when`; its exit code and its events."""
    with started_launcher(spec) as launcher:
        for rank in range(spec.world_size):
            line = re.compile(when.format(rank=rank))
            seen = lambda line=line: line.search(printed(spec)) or launcher.poll() is not None  # noqa: E731
            wait_until(seen, allowed_s(60), lambda: printed(spec))
        try:
            launcher.wait(after_s)
        except subprocess.TimeoutExpired:
            launcher.send_signal(signal.SIGUSR1)
        code = launcher.wait(allowed_s(60))
    return code, [entry.event for entry in events_of(os.path.join(spec.run_dir, "events.jsonl"))]


def only(kind: type[Suspended], events: list[JobEvent]) -> Suspended:
    (event,) = [event for event in events if isinstance(event, kind)]
    return event


def test_all_ranks_leave_at_the_same_call(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, write_script(tmp_path, ASKS))
    code, events = suspend(spec)
    assert code == SUSPENDED_EXIT_CODE
    left = set(re.findall(r"left at (\d+)", printed(spec)))
    assert len(left) == 1
    assert only(Suspended, events) == Suspended(attempt=0, horizon=int(left.pop()), ended_ranks=0)
    assert [event.exit_code for event in events if isinstance(event, RankExited)] == [SUSPENDED_EXIT_CODE] * 4
    time_left = [int(one) for one in re.findall(r"time left (\d+)", printed(spec))]
    assert len(time_left) == 4
    assert 0 < min(time_left) <= max(time_left) <= spec.suspend_grace_ns


def test_ranks_that_never_ask_are_terminated_and_then_killed(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, lambda *_: print('SIGTERM', flush=True))\nprint('step', flush=True)\n"
    script = write_script(tmp_path, deaf + "while True: time.sleep(100)\n")
    spec = spec_of(tmp_path, script, nodes=1, suspend_grace_ns=200 * MS, timeouts=QUICK)
    code, events = suspend(spec)
    assert code == SUSPENDED_EXIT_CODE
    assert only(Suspended, events) == Suspended(attempt=0, horizon=None, ended_ranks=2)
    assert printed(spec).count("SIGTERM") == 2
    assert "2 of 2 ranks did not leave by themselves and were stopped" in printed(spec)
    assert [event.exit_code for event in events if isinstance(event, RankExited)] == [137] * 2


@pytest.mark.slow
def test_where_rank_0_alone_asks_the_others_are_stopped_soon_after_it_has_left(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('step', flush=True)\nif rank: time.sleep(1000)\n" + ASKS)
    spec = spec_of(tmp_path, script, suspend_grace_ns=600 * SECOND, timeouts=QUICK)
    code, events = suspend(spec)
    assert code == SUSPENDED_EXIT_CODE
    assert only(Suspended, events).ended_ranks == 3


def test_a_rank_that_fails_while_it_saves_fails_the_job(tmp_path: Path) -> None:
    fails = ASKS.replace("        go_suspend()", "        sys.exit(9) if rank == 3 else time.sleep(1000)")
    code, events = suspend(spec_of(tmp_path, write_script(tmp_path, fails), timeouts=QUICK))
    assert code == 9
    assert not [event for event in events if isinstance(event, Suspended)]


@pytest.mark.slow
def test_a_rank_that_fails_while_it_saves_is_not_started_again(tmp_path: Path) -> None:
    fails = ASKS.replace("        go_suspend()", "        sys.exit(9) if rank == 3 else time.sleep(1000)")
    code, events = suspend(spec_of(tmp_path, write_script(tmp_path, fails), timeouts=QUICK, max_restarts=3))
    assert code == SUSPENDED_EXIT_CODE
    assert only(Suspended, events).attempt == 0


def test_ranks_that_leave_without_having_been_asked_suspend_the_job(tmp_path: Path) -> None:
    script = write_script(tmp_path, "from fireflyer.cluster.sdk import go_suspend\ngo_suspend()\n")
    spec = spec_of(tmp_path, script, nodes=1)
    with started_launcher(spec) as launcher:
        assert launcher.wait(allowed_s(60)) == SUSPENDED_EXIT_CODE
    events = [entry.event for entry in events_of(os.path.join(spec.run_dir, "events.jsonl"))]
    (requested,) = [event for event in events if isinstance(event, SuspendRequested)]
    assert requested.rank in (0, 1)


@pytest.mark.slow
def test_the_exit_code_85_alone_is_a_failure(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, write_script(tmp_path, "sys.exit(85)\n"), nodes=1, ranks_per_node=1)
    with started_launcher(spec) as launcher:
        assert launcher.wait(allowed_s(60)) == 1


LIFE = """
from fireflyer.cluster.sdk import get_whole_life_state, set_whole_life_state
if rank == 0:
    print("was", get_whole_life_state(), flush=True)
    set_whole_life_state(get_whole_life_state() - (1 << 40))
if attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(1000)
"""


def test_the_whole_life_state_survives_a_restart_and_is_on_disk(tmp_path: Path) -> None:
    script = write_script(tmp_path, LIFE)
    spec = spec_of(tmp_path, script, nodes=1, max_restarts=1, whole_life_state=7, timeouts=QUICK)
    with started_launcher(spec) as launcher:
        assert launcher.wait(allowed_s(60)) == 0
    assert re.findall(r"was (\S+)", printed(spec)) == ["7", str(7 - (1 << 40))]
    assert Path(spec.run_dir, "whole-life-state").read_text() == f"{7 - (2 << 40)}\n"


@pytest.mark.slow
@pytest.mark.campaign(expected_s=42)
@pytest.mark.rotates
@pytest.mark.timeout(900)
def test_a_job_that_is_suspended_again_and_again_learns_the_same_bits(tmp_path: Path) -> None:
    """Of one rank on each node: where nodes have several is seen above, and each start of a rank imports torch."""
    rng = random.Random(7)
    steps = 60
    args = (str(tmp_path / "whole" / "saved"), str(steps))
    undisturbed = spec_of(tmp_path / "whole", TRAINING, ranks_per_node=1, args=args)
    (tmp_path / "whole").mkdir()
    with started_launcher(undisturbed) as launcher:
        assert launcher.wait(allowed_s(120)) == 0
    weights = set(re.findall(r"weights (\S+)", printed(undisturbed)))
    assert len(weights) == 1
    begins, code, told = [0], SUSPENDED_EXIT_CODE, ""
    while code == SUSPENDED_EXIT_CODE:
        directory = tmp_path / f"run-{len(begins)}"
        directory.mkdir()
        args = (str(tmp_path / "saved"), str(steps))
        spec = spec_of(directory, TRAINING, ranks_per_node=1, args=args, suspend_grace_ns=600 * SECOND)
        code, events = suspend(spec, after_s=rng.random() / 20 if len(begins) < 4 else 1000)
        told = printed(spec)
        assert set(re.findall(r"from (\d+)", told)) == {str(begins[-1])}, "goes on where the last one left"
        if code == SUSPENDED_EXIT_CODE:
            horizon = only(Suspended, events).horizon
            assert horizon is not None
            assert only(Suspended, events).ended_ranks == 0
            begins.append(horizon)
    assert code == 0
    assert len(begins) >= 3
    assert set(re.findall(r"weights (\S+)", told)) == weights
