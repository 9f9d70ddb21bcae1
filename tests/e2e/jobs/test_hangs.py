"""Ranks that hang: before they are ended their stacks are taken, from scripts that know nothing of it."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
from tests.support.jobs.transcripts import ff_run
from tests.support.patience import allowed_s

pytestmark = pytest.mark.processes

HANGS = """
import os, threading, time
rank = int(os.environ["RANK"])

def waits_for_a_file_server():
    open(f"up-{rank}", "w").close()
    time.sleep(3600)

if rank == 0:
    while not os.path.exists("up-1"):
        time.sleep(0.01)
    raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")
threading.Thread(target=time.sleep, args=(3600,), daemon=True, name="helper").start()
waits_for_a_file_server()
"""


def silent() -> str:
    """Longer than a Python takes to start, here and now."""
    return f"{math.ceil(allowed_s(2))}s"


def test_the_stacks_of_a_rank_that_others_waited_for_are_in_a_file_and_not_on_the_terminal(tmp_path: Path) -> None:
    shown = ff_run(tmp_path, "--ranks-per-node", "2", "--quiet", "job.py", script=HANGS)
    assert shown.code == 1
    assert shown.err == [
        "note: where a rank hung is in out/logs/attempt-0/rank-1.stacks",
        "error: rank 0: RuntimeError: Timed out waiting 1800000ms for recv operation to complete, at job.py:12; its "
        "log is out/logs/attempt-0/rank-0.log",
    ]
    assert not [line for line in shown.out if line.startswith("rank 1")]
    stacks = (tmp_path / "out/logs/attempt-0/rank-1.stacks").read_text()
    assert re.search(r'File ".*job\.py", line 7 in waits_for_a_file_server\n', stacks)
    assert stacks.count("most recent call first") == 2, "of all threads"
    assert "waits_for_a_file_server" in (tmp_path / "out/logs/attempt-0/rank-1.log").read_text()
    assert not list(tmp_path.glob("core*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    ["import time\nprint('up')\ndef hangs(): time.sleep(3600)\nhangs()",
     "import os, signal\nprint('up')\ndef hangs(): os.kill(os.getpid(), signal.SIGSTOP)\nhangs()"],
    ids=["sleeping", "stopped"],
)  # fmt: skip
def test_the_watchdog_ends_a_job_that_says_nothing(tmp_path: Path, script: str) -> None:
    shown = ff_run(tmp_path, "--watchdog", silent(), "--quiet", "job.py", script=script)
    assert (shown.code, shown.out) == (1, ["rank 0 | up"])
    assert shown.err == [
        "note: where a rank hung is in out/logs/attempt-0/rank-0.stacks",
        "error: no rank printed or reported anything for TIME (--watchdog); logs are in out/logs",
    ]
    assert "in hangs" in (tmp_path / "out/logs/attempt-0/rank-0.stacks").read_text()


@pytest.mark.slow
def test_a_program_that_starts_python_has_its_stacks_taken_too(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("import time\ndef hangs(): time.sleep(3600)\nhangs()")
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{sys.executable} inner.py\nexit $?\n")
    (tmp_path / "job.sh").chmod(0o755)
    shown = ff_run(tmp_path, "--watchdog", silent(), "--quiet", "--no-python", "./job.sh")
    assert shown.code == 1
    assert "in hangs" in (tmp_path / "out/logs/attempt-0/rank-0.stacks").read_text()
