"""Messages between real processes: who is named when one dies, hangs, or never calls."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.patience import allowed_s
from tests.support.ranks.processes import Event, Ranks, ranks_running

from fireflyer.base.units import SECOND

pytestmark = pytest.mark.processes

TIMEOUT_NS = 2 * SECOND
DEATH_LIMIT_S = 1.0
# docs/design/0007-rank-to-rank.md: 1.125 timeout + 0.3 s; and the slack of a busy test machine
HANG_LIMIT_S = 1.125 * TIMEOUT_NS / SECOND + 0.3 + 0.9
LAYOUTS = {
    "1x4": [0, 0, 0, 0],
    "4x1": [0, 1, 2, 3],
    "2x2": [0, 0, 1, 1],
    "3+1": [0, 0, 0, 1],
}
SMALL, LARGE = 100, 300_000
TURNS = rotating(expected_s=2)


def all_name(ranks: Ranks, culprit: int, others: list[int], since: float, limit_s: float) -> dict[int, Event]:
    failed = ranks.wait_for("failed", others, limit_s=limit_s + 20)
    for rank, event in failed.items():
        assert (event["type"], event["culprit"]) == ("PeerFailed", culprit), f"rank {rank}: {event}"
        assert f"rank {culprit} (node " in event["message"], event
        assert event["at"] - since < allowed_s(limit_s), f"rank {rank} took {event['at'] - since:.2f} s: {event}"
    again = ranks.wait_for("failed again", others)
    assert {event["culprit"] for event in again.values()} == {culprit}
    return failed


@pytest.mark.parametrize(
    ("layout", "victim", "how", "size"),
    [
        ("1x4", 0, "ring", SMALL),
        ("1x4", 3, "all_to_all", LARGE),
        ("2x2", 2, "ring", LARGE),
        ("3+1", 3, "all_to_all", SMALL),
        pytest.param("4x1", 1, "all_to_all", LARGE, marks=TURNS),
        pytest.param("4x1", 0, "ring", SMALL, marks=TURNS),
        pytest.param("2x2", 1, "all_to_all", SMALL, marks=TURNS),
    ],
)
def test_a_killed_rank_is_named_by_all_others_within_a_second(
    layout: str, victim: int, how: str, size: int, tmp_path: Path
) -> None:
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if rank != victim]
    with ranks_running(tmp_path, nodes, "endless_exchange", timeout_ns=30 * SECOND, how=how, size=size) as ranks:
        ranks.wait_for("step", count=2)
        killed_at = ranks.send_signal(victim, signal.SIGKILL)
        all_name(ranks, victim, others, killed_at, DEATH_LIMIT_S)


@pytest.mark.parametrize(
    ("layout", "victim", "how", "size"),
    [
        ("1x4", 0, "ring", LARGE),
        ("2x2", 2, "all_to_all", LARGE),
        ("3+1", 1, "ring", SMALL),
        pytest.param("1x4", 2, "all_to_all", SMALL, marks=TURNS),
        pytest.param("4x1", 3, "ring", LARGE, marks=TURNS),
        pytest.param("4x1", 0, "all_to_all", LARGE, marks=TURNS),
    ],
)
def test_a_stopped_rank_is_named_by_all_others_in_time(
    layout: str, victim: int, how: str, size: int, tmp_path: Path
) -> None:
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if rank != victim]
    with ranks_running(tmp_path, nodes, "endless_exchange", timeout_ns=TIMEOUT_NS, how=how, size=size) as ranks:
        ranks.wait_for("step", count=2)
        stopped_at = ranks.send_signal(victim, signal.SIGSTOP)
        all_name(ranks, victim, others, stopped_at, HANG_LIMIT_S)


@pytest.mark.parametrize(
    ("layout", "victim", "how"),
    [
        ("1x4", 2, "ring"),
        ("2x2", 0, "all_to_all"),
        ("4x1", 1, "ring"),
        pytest.param("1x4", 0, "all_to_all", marks=TURNS),
        pytest.param("3+1", 3, "ring", marks=TURNS),
    ],
)
def test_a_rank_that_never_calls_is_named_by_all_others_in_time(
    layout: str, victim: int, how: str, tmp_path: Path
) -> None:
    nodes = LAYOUTS[layout]
    others = [rank for rank in range(len(nodes)) if rank != victim]
    with ranks_running(
        tmp_path,
        nodes,
        "endless_exchange",
        timeout_ns=TIMEOUT_NS,
        how=how,
        size=SMALL,
        late=[victim],
        late_after=30,
    ) as ranks:
        late_at = ranks.wait_for("late", [victim])[victim]["at"]
        failed = all_name(ranks, victim, others, late_at, HANG_LIMIT_S)
        said = (
            "has not entered all_to_all #30"
            if how == "all_to_all"
            else f"has not called send to rank {(victim + 1) % len(nodes)} "
        )
        assert all(said in event["message"] for event in failed.values()), failed


@pytest.mark.parametrize("layout", ["1x4", "2x2"])
def test_a_deadlock_of_the_program_is_named_as_one(layout: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    with ranks_running(tmp_path, nodes, "everyone_sends", timeout_ns=SECOND, size=LARGE) as ranks:
        for event in ranks.wait_for("failed").values():
            assert event["type"] == "UsageError"
            assert "the ranks wait for each other" in event["message"]
            assert "rank 0 in send #0 to rank 1" in event["message"]
        assert ranks.exit_codes() == [0] * len(nodes)


@pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1"])
def test_a_rank_that_waits_for_a_message_is_not_blamed_for_missing_an_allreduce(layout: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    with ranks_running(tmp_path, nodes, "message_beside_sum", timeout_ns=TIMEOUT_NS) as ranks:
        late_at = ranks.wait_for("late", [1])[1]["at"]
        for event in ranks.wait_for("failed", [0, 2, 3]).values():
            assert (event["type"], event["culprit"]) == ("PeerFailed", 1), event
            assert event["at"] - late_at < allowed_s(HANG_LIMIT_S)


def test_children_of_a_killed_rank_do_not_hide_its_death(tmp_path: Path) -> None:
    nodes = LAYOUTS["2x2"]
    with ranks_running(
        tmp_path, nodes, "endless_exchange", timeout_ns=30 * SECOND, how="ring", size=SMALL, forks=True
    ) as ranks:
        ranks.wait_for("step", count=2)
        killed_at = ranks.send_signal(2, signal.SIGKILL)
        all_name(ranks, 2, [0, 1, 3], killed_at, DEATH_LIMIT_S)
