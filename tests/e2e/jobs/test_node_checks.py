"""`--on-failure`: a program decides on the node of a failed rank whose fault it was."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.support.jobs.launching import JobRun, leftovers, run, write_script
from tests.support.jobs.transcripts import ff_run
from tests.support.patience import allowed_s

from fireflyer.base.events import AttemptFailed, NodeChecked
from fireflyer.base.node_counters import NodeCounters
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.job import SHIPPED_NODE_CHECK, JobSpec
from fireflyer.cluster.supervisor.node_check import MAX_LOG_BYTES
from fireflyer.runtime.node_counters import read_counters

pytestmark = pytest.mark.processes

FAILS_ONCE = "sys.exit(attempt == 0 and rank == 1)"
FAILS = "if rank == 1: raise ValueError('bad')\ntime.sleep(60)"


def checked(tmp_path: Path, check: str, *, script: str = FAILS, **changes: object) -> JobRun:
    """A job of two nodes whose rank 1 fails, and a check that is written in Python."""
    (tmp_path / "check.py").write_text(f"import os, sys, time\n{check}\n")
    base = {"max_restarts": 1, "on_failure": (sys.executable, str(tmp_path / "check.py"))}
    return run(
        JobSpec(script=write_script(tmp_path, script), nodes=2, run_dir=str(tmp_path / "run"), **(base | changes))  # type: ignore[arg-type]
    )


def test_a_suspect_node_is_marked_and_the_job_restarted(tmp_path: Path) -> None:
    said = (
        "print(os.environ['FF_NODE_COUNTERS'])\nprint('suspect: disk: /a\\x1b[2J is full\\n \\n', end='')\nsys.exit(2)"
    )
    job = checked(tmp_path, said, script=FAILS_ONCE)
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    assert job.of(NodeChecked) == [
        NodeChecked(1, 1, 0, "suspect", "the check found the node at fault: disk: /a[2J is full")
    ]
    assert [(event.kind, event.restarting) for event in job.of(AttemptFailed)] == [("infrastructure", True)]
    counters = Path(job.result.logs_dir, "attempt-0", "rank-1.check.log").read_text().splitlines()[0]
    assert msgspec.json.decode(counters, type=NodeCounters).boot == read_counters().boot != ""


@pytest.mark.slow
def test_the_program_that_comes_with_fireflyer_is_named_in_place_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit(2)\n")
    env = {"PYTHONPATH": str(tmp_path)}
    job = checked(tmp_path, "", on_failure=(SHIPPED_NODE_CHECK, "--memory", "32MiB"), env=env, script="sys.exit(7)")
    assert [event.verdict for event in job.of(NodeChecked)] == ["sound"], "modules of the user's are not for it"


@pytest.mark.slow
def test_with_a_sound_node_the_job_ends_though_restarts_are_left(tmp_path: Path) -> None:
    show = "for name in sorted(os.environ):\n    if name.startswith('FF_FAILURE'): print(name, os.environ[name])"
    job = checked(tmp_path, show)
    assert (job.result.exit_code, job.result.attempts) == (1, 1)
    assert job.result.reason.endswith("; not restarted: --on-failure found nothing wrong with its node")
    directory = Path(job.result.logs_dir, "attempt-0")
    assert (directory / "rank-1.check.log").read_text().splitlines() == [
        "FF_FAILURE_ATTEMPT 0",
        "FF_FAILURE_EXIT_CODE 1",
        "FF_FAILURE_KIND user",
        f"FF_FAILURE_LOG {directory}/rank-1.log",
        "FF_FAILURE_NODE 1",
        "FF_FAILURE_RANK 1",
        f"FF_FAILURE_REASON {job.of(AttemptFailed)[0].reason}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "changes", "reason"),
    [
        ("sys.exit(1)", {}, "the check of the node exited with code 1, which is neither 0 nor 2"),
        ("os.abort()", {}, "the check of the node was killed by SIGABRT"),
        ("time.sleep(600)", {"on_failure_limit_ns": SECOND // 10}, "the check of the node did not end within 100 ms"),
    ],
    ids=["another code", "a signal", "too slow"],
)
def test_a_check_that_fails_itself_decides_nothing(
    tmp_path: Path, check: str, changes: dict[str, object], reason: str
) -> None:
    job = checked(tmp_path, check, script=FAILS_ONCE, **changes)
    assert (job.result.exit_code, job.result.attempts) == (0, 2), "the usual rules: an exit code is tried once more"
    ((verdict, why),) = [(event.verdict, event.reason) for event in job.of(NodeChecked)]
    assert (verdict, why) == ("unknown", reason)


@pytest.mark.slow
def test_the_output_of_a_check_is_bounded(tmp_path: Path) -> None:
    job = checked(tmp_path, "while True: print('x' * 10**6)", script=FAILS_ONCE)
    assert [event.verdict for event in job.of(NodeChecked)] == ["unknown"]
    log = Path(job.result.logs_dir, "attempt-0", "rank-1.check.log")
    assert log.stat().st_size <= MAX_LOG_BYTES
    log.unlink()


@pytest.mark.slow
def test_what_a_check_leaves_behind_is_killed(tmp_path: Path) -> None:
    check = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nsys.exit(2)"
    checked(tmp_path, check, script=FAILS_ONCE)  # `run` asserts that nothing is left
    assert leftovers(str(tmp_path / "run")) == []


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_check(tmp_path: Path) -> None:
    seconds = math.ceil(allowed_s(20))
    check = f"import signal\nos.kill(int(os.environ['LAUNCHER']), signal.SIGINT)\ntime.sleep({10 * seconds})"

    started = time.monotonic()
    job = checked(tmp_path, check, env={"LAUNCHER": str(os.getpid())})
    assert job.result.exit_code == 130
    assert time.monotonic() - started < 5 * seconds


@pytest.mark.slow
def test_a_check_is_shown_and_a_command_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    wrong = ff_run(tmp_path, "--on-failure", "no-such-check -v", "job.py", script="raise ValueError('bad')")
    assert (wrong.code, wrong.out) == (2, [])
    assert wrong.err == ["error: --on-failure 'no-such-check' is not found or not executable; check its name and PATH"]
    shown = ff_run(tmp_path, "--on-failure", "sh -c 'exit 2'", "job.py")
    assert "ff     | node 0 is suspect: the check found the node at fault" in shown.out
    assert shown.code == 1
