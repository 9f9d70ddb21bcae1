"""Whether memory ran out is read from what the kernel counts: of both versions of control groups, and from its log."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fireflyer.cluster.supervisor.memory_events import MemoryEvents, killed_in_kernel_log, memory_groups

SECOND_US = 10**6


class Groups:
    """A control group of two levels, in files. Version 2 calls its files otherwise than version 1."""

    def __init__(self, root: Path, version: int, *, inner_max: str, outer_max: str) -> None:
        self.root, self.version = root, version
        base = root / "memory" if version == 1 else root
        self.levels = [base / "job" / "rank", base / "job"]
        self.levels[0].mkdir(parents=True)
        (root / "proc" / "7").mkdir(parents=True)
        v1 = "4:memory:/job/rank\n1:cpu:/other\n0::/\n"
        (root / "proc" / "7" / "cgroup").write_text(v1 if version == 1 else "0::/job/rank\n")
        for level, limit in zip(self.levels, (inner_max, outer_max), strict=True):
            (level / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(limit + "\n")
            self.count(level, 3)

    def count(self, level: Path, kills: int, *, reached: int = 3) -> None:
        if self.version == 1:
            (level / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        else:
            (level / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom {reached}\noom_kill {kills}\n")

    def watch(self) -> MemoryEvents:
        return MemoryEvents(memory_groups(7, proc=str(self.root / "proc"), root=str(self.root)))


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_in_the_group_names_its_limit(tmp_path: Path, version: int) -> None:
    groups = Groups(tmp_path, version, inner_max=str(512 << 20), outer_max=str(4 << 30))
    events = groups.watch()
    assert events.killed_since() == "", "kills of before do not count"
    for level in groups.levels[:version]:  # version 1 does not count in the groups around it
        groups.count(level, 4, reached=4)
    assert events.killed_since() == "cgroup limit 512 MiB"


@pytest.mark.parametrize(("version", "without"), [(1, str(2**63 - 4096)), (2, "max")])
def test_the_limit_of_a_group_around_it_counts_too(tmp_path: Path, version: int, without: str) -> None:
    groups = Groups(tmp_path, version, inner_max=without, outer_max=str(1536 << 20))
    events = groups.watch()
    groups.count(groups.levels[0], 4)
    groups.count(groups.levels[1], 4, reached=4)
    assert events.killed_since() == "cgroup limit 1.5 GiB"


def test_the_memory_of_the_machine_can_run_out_in_a_group_below_its_limit(tmp_path: Path) -> None:
    groups = Groups(tmp_path, 2, inner_max=str(1 << 40), outer_max="max")
    events = groups.watch()
    groups.count(groups.levels[0], 4)
    assert events.killed_since() == "memory of the machine"


def test_a_kernel_that_does_not_tell_is_no_error(tmp_path: Path) -> None:
    assert memory_groups(7, proc=str(tmp_path)) == []
    assert MemoryEvents([]).killed_since() == ""
    assert killed_in_kernel_log(7, 0, path=str(tmp_path / "kmsg")) == ""


def read_log(tmp_path: Path, records: list[str], pid: int) -> str:
    """A pipe gives one record a read as /dev/kmsg does, where the writer waits for it; here they are padded."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)

    def write() -> None:
        with open(path, "wb", buffering=0) as pipe:
            pipe.write(b"".join(record.encode().ljust(8192) for record in records))

    held = os.open(path, os.O_RDWR)
    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    try:
        return killed_in_kernel_log(pid, 5 * SECOND_US * 1000, path=str(path))
    finally:
        os.close(held)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("3,1,6000000,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB", "cgroup limit"),
        ("3,1,6000000,-;Out of memory: Killed process 77 (python) total-vm:1kB", "memory of the machine"),
        ("3,1,4000000,-;Out of memory: Killed process 77 (python) total-vm:1kB", ""),
        ("3,1,6000000,-;Out of memory: Killed process 777 (python) total-vm:1kB", ""),
        ("nonsense", ""),
    ],
    ids=["group", "machine", "before the rank was started", "another process", "nonsense"],
)
def test_the_kernel_log_names_the_process(tmp_path: Path, record: str, expected: str) -> None:
    assert read_log(tmp_path, ["6,0,5500000,-;eth0: link up", record], 77) == expected
