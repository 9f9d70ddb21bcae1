"""What `ff run` shows, line by line, when a second Ctrl-C comes and when a node is lost: transcripts of real
runs."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.jobs.launching import wait_until
from tests.support.jobs.transcripts import FF, Transcript, ff_environment, notices
from tests.support.machines.machines import WORK, Machines, needs_machines
from tests.support.patience import allowed_s

pytestmark = pytest.mark.processes

DEAF = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: print("deaf", flush=True))
print("up", flush=True)
while True:
    time.sleep(100)
"""


def shown_before_the_report(told: Transcript) -> list[str]:
    """Without the status that is shown after a second in which nothing else was."""
    return [line for line in told.out[: told.out.index("")] if line != "ff     | running"]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_ranks_that_do_not_heed_the_first(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(DEAF)
    with subprocess.Popen(
        [*FF, "run", "--run-dir", "out", "--shutdown-timeout=600", "job.py"],
        cwd=tmp_path, env=ff_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        shown = ""
        for line in ("rank 0 | up\n", "ff     | stopping\n"):
            while (read := process.stdout.readline()) != line:
                assert read, shown
                shown += read
            shown += read
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=allowed_s(30))
    told = Transcript(process.returncode, shown + out, err, tmp_path)
    assert told.code == 130
    assert told.err == ["stopped by Ctrl-C; logs are in out/logs"]
    assert shown_before_the_report(told) == [
        "ff     | job job: 1 node x 1 rank",
        "ff     | starting",
        "rank 0 | up",
        "rank 0 | deaf",
        "ff     | attempt 0 stopped: stopped by SIGINT",
        "ff     | stopping",
        "ff     | job ended after TIME: stopped by SIGINT",
    ]


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Machines(["a", "b"]) as machines:
        for machine in machines.values():
            machine.path(f"{WORK}/job.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
        yield machines


@pytest.mark.slow
@needs_machines
def test_a_machine_that_is_lost_is_named_with_why(machines: Machines) -> None:
    command = ["ff", "run", "--run-dir=out", "--hosts=a,b", "--lease=2", "job.py"]
    process = machines["a"].start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    shown = ""
    while shown.count("| up\n") < 2:
        shown += process.stdout.readline()
    machines.cut("b")
    out, err = process.communicate(timeout=allowed_s(60))
    told = Transcript(process.returncode, shown + out, err, Path(WORK))
    why = "node 1 (b) was lost: no heartbeat from its supervisor for TIME"
    assert told.code == 1
    assert told.err == [f"error: {why}; not restarted (--max-restarts is 0); logs are in out/logs"]
    assert [line for line in shown_before_the_report(told) if not line.startswith("rank ")] == [
        "ff     | job job: 2 nodes x 1 rank",
        "ff     | starting",
        "ff     | node 1 (b) lost: no heartbeat from its supervisor for TIME",
        f"ff     | attempt 0 failed: {why}",
        "ff     | stopping",
        f"ff     | job ended after TIME: {why}; not restarted (--max-restarts is 0)",
    ]
    wait_until(lambda: not machines["b"].processes(), allowed_s(20))


LOSES_ITS_NODE = """
import os, signal, time
if os.uname().nodename == "b" or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= 2:
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(1000)
"""


@pytest.mark.slow
@needs_machines
def test_a_machine_that_failed_twice_is_left_out_and_a_job_with_too_few_machines_ends(machines: Machines) -> None:
    """Rank 1 kills the supervisor of machine b, twice; then rank 0 that of machine a, twice."""
    for machine in machines.values():
        machine.path(f"{WORK}/job.py").write_text(LOSES_ITS_NODE)
    command = ["ff", "run", "--run-dir=out", "--hosts=a,b", "--nodes=1:2", "--max-restarts=9", "--lease=2", "job.py"]
    done = machines["a"].run(command, timeout_s=90)
    told = Transcript(done.returncode, done.stdout, done.stderr, Path(WORK))
    b, a = (f"{node} was lost: its supervisor was killed by SIGKILL" for node in ("node 1 (b)", "node 0 (a)"))
    why = (
        "0 of 2 hosts are left, and the job needs 1 (--nodes 1:2): a, b failed 2 times each; repair what failed, or "
        "give more hosts"
    )
    assert (told.code, told.err) == (1, [f"error: {why}; logs are in out/logs"])
    assert notices(told)[2:] == [
        b.replace(" was lost", " lost"),
        f"attempt 0 failed: {b}; restarting",
        "attempt 1 starts",
        b.replace(" was lost", " lost"),
        f"attempt 1 failed: {b}; restarting",
        "attempt 2 starts",
        "b failed twice; this job does not use it any more",
        "attempt 2 has 1 node, not 2: a",
        a.replace(" was lost", " lost"),
        f"attempt 2 failed: {a}; restarting",
        "attempt 3 starts",
        a.replace(" was lost", " lost"),
        f"attempt 3 failed: {a}",
        f"job ended after TIME: {why}",
    ]
