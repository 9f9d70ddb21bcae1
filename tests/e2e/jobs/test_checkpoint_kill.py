"""A real process is killed while it saves; what it had reported as saved is there afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.checkpoint import verify

PROGRAM = Path(__file__).parents[2] / "support" / "checkpoints" / "endless_saver.py"


@pytest.mark.processes
def test_a_process_killed_while_saving_resumes_from_what_it_had_reported(tmp_path: Path) -> None:
    rng = random.Random(5)
    reported = 0
    for attempt in range(3):
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path), str(attempt)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process, process.stdout as lines:
            try:
                word, number = lines.readline().split()
                assert word == "restored"
                assert int(number) in (reported, reported + 1), "the newest reported, or one whose report was cut off"
                for _ in range(rng.randrange(1, 6)):
                    reported = int(lines.readline().split()[1])
            finally:
                os.kill(process.pid, signal.SIGKILL)
            for line in lines:  # what it had said before the signal arrived
                if line.startswith("saved") and line.endswith("\n"):
                    reported = int(line.split()[1])
        assert all(info.problem is None for info in verify(str(tmp_path)))
        assert max(info.step for info in verify(str(tmp_path))) in (reported, reported + 1)
