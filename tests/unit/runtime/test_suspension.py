"""The memory that a rank shares with its supervisor, and what a script may call without `ff run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.suspension import SUSPENDED_EXIT_CODE, NodeCells
from fireflyer.runtime.suspension import get_whole_life_state, set_watchdog_time, set_whole_life_state, should_suspend
from fireflyer.runtime.suspension_memory import SharedCells, memory_barrier


def rank(program: str, memory: SharedCells, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FF_SUSPENSION": memory.path, **variables}
    text = "import atexit, os, sys\nfrom fireflyer.cluster.sdk import *\n" + program
    return subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False)


def test_a_rank_reads_what_its_supervisor_writes() -> None:
    memory = SharedCells.create()
    node = NodeCells([memory.cells])
    node.hold()
    node.set_horizon(3)
    program = "print([should_suspend() for _ in range(4)])\natexit.register(print, 'flushed')\ngo_suspend()\n"
    done = rank(program, memory)
    assert done.stdout == "[False, False, True, True]\nflushed\n", done.stderr
    assert done.returncode == SUSPENDED_EXIT_CODE
    assert node.points(exact=memory_barrier()) in ((4,), (5,))
    assert node.has_left(0)
    memory.close()


def test_a_rank_knows_until_when_it_has_to_leave() -> None:
    memory = SharedCells.create()
    program = "print(suspend_deadline_ns())"
    assert rank(program, memory, FF_SUSPEND_GRACE_NS="7000").stdout == "None\n", "nobody has asked"
    NodeCells([memory.cells]).hold(1000)
    assert rank(program, memory).stdout == "None\n", "nobody has said how long"
    memory.close()
    memory = SharedCells.create()
    NodeCells([memory.cells]).hold(1000)
    assert rank(program, memory, FF_SUSPEND_GRACE_NS="7000").stdout == "8000\n"
    memory.close()


def test_a_process_that_a_rank_forks_is_not_the_rank() -> None:
    memory = SharedCells.create()
    node = NodeCells([memory.cells])
    node.hold()
    node.set_horizon(0)
    program = (
        "first = should_suspend()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(should_suspend())\n"
        "print(first, os.waitpid(child, 0)[1])\n"
    )
    assert rank(program, memory).stdout == "True 0\n"
    assert not node.has_left(0)
    memory.close()


def test_a_rank_cannot_shorten_the_memory_that_its_supervisor_has_mapped() -> None:
    memory = SharedCells.create()
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(memory.path, 0)
    memory.close()


def test_a_file_that_is_no_such_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    for path in (tmp_path / "short", tmp_path / "missing"):
        with pytest.raises(FireflyerError, match="FF_SUSPENSION"):
            SharedCells.open(str(path))


def test_without_a_launcher_nobody_is_asked_and_the_state_is_the_process_s_own() -> None:
    assert not should_suspend()
    set_whole_life_state(-5)
    assert get_whole_life_state() == -5
    set_watchdog_time(10)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="step -1 is out of range"):
        should_suspend(-1)
    with pytest.raises(UsageError, match="does not fit into 64 bits"):
        set_whole_life_state(1 << 63)
    with pytest.raises(UsageError, match="give 0 for none"):
        set_watchdog_time(-1)
