"""What is registered for cleanup at exit is ended when its test process is gone, also when that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
HOLDER = """
import sys, time
from tests.support.jobs.cleanup import clean_up_at_exit
first, second, how = sys.argv[1:]
release = clean_up_at_exit(["sh", "-c", f"echo first > {first}"])
clean_up_at_exit(["sh", "-c", f"echo second > {second}"])
release()
print("held", flush=True)
if how == "killed":
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_was_not_taken_back_is_run_when_the_process_is_gone(how: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    os.mkfifo(second)
    command = [sys.executable, "-P", "-c", HOLDER, str(first), str(second), how]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        if how == "killed":
            os.killpg(holder.pid, signal.SIGKILL)
        assert second.read_text() == "second\n"  # opening it waits for who writes
        assert not first.exists()
        holder.communicate()
        assert holder.returncode == (-signal.SIGKILL if how == "killed" else 0)
