"""`--begin-before`: slow tests that have not begun by then are named, and start nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

ROOT = Path(__file__).parents[3]
FILE = "tests/e2e/fs/chunks/test_storage_processes.py"
"""Its slow tests start clusters."""


@pytest.mark.slow
def test_slow_tests_whose_time_has_passed_are_named_and_not_begun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'of'}", FILE]
    command += ["-m", "slow and not campaign", "--begin-before", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=allowed_s(120), check=False)
    *_, last = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout[-2000:]
    assert "skipped" in last
    assert "passed" not in last
    assert "slow tests: the time for slow tests of this commit had passed" in done.stdout
    assert f"{FILE}::test_" in done.stdout
