"""Processes go on without those that were killed, and with those that come: in bounded time, with the right bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.collectives.thread_ranks import together
from tests.support.patience import allowed_s
from tests.support.ranks.processes import Event, Ranks, store_running
from tests.support.ranks.reform_scenarios import sum_digest

pytestmark = pytest.mark.processes

TURNS = rotating(expected_s=3)
OFTEN = ((1, 6), (0, 2), (2, 4))
"""Who dies second and after how many calls, in every commit; the others take turns."""
LAYOUTS = {"1x4": [0, 0, 0, 0], "2x2": [0, 0, 1, 1], "4x1": [0, 1, 2, 3]}
REFORM_LIMIT_S = 4.0
"""A second for the killed rank to come after all, the rendezvous, and the slack of a busy test machine."""
SECOND_DEATH_LIMIT_S = 20.0
"""A rendezvous that fails (2 s, and 5 for the list of ranks), and 6 s of grace."""


class Job:
    def __init__(self, ranks: Ranks, store: str, secret_file: str) -> None:
        self.ranks = ranks
        self._given = {"store": store, "secret_file": secret_file, "world_size": 4}

    def start(self, rank: int, node: int, **more: Any) -> None:
        self.ranks.start(self._given | {"rank": rank, "node": node} | more, "tests.support.ranks.reform_scenarios")

    def start_all(self, nodes: Sequence[int], **more: Any) -> None:
        for rank, node in enumerate(nodes):
            self.start(rank, node, **more)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    tmp_path.chmod(0o700)
    with store_running(tmp_path) as (address, secret_file):
        ranks = Ranks()
        try:
            yield Job(ranks, address, secret_file)
        finally:
            ranks.close()


def check(formed: dict[int, Event], order: Sequence[int], nodes: list[int], limit_s: float) -> None:
    """Processes `order` have become ranks 0, 1, ... on `nodes`, and sum as a group that was made so."""
    assert [formed[process]["rank"] for process in order] == list(range(len(order)))
    digests = set(together(nodes, sum_digest))
    for event in formed.values():
        assert event["nodes"] == nodes
        assert event["took_s"] < allowed_s(limit_s), event
        assert event["registered"]
        assert {event["digest"]} == digests


@pytest.mark.parametrize("layout", ["2x2", pytest.param("1x4", marks=TURNS), pytest.param("4x1", marks=TURNS)])
def test_three_go_on_without_a_killed_one_and_then_with_a_new_one(layout: str, job: Job) -> None:
    nodes, victim = LAYOUTS[layout], 1
    job.start_all(nodes, last_size=4)
    job.ranks.wait_for("step", count=2)
    job.ranks.send_signal(victim, signal.SIGKILL)
    others = [0, 2, 3]
    failed = job.ranks.wait_for("failed", others)
    assert {event["culprit"] for event in failed.values()} == {victim}
    left = [nodes[rank] - (nodes[victim] if layout == "4x1" and rank > victim else 0) for rank in others]
    check(job.ranks.wait_for("formed", others), others, left, REFORM_LIMIT_S)
    job.start(-1, nodes[victim], last_size=4)
    grown = job.ranks.wait_for("formed", others, count=2) | job.ranks.wait_for("formed", [4])
    new_node = {"1x4": 0, "2x2": 0, "4x1": 3}[layout]
    check(grown, [*others, 4], [*left, new_node], REFORM_LIMIT_S)
    job.ranks.wait_for("done", [*others, 4])
    assert job.ranks.exit_codes() == [0, -signal.SIGKILL, 0, 0, 0]


@pytest.mark.parametrize(
    ("victim", "calls"),
    [
        pytest.param(victim, calls, marks=pytest.mark.slow if (victim, calls) in OFTEN else TURNS)
        for victim, calls in [(1, 6), *((v, n) for v in (0, 2) for n in (1, 2, 3, 4, 5, 7, 9, 11))]
    ],
)
def test_a_rank_that_dies_while_the_group_re_forms_is_left_out_too(victim: int, calls: int, job: Job) -> None:
    for rank, node in enumerate(LAYOUTS["2x2"]):
        job.start(rank, node, last_size=2, calls_left=calls if rank == victim else -1)
    job.ranks.wait_for("step", count=2)
    job.ranks.send_signal(3, signal.SIGKILL)
    others = [rank for rank in (0, 1, 2) if rank != victim]
    job.ranks.wait_for("done", others, limit_s=60)
    formed = {rank: [e for e in job.ranks._events[rank] if e["event"] == "formed"][-1] for rank in others}
    check(formed, others, [0, 0] if victim == 2 else [0, 1], SECOND_DEATH_LIMIT_S)
    assert job.ranks.processes[victim].wait(allowed_s(10)) == -signal.SIGKILL
