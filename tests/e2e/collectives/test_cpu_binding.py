"""The native threads of real processes run where a described machine puts them, and nowhere they may not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_sysfs import tree_of_nodes, write_tree
from tests.support.ranks.processes import ranks_running

from fireflyer.runtime.disk import RealDisk
from fireflyer.topology import parse_list

MODULE = "tests.support.ranks.bound_ranks"
NATIVE = {"ff-collectives", "ff-network", "ff-exchange"}


def status_of(pid: int) -> dict[str, set[tuple[int, ...]]]:
    """The processors of the threads of a process, by their names."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        cpus = parse_list(fields["Cpus_allowed_list"].encode(), 8192)
        found.setdefault(fields["Name"], set()).add(cpus)
    return found


def described(directory: Path, mine: tuple[int, int]) -> str:
    """A machine whose two processors have a NUMA node each."""
    write_tree(RealDisk(), str(directory), tree_of_nodes([[mine[0]], [mine[1]]], allowed=mine))
    return str(directory)


@pytest.fixture
def mine() -> tuple[int, int]:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one processor: there is nothing to choose from")
    return cpus[0], cpus[1]


@pytest.mark.processes
def test_threads_of_each_rank_run_near_its_memory(tmp_path: Path, mine: tuple[int, int]) -> None:
    root = described(tmp_path, mine)
    with ranks_running(tmp_path / "job", [0, 0], "", module=MODULE, root=root) as ranks:
        for rank, event in ranks.wait_for("bound").items():
            threads = status_of(event["pid"])
            names = NATIVE if rank == 0 else NATIVE - {"ff-network"}
            assert names <= set(threads)
            assert all(threads[name] == {(mine[rank],)} for name in names)
            assert mine in threads.get("python", set()) | threads.get("python3", set()), (
                "the program's own threads are left alone"
            )
            placed = f"rank {rank}: processors {mine[rank]}, arena on NUMA node {rank}"
            assert event["log"][-1 if rank == 0 else 0].startswith(f"INFO {placed}")
            if rank == 1 and not Path("/sys/devices/system/node/node1").exists():
                assert event["log"][1].startswith("WARNING rank 1: CPU or memory binding failed: arena: ")
            assert len(event["log"]) <= 2


@pytest.mark.processes
@pytest.mark.parametrize("params", [{"pin": False}, {"mask": "first"}])
def test_threads_stay_where_the_program_put_them(tmp_path: Path, mine: tuple[int, int], params: dict[str, Any]) -> None:
    """Not pinned when not wanted; and never outside the mask that a process has, whatever the description says."""
    root = described(tmp_path, mine)
    mask = [mine[0]] if "mask" in params else None
    with ranks_running(tmp_path / "job", [0, 0], "", module=MODULE, root=root, **{**params, "mask": mask}) as ranks:
        for rank, event in ranks.wait_for("bound").items():
            expected = {tuple(mask or mine)}
            threads = status_of(event["pid"])
            assert all(threads[name] == expected for name in NATIVE & set(threads))
            if mask and rank == 1:
                assert "none of its processors may be used by this process" in event["log"][-1]
            if not mask:
                assert event["log"] == []


@pytest.mark.processes
def test_ranks_that_the_launcher_has_placed_tell_each_other(tmp_path: Path, mine: tuple[int, int]) -> None:
    """Each may use one processor, of another NUMA node than the other's: only together do they see both nodes."""
    root, masks = described(tmp_path, mine), [[mine[1]], [mine[0]]]
    with ranks_running(tmp_path / "job", [0, 0], "", module=MODULE, root=root, masks=masks) as ranks:
        for rank, event in ranks.wait_for("bound").items():
            assert event["binding"].startswith(f"processors {masks[rank][0]}, arena on NUMA node {1 - rank} ")
            assert status_of(event["pid"])["ff-collectives"] == {tuple(masks[rank])}
