"""Limits of tests grow by what the machine takes away, and by nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

PROGRAM = """
import os, signal, sys
from tests.support import patience
os.getloadavg = lambda: (float(sys.argv[1]), 0, 0)
os.sched_getaffinity = lambda _: {0, 1}
patience.notice_stalls()
while patience._awake_s is None:
    pass
print(patience.allowed_s(1.0), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print(patience.allowed_s(1.0), flush=True)
"""
STOOD_S = 0.5


def limits(load: float) -> list[float]:
    """Of a second, in a process before and after it was stopped for half a second."""
    command = [sys.executable, "-c", PROGRAM, str(load)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(STOOD_S)
        process.send_signal(signal.SIGCONT)
        return [float(line) for line in process.communicate()[0].split()]


def test_a_limit_grows_with_the_load_and_by_the_time_in_which_the_process_stood_still() -> None:
    before, after = limits(1.0)
    assert before >= 1.0
    assert after - before >= STOOD_S - 0.1
    before, _ = limits(5.0)
    assert before >= 2.5


def test_a_limit_is_never_shorter() -> None:
    assert allowed_s(3.0) >= 3.0


LIMIT_S = 700.0


@pytest.mark.timeout(LIMIT_S)
def test_the_time_after_which_a_test_counts_as_hung_grows_as_well(
    request: pytest.FixtureRequest,
) -> None:
    """Its marker is in front of the stated one, which does not matter any more."""
    grown, stated = (marker.args[0] for marker in request.node.iter_markers("timeout"))
    assert stated == LIMIT_S
    assert grown >= LIMIT_S
