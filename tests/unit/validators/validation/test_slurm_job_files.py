"""What a command leaves that was killed: the next one cancels its jobs, and no others."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fireflyer.base.errors import Unreachable
from fireflyer.cluster.core.slurm.output import SlurmJob
from fireflyer.validators import slurm_job_files
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.core.validation.reports import NodeReport, report_line
from fireflyer.validators.slurm_job_files import JobFiles, cancel_left_jobs

NAMES = [f"ff-validate-{number:08x}" for number in range(5)]
REPORT = report_line(NodeReport(events=(), record=NodeRecord(node="x", model="m", seen_ns=1)))


class Queue:
    def __init__(self, *states: str, uid: int | None = None) -> None:
        """Of the jobs of `NAMES`, numbers 1, 2, …"""
        me = os.geteuid() if uid is None else uid
        self.known = [
            SlurmJob(id=number, name=name, uid=me, state=state)
            for number, (name, state) in enumerate(zip(NAMES, states, strict=False), 1)
        ]
        self.cancelled: list[int] = []

    async def jobs(self, names: Sequence[str]) -> tuple[SlurmJob, ...]:
        return tuple(one for one in self.known if one.name in names)

    async def cancel(self, slurm_id: int, name: str) -> None:
        assert self.known[slurm_id - 1].name == name
        self.cancelled.append(slurm_id)


def killed(outputs: Path, *texts: str) -> None:
    """A command that had jobs with these outputs."""
    files = JobFiles(str(outputs))
    for name, text in zip(NAMES, texts, strict=False):
        Path(files.new(name)).write_text(text)
    os.close(files._lock)


def left(outputs: Path) -> list[str]:
    return sorted(path.name for path in outputs.glob("*/*"))


def clears(queue: Queue, outputs: Path) -> list[str]:
    said: list[str] = []
    asyncio.run(cancel_left_jobs(queue, str(outputs), said.append))
    return said


def test_jobs_of_a_command_that_was_killed_are_cancelled_by_the_next_one(tmp_path: Path) -> None:
    killed(tmp_path, "", "half a line", REPORT, "Traceback: no disk")
    queue = Queue("RUNNING", "PENDING", "COMPLETED", "FAILED")
    assert clears(queue, tmp_path) == [
        f"a validation that was killed left job {number}: cancelled" for number in (1, 2)
    ]
    assert queue.cancelled == [1, 2]
    assert left(tmp_path) == [f"{NAMES[3]}.out"], "which says why it failed"
    assert clears(queue, tmp_path) == []
    assert queue.cancelled == [1, 2]


def test_nothing_is_left_of_one_that_had_no_jobs(tmp_path: Path) -> None:
    killed(tmp_path)
    assert clears(Queue(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_jobs_of_a_command_that_lives_and_of_other_users_are_left_alone(tmp_path: Path) -> None:
    files = JobFiles(str(tmp_path))
    Path(files.new(NAMES[0])).write_text("")
    queue = Queue("RUNNING")
    assert clears(queue, tmp_path) == []
    files.close()
    assert left(tmp_path) == [f"{NAMES[0]}.out"]
    assert clears(queue, tmp_path) == [], "it has ended by itself"
    killed(tmp_path, "")
    others = Queue("RUNNING", uid=os.geteuid() + 1)
    clears(others, tmp_path)
    assert (queue.cancelled, others.cancelled) == ([], [])


def test_a_slurm_that_does_not_answer_leaves_it_to_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, "")
    queue = Queue("RUNNING")

    async def away(slurm_id: int, name: str) -> None:
        raise Unreachable("scancel: Unable to contact slurm controller")

    with monkeypatch.context() as patched:
        patched.setattr(queue, "cancel", away)
        with pytest.raises(Unreachable):
            clears(queue, tmp_path)
    clears(queue, tmp_path)
    assert queue.cancelled == [1]
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_slurm_hears_of_late_is_cancelled_by_a_later_command(tmp_path: Path) -> None:
    """`sbatch` outlives the command that was killed, and slurmctld is busy."""
    killed(tmp_path, "", "")
    queue = Queue("RUNNING")
    clears(queue, tmp_path)
    assert queue.cancelled == [1]
    assert left(tmp_path) == [f"{NAMES[1]}.out", "lock"]
    clears(Queue("CANCELLED"), tmp_path)
    assert left(tmp_path) == [f"{NAMES[1]}.out", "lock"], "it is asked for again and again"
    queue = Queue("CANCELLED", "PENDING")
    clears(queue, tmp_path)
    assert queue.cancelled == [2]
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_slurm_has_never_heard_of_is_given_up_after_ten_minutes(tmp_path: Path) -> None:
    killed(tmp_path, "")
    (file,) = tmp_path.glob("*/*.out")
    os.utime(file, (time.time() - 601, time.time() - 601))
    assert clears(Queue(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_all_files_are_looked_at_before_the_lock_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job_files, "_BATCH", 2)
    killed(tmp_path, *[""] * 5)
    queue = Queue(*["RUNNING"] * 5)
    clears(queue, tmp_path)
    assert queue.cancelled == [1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_ends_meanwhile_is_left_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at its lock, which it still held, and the lock's end."""
    files, opened = JobFiles(str(tmp_path)), slurm_job_files._opened
    files.new(NAMES[0])

    def ends(directory: str, flags: int = 0) -> int:
        fd = opened(directory, flags)
        files.close()
        return fd

    with monkeypatch.context() as patched:
        patched.setattr(slurm_job_files, "_opened", ends)
        queue = Queue("RUNNING")
        assert clears(queue, tmp_path) == []
    assert queue.cancelled == []


def test_a_command_of_another_machine_is_dead_when_it_was_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free, as if it held within that machine only."""
    with monkeypatch.context() as patched:
        patched.setattr(socket, "gethostname", lambda: "another-machine")
        killed(tmp_path, "")
    (lock,) = tmp_path.glob("*/lock")
    queue = Queue("RUNNING")
    clears(queue, tmp_path)
    assert queue.cancelled == []
    os.utime(lock, (time.time() - 601, time.time() - 601))
    clears(queue, tmp_path)
    assert queue.cancelled == [1]
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_lives_says_so(tmp_path: Path) -> None:
    files = JobFiles(str(tmp_path))
    (lock,) = tmp_path.glob("*/lock")
    os.utime(lock, (1, 1))
    files.touch()
    assert time.time() - lock.stat().st_mtime < 300
    files.close()
