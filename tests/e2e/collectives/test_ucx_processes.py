"""Groups of real processes whose nodes talk through UCX, over its own tcp and its shared memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.patience import allowed_s
from tests.support.ranks.processes import Event, Ranks, ranks_running

from fireflyer.base.units import SECOND
from fireflyer.native import ucx_module

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not os.path.exists(ucx_module()), reason="this build has no UCX (Debian: libucx-dev)"),
]

TURNS = rotating(expected_s=3)
"""Of ways to send of which others below send, in another layout."""
TIMEOUT_NS = 2 * SECOND
DEATH_LIMIT_S = 1.0
HANG_LIMIT_S = 1.125 * TIMEOUT_NS / SECOND + 0.3 + 0.7  # as over TCP, see test_failures
LAYOUTS = {"2x1": [0, 1], "3x1": [0, 1, 2], "2x2": [0, 0, 1, 1]}
SMALL_PLAN: dict[str, Any] = {"chunk_bytes": 4096, "window": 4}
LARGE_PLAN: dict[str, Any] = {"chunk_bytes": 65536, "window": 8}  # frames that the receiver fetches
COUNTS = [0, 1, 63, 9973, 40_000]


def over_ucx(tls: str) -> dict[str, Any]:
    return {"transport": "ucx", "environment": {"UCX_TLS": tls}}


def digests(directory: Path, nodes: list[int], **params: Any) -> set[str]:
    with ranks_running(directory, nodes, "correctness", counts=COUNTS, plan_nodes=nodes, **params) as ranks:
        assert {event["transport"] for event in ranks.wait_for("joined").values()} == {params.get("transport", "tcp")}
        found = {str(event["digest"]) for event in ranks.wait_for("result").values()}
        assert ranks.exit_codes() == [0] * len(nodes)
    return found


@pytest.mark.slow  # the fast ones are in unit/collectives/groups/test_transports, with threads as ranks
@pytest.mark.parametrize(
    ("layout", "tls", "algorithm", "sockets"),
    [
        pytest.param("2x1", "tcp", "double_binary_tree", 1, marks=TURNS),
        ("2x2", "shm", "double_binary_tree", 1),
        pytest.param("2x1", "shm", "double_binary_tree", 2, marks=TURNS),
        pytest.param("2x2", "tcp", "double_binary_tree", 2, marks=TURNS),
        ("3x1", "tcp", "double_binary_tree", 1),
        pytest.param("3x1", "shm", "double_binary_tree", 1, marks=TURNS),
        pytest.param("3x1", "tcp", "ring", 2, marks=TURNS),
        ("3x1", "shm", "ring", 3),
        ("2x2", "tcp", "halving_doubling", 1),
        pytest.param("2x1", "posix", "ring", 1, marks=TURNS),
    ],
)
def test_the_bits_over_ucx_are_those_over_tcp(
    layout: str, tls: str, algorithm: str, sockets: int, tmp_path: Path
) -> None:
    nodes = LAYOUTS[layout]
    for number, plan in enumerate((SMALL_PLAN, LARGE_PLAN)):
        same = {"algorithm": algorithm, "sockets": sockets, **plan}
        expected = digests(tmp_path / f"tcp{number}", nodes, **same)
        assert digests(tmp_path / f"ucx{number}", nodes, **same, **over_ucx(tls)) == expected
        assert len(expected) == 1


def all_name(ranks: Ranks, culprit: int, others: list[int], since: float, limit_s: float) -> dict[int, Event]:
    failed = ranks.wait_for("failed", others, limit_s=limit_s + 20)
    for rank, event in failed.items():
        assert (event["type"], event["culprit"]) == ("PeerFailed", culprit), f"rank {rank}: {event}"
        assert event["at"] - since < allowed_s(limit_s), f"rank {rank} took {event['at'] - since:.2f} s: {event}"
    again = ranks.wait_for("failed again", others)
    assert {event["culprit"] for event in again.values()} == {culprit}
    return failed


@pytest.mark.parametrize(
    ("layout", "victim", "tls", "count", "forks"),
    [
        ("3x1", 1, "tcp", 2_000_000, True),
        ("2x2", 2, "shm", 2_000_000, False),
        pytest.param("3x1", 0, "tcp", 1000, False, marks=TURNS),
        pytest.param("3x1", 2, "shm", 1000, False, marks=TURNS),
        pytest.param("2x2", 3, "tcp", 2_000_000, False, marks=TURNS),
        pytest.param("3x1", 1, "shm", 2_000_000, True, marks=TURNS),
    ],
)
def test_a_killed_rank_is_named_within_a_second(
    layout: str, victim: int, tls: str, count: int, forks: bool, tmp_path: Path
) -> None:
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if rank != victim]
    with ranks_running(
        tmp_path, nodes, "endless", timeout_ns=30 * SECOND, count=count, forks=forks, **over_ucx(tls)
    ) as ranks:
        ranks.wait_for("step", count=2)
        killed_at = ranks.send_signal(victim, signal.SIGKILL)
        all_name(ranks, victim, others, killed_at, DEATH_LIMIT_S)


@pytest.mark.parametrize(
    ("layout", "victim", "tls", "count"),
    [
        ("2x1", 1, "tcp", 2_000_000),
        pytest.param("3x1", 1, "shm", 2_000_000, marks=TURNS),
        pytest.param("2x2", 3, "tcp", 1000, marks=TURNS),
        pytest.param("2x2", 0, "shm", 2_000_000, marks=TURNS),
    ],
)
def test_a_stopped_rank_is_named_in_time(layout: str, victim: int, tls: str, count: int, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if rank != victim]
    with ranks_running(tmp_path, nodes, "endless", timeout_ns=TIMEOUT_NS, count=count, **over_ucx(tls)) as ranks:
        ranks.wait_for("step", count=2)
        stopped_at = ranks.send_signal(victim, signal.SIGSTOP)
        all_name(ranks, victim, others, stopped_at, HANG_LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("tls", ["tcp", "shm"])
def test_an_abort_and_a_process_that_leaves_are_told_to_the_others(tls: str, tmp_path: Path) -> None:
    with ranks_running(tmp_path / "abort", LAYOUTS["3x1"], "aborting", by=2, **over_ucx(tls)) as ranks:
        for event in ranks.wait_for("failed").values():
            assert "aborted the group: enough" in event["message"]
        assert ranks.exit_codes() == [0, 0, 0]
    with ranks_running(tmp_path / "leave", LAYOUTS["3x1"], "leaving", leavers=[1], **over_ucx(tls)) as ranks:
        for event in ranks.wait_for("failed", [0, 2]).values():
            assert "rank 1 (node " in event["message"], event
        assert ranks.exit_codes() == [0, 0, 0]
