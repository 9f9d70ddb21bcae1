"""A killed, a hung, a late and an unreachable rank: each is named on every other rank, in time, and nobody hangs."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.network.tcp_proxy import Proxy
from tests.support.patience import allowed_s
from tests.support.ranks.processes import Event, Ranks, ranks_running

from fireflyer.base.units import SECOND

pytestmark = pytest.mark.processes

TIMEOUT_NS = 2 * SECOND
DEATH_LIMIT_S = 1.0
# docs/design/0023-collective-failures.md: 1.125 timeout + 0.3 s; and the slack of a busy test machine
HANG_LIMIT_S = 1.125 * TIMEOUT_NS / SECOND + 0.3 + 0.7
LAYOUTS = {
    "1x4": [0, 0, 0, 0],
    "2x2": [0, 0, 1, 1],
    "4x1": [0, 1, 2, 3],
    "3x2": [0, 0, 1, 1, 2, 2],
}
SMALL, LARGE = 1000, 2_000_000
TURNS = rotating(expected_s=2)


def in_full_swing(ranks: Ranks, nodes: list[int]) -> None:
    ranks.wait_for("step", range(len(nodes)), count=2)


def all_name(ranks: Ranks, culprit: int, others: list[int], since: float, limit_s: float) -> dict[int, Event]:
    failed = ranks.wait_for("failed", others, limit_s=limit_s + 20)
    for rank, event in failed.items():
        assert (event["type"], event["culprit"]) == ("PeerFailed", culprit), f"rank {rank}: {event}"
        assert f"rank {culprit} (node " in event["message"], event
        came = re.search(r"allreduce #\d+ had completed (\d+) of (\d+) chunks on this rank", event["message"])
        assert came is None or int(came[1]) <= int(came[2]), event
        assert event["at"] - since < allowed_s(limit_s), f"rank {rank} took {event['at'] - since:.2f} s: {event}"
    again = ranks.wait_for("failed again", others)
    assert {event["culprit"] for event in again.values()} == {culprit}
    return failed


@pytest.mark.parametrize(
    ("layout", "victim", "count"),
    [
        ("1x4", 0, LARGE),
        ("1x4", 3, SMALL),
        ("2x2", 0, SMALL),
        ("3x2", 3, LARGE),
        pytest.param("1x4", 2, LARGE, marks=TURNS),
        pytest.param("2x2", 1, LARGE, marks=TURNS),
        pytest.param("2x2", 3, SMALL, marks=TURNS),
        pytest.param("4x1", 2, LARGE, marks=TURNS),
        pytest.param("3x2", 4, LARGE, marks=TURNS),
    ],
)
def test_a_killed_rank_is_named_by_all_others_within_a_second(
    layout: str, victim: int, count: int, tmp_path: Path
) -> None:
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if rank != victim]
    with ranks_running(tmp_path, nodes, "endless", timeout_ns=30 * SECOND, count=count) as ranks:
        in_full_swing(ranks, nodes)
        killed_at = ranks.send_signal(victim, signal.SIGKILL)
        all_name(ranks, victim, others, killed_at, DEATH_LIMIT_S)


@pytest.mark.parametrize(
    ("layout", "victim", "count"),
    [
        ("1x4", 0, LARGE),
        ("2x2", 2, LARGE),
        ("3x2", 5, SMALL),
        pytest.param("1x4", 3, SMALL, marks=TURNS),
        pytest.param("2x2", 1, LARGE, marks=TURNS),
        pytest.param("4x1", 3, SMALL, marks=TURNS),
    ],
)
def test_a_stopped_rank_is_named_by_all_others_in_time(layout: str, victim: int, count: int, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if rank != victim]
    with ranks_running(tmp_path, nodes, "endless", timeout_ns=TIMEOUT_NS, count=count) as ranks:
        in_full_swing(ranks, nodes)
        stopped_at = ranks.send_signal(victim, signal.SIGSTOP)
        all_name(ranks, victim, others, stopped_at, HANG_LIMIT_S)


@pytest.mark.parametrize(
    ("victim", "sign"),
    [
        (1, signal.SIGSTOP),
        pytest.param(0, signal.SIGKILL, marks=TURNS),
        pytest.param(2, signal.SIGSTOP, marks=TURNS),
        pytest.param(3, signal.SIGKILL, marks=TURNS),
    ],
)
def test_a_rank_that_ends_while_others_work_for_it_is_named(victim: int, sign: signal.Signals, tmp_path: Path) -> None:
    nodes, others = LAYOUTS["2x2"], [rank for rank in range(4) if rank != victim]
    with ranks_running(tmp_path, nodes, "endless", timeout_ns=TIMEOUT_NS, count=LARGE, registered=True) as ranks:
        in_full_swing(ranks, nodes)
        at = ranks.send_signal(victim, sign)
        all_name(ranks, victim, others, at, DEATH_LIMIT_S if sign == signal.SIGKILL else HANG_LIMIT_S)


@pytest.mark.parametrize(
    ("algorithm", "sign"),
    [
        ("ring", signal.SIGKILL),
        ("halving_doubling", signal.SIGSTOP),
        pytest.param("ring", signal.SIGSTOP, marks=TURNS),
        pytest.param("halving_doubling", signal.SIGKILL, marks=TURNS),
    ],
)
def test_a_node_that_ends_is_named_whatever_the_algorithm(algorithm: str, sign: signal.Signals, tmp_path: Path) -> None:
    nodes, victim, others = [0, 1, 2, 3, 4], 3, [0, 1, 2, 4]
    plan: dict[str, Any] = {
        "plan_nodes": nodes,
        "chunk_bytes": 65536,
        "window": 4,
        "algorithm": algorithm,
        "sockets": 2,
    }
    with ranks_running(tmp_path, nodes, "endless", timeout_ns=TIMEOUT_NS, count=300_000, **plan) as ranks:
        in_full_swing(ranks, nodes)
        at = ranks.send_signal(victim, sign)
        all_name(ranks, victim, others, at, DEATH_LIMIT_S if sign == signal.SIGKILL else HANG_LIMIT_S)


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ("1x4", 2),
        ("2x2", 2),
        ("3x2", 5),
        pytest.param("1x4", 0, marks=TURNS),
        pytest.param("2x2", 3, marks=TURNS),
        pytest.param("4x1", 1, marks=TURNS),
    ],
)
def test_a_rank_that_never_calls_is_named_by_all_others_in_time(layout: str, victim: int, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if rank != victim]
    with ranks_running(
        tmp_path, nodes, "endless", timeout_ns=TIMEOUT_NS, count=SMALL, late=[victim], late_after=30
    ) as ranks:
        in_full_swing(ranks, nodes)
        late_at = ranks.wait_for("late", [victim])[victim]["at"]
        failed = all_name(ranks, victim, others, late_at, HANG_LIMIT_S)
        assert all("has not entered allreduce #30" in event["message"] for event in failed.values())


def test_a_rank_that_is_late_but_comes_in_time_holds_nobody_up(tmp_path: Path) -> None:
    nodes, timeout_ns = LAYOUTS["2x2"], 4 * SECOND
    with ranks_running(tmp_path, nodes, "endless", timeout_ns=timeout_ns, count=SMALL) as ranks:
        in_full_swing(ranks, nodes)
        ranks.send_signal(3, signal.SIGSTOP)
        time.sleep(timeout_ns / SECOND / 2)  # the subject: half of the timeout
        ranks.send_signal(3, signal.SIGCONT)
        killed_at = ranks.send_signal(0, signal.SIGKILL)
        all_name(ranks, 0, [1, 2, 3], killed_at, DEATH_LIMIT_S)


@pytest.mark.parametrize(
    ("layout", "count"),
    [("2x2", LARGE), ("4x1", SMALL), pytest.param("2x2", SMALL, marks=TURNS), pytest.param("4x1", LARGE, marks=TURNS)],
)
def test_a_half_open_connection_is_named_by_all_others_in_time(layout: str, count: int, tmp_path: Path) -> None:
    """Node 0 is cut off: its connections stay open, but nothing arrives on them any more."""
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if nodes[rank] != 0]
    proxy = Proxy()
    try:
        with ranks_running(
            tmp_path, nodes, "endless", timeout_ns=TIMEOUT_NS, count=count, proxies={"0": proxy.port}
        ) as ranks:
            proxy.begin(ranks.wait_for("listening", [0])[0]["port"])
            in_full_swing(ranks, nodes)
            frozen_at = time.monotonic()
            proxy.freeze()
            all_name(ranks, 0, others, frozen_at, HANG_LIMIT_S)
            on_the_island = ranks.wait_for("failed", [rank for rank in range(len(nodes)) if nodes[rank] == 0])
            for event in on_the_island.values():
                assert event["type"] == "PeerFailed"
                assert event["culprit"] in others
    finally:
        proxy.close()


def test_half_open_data_connections_are_noticed_though_heartbeats_arrive(tmp_path: Path) -> None:
    proxy = Proxy()
    try:
        with ranks_running(
            tmp_path, [0, 1], "endless", timeout_ns=TIMEOUT_NS, count=LARGE, proxies={"0": proxy.port}
        ) as ranks:
            proxy.begin(ranks.wait_for("listening", [0])[0]["port"])
            in_full_swing(ranks, [0, 1])
            frozen_at = time.monotonic()
            proxy.freeze(spare=1)  # the control connection is made first
            for event in ranks.wait_for("failed").values():
                assert (event["type"], event["culprit"] in (0, 1)) == ("PeerFailed", True)
                assert "half-open connection" in event["message"]
                assert event["at"] - frozen_at < allowed_s(HANG_LIMIT_S)
    finally:
        proxy.close()


def test_children_of_a_killed_rank_do_not_hide_its_death(tmp_path: Path) -> None:
    """A data loader's workers inherit the connections of the rank that forks them, and outlive it for a while."""
    nodes = LAYOUTS["2x2"]
    with ranks_running(tmp_path, nodes, "endless", timeout_ns=30 * SECOND, count=SMALL, forks=True) as ranks:
        in_full_swing(ranks, nodes)
        killed_at = ranks.send_signal(2, signal.SIGKILL)
        all_name(ranks, 2, [0, 1, 3], killed_at, DEATH_LIMIT_S)


@pytest.mark.parametrize("layout", ["1x4", "4x1"])
def test_abort_reaches_every_rank(layout: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    with ranks_running(tmp_path, nodes, "aborting", by=1) as ranks:
        for event in ranks.wait_for("failed").values():
            assert event["type"] == "Aborted"
            assert "rank 1 (node " in event["message"]
            assert "enough" in event["message"]
        assert ranks.exit_codes() == [0] * len(nodes)


@pytest.mark.parametrize(("layout", "leaver"), [("1x4", 1), ("1x4", 0), ("2x2", 2)])
def test_a_process_that_ends_with_operations_pending_does_not_crash_and_is_named(
    layout: str, leaver: int, tmp_path: Path
) -> None:
    nodes = LAYOUTS[layout]
    with ranks_running(tmp_path, nodes, "leaving", timeout_ns=TIMEOUT_NS, leavers=[leaver]) as ranks:
        failed = ranks.wait_for("failed", [rank for rank in range(len(nodes)) if rank != leaver])
        assert all(f"rank {leaver} (node " in event["message"] for event in failed.values()), failed
        assert ranks.exit_codes() == [0] * len(nodes)
