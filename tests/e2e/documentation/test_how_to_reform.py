"""The programs of docs/how-to/reform-a-group.md do what the text says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

from fireflyer.identity.secrets import new_secret, save_secret

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TEXT = Path(__file__).parents[3] / "docs" / "how-to" / "reform-a-group.md"


def program(name: str) -> str:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", TEXT.read_text(), re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name} "))


STEPS = "STEPS, WEIGHTS = 3000"
MORE_STEPS = "STEPS, WEIGHTS = 10_000"
"""So that there is time for everything on a fast machine."""
WAITING = """
import runpy, sys
import numpy, fireflyer.collectives, fireflyer.identity.secrets, fireflyer.runtime.store
print("waiting", flush=True)
sys.stdin.readline()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program when it is given a line, and has imported before what takes long."""


class Shell:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, name: str, *arguments: str, wait: bool = False) -> subprocess.Popen[str]:
        path = self.directory / name
        if not path.exists():  # written anew it is empty for a moment, and a rank that reads it then ends silently
            path.write_text(program(name).replace(STEPS, MORE_STEPS))
        command = [sys.executable, *(["-c", WAITING] if wait else []), str(path), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    with ExitStack() as stack:
        yield shell
        for process in shell.processes:
            stack.enter_context(process)
            process.kill()


def line(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(start):
            return text
    raise AssertionError(f"no line {start!r}")


def test_a_loop_goes_on_without_a_killed_rank_and_with_a_new_one(shell: Shell, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    secret_file = str(tmp_path / "secret")
    save_secret(new_secret(), secret_file)
    server = shell.start("serve_store.py", secret_file)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    assert STEPS in program("train.py")
    late = shell.start("train.py", address, secret_file, "-1", "0", wait=True)
    line(late, "waiting")
    ranks = [shell.start("train.py", address, secret_file, str(rank), "3") for rank in range(3)]
    for rank in ranks:
        line(rank, "step 0 ")
    ranks[1].send_signal(signal.SIGKILL)
    for rank in (ranks[0], ranks[2]):
        assert "rank 1 (node 0" in line(rank, "lost:")
        assert line(rank, "step").split()[-1] == "2"
    assert late.stdin is not None
    late.stdin.write("\n")
    late.stdin.flush()
    everybody = [ranks[0], ranks[2], late]
    assert [line(rank, "step").split()[-3] for rank in everybody] == ["0", "1", "2"]
    ends = {line(rank, "done") for rank in everybody}
    assert len(ends) == 1
    assert next(iter(ends)).startswith("done 3 ")
    assert [rank.wait(allowed_s(30)) for rank in everybody] == [0, 0, 0]
