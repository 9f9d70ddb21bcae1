"""Every way to train over PyTorch, every fault in the middle of a backward pass: all others are told who, where, when.

The ways: stock DDP over the process group, stock DDP with the communication hook, our own DDP, FSDP2 with the hooks,
and FSDP2 over the process group.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.patience import allowed_s
from tests.support.ranks.processes import Event, Ranks
from tests.support.torch_ranks.processes import torch_ranks_running

pytestmark = pytest.mark.processes

MODULE = "tests.support.torch_ranks.fault_ranks"
WAYS = ("hfreduce", "hook", "ours", "fsdp hooks", "fsdp hfreduce")
TIMEOUT_S = 2
DEATH_LIMIT_S = 1.0
# docs/design/0023-collective-failures.md: 1.125 timeout + 0.3 s; and the slack of a busy test machine
HANG_LIMIT_S = 1.125 * TIMEOUT_S + 0.3 + 0.7
AT_ONCE_TIMEOUT_S = 60
"""Of groups in which something is to be told without waiting for it."""
NODES = [0, 0, 1]
FAST = {("fsdp hooks", "kill"), ("ours", "stop"), ("hook", "other")}
CALL = r"(allreduce|reduce_scatter|allgather|all_to_all) #\d+"


def cases(*faults: str) -> list[Any]:
    return [
        pytest.param(way, fault, marks=() if (way, fault) in FAST else rotating(expected_s=6))
        for way in WAYS
        for fault in faults
    ]


def failures(ranks: Ranks, who: list[int], victim: int, limit_s: float) -> dict[int, Event]:
    since = ranks.wait_for("fault", [victim])[victim]["at"]
    failed = ranks.wait_for("failed", who, limit_s=limit_s + 20)
    for rank, event in failed.items():
        assert event["at"] - since < allowed_s(limit_s), f"rank {rank} took {event['at'] - since:.2f} s: {event}"
        assert event["shared_files"] == [], "memory with a name outlives a process that is killed"
    return failed


def all_end(ranks: Ranks, who: list[int]) -> None:
    """By themselves, without a signal, and leave no process behind."""
    for rank in who:
        process = ranks.processes[rank]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert children.read_text(encoding="ascii") == ""
        process.stdin.close()
    assert [ranks.processes[rank].wait(allowed_s(60)) for rank in who] == [0] * len(who)


@pytest.mark.parametrize(("way", "fault"), cases("kill", "stop"))
@pytest.mark.parametrize("victim", [2])
def test_a_rank_that_dies_or_stops_in_backward_is_named_by_all_others(way: str, fault: str, victim: int) -> None:
    others = [rank for rank in range(len(NODES)) if rank != victim]
    timeout_s, limit_s = (30, DEATH_LIMIT_S) if fault == "kill" else (TIMEOUT_S, HANG_LIMIT_S)
    with torch_ranks_running(MODULE, NODES, way=way, fault=fault, victim=victim, timeout_s=timeout_s) as ranks:
        for event in failures(ranks, others, victim, limit_s).values():
            assert f"rank {victim} (node {NODES[victim]}, host " in event["message"], event
            if fault == "kill" and " during " not in event["message"]:
                continue  # found dead before the others were in the operation
            how_far = r"had (completed \d+ of \d+ chunks|not begun) on this rank"
            assert re.search(rf"{CALL} {how_far}", event["message"]), event
        all_end(ranks, others)
        if fault == "kill":
            assert ranks.processes[victim].wait(allowed_s(10)) == -signal.SIGKILL


@pytest.mark.parametrize(("way", "fault"), cases("other"))
def test_a_rank_that_calls_something_else_in_backward_is_told_to_all(way: str, fault: str) -> None:
    everybody, victim = list(range(len(NODES))), 1
    with torch_ranks_running(MODULE, NODES, way=way, fault=fault, victim=victim, timeout_s=AT_ONCE_TIMEOUT_S) as ranks:
        for event in failures(ranks, everybody, victim, HANG_LIMIT_S).values():
            assert "allreduce" in event["message"], event
            assert "of 3 f32" in event["message"], event
            assert "all ranks must make the same calls in the same order" in event["message"], event
        all_end(ranks, everybody)
