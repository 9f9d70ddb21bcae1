"""Dispatches between real processes, two nodes of two ranks: parity, random routings, a rank that dies or is slow."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.support.ranks.processes import ranks_running

from fireflyer.base.units import SECOND

pytestmark = [pytest.mark.slow, pytest.mark.processes]

NODES = [0, 0, 1, 1]


def test_two_thousand_random_routings_equal_the_oracle_bit_for_bit(tmp_path: Path) -> None:
    with ranks_running(tmp_path, NODES, "random_routings", timeout_ns=60 * SECOND, count=2000) as ranks:
        compared = ranks.wait_for("compared", limit_s=110)
        assert [event["different"] for event in compared.values()] == [0, 0, 0, 0]


def test_values_and_gradients_are_those_of_the_dense_layer_also_with_a_slow_rank(tmp_path: Path) -> None:
    with ranks_running(tmp_path, NODES, "endless_dispatch", timeout_ns=60 * SECOND, steps=5, slow=2) as ranks:
        ranks.wait_for("waits", [2])
        ranks.wait_for("step", [0, 1, 3], count=2)  # they are at their third
        ranks.say_to(2)
        last = ranks.wait_for("step", count=5)
        assert all(event["worst"] <= 1e-10 for event in last.values())
        assert any(event["worst"] > 0 for event in last.values())
        assert ranks.exit_codes() == [0] * 4


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_named_by_all_others(victim: int, tmp_path: Path) -> None:
    others = [rank for rank in range(4) if rank != victim]
    with ranks_running(tmp_path, NODES, "endless_dispatch", timeout_ns=30 * SECOND) as ranks:
        ranks.wait_for("step", count=3)
        ranks.send_signal(victim, signal.SIGKILL)
        failed = ranks.wait_for("failed", others)
        for event in failed.values():
            assert (event["type"], event["culprit"]) == ("PeerFailed", victim), event
