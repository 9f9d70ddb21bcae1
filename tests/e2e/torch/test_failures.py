"""A rank that is killed in DDP's backward pass: the others are told its number at once, and end as processes should."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.torch_ranks.processes import run_torch_ranks

from fireflyer.collectives.flight import find_dumps, read_dumps

pytestmark = pytest.mark.processes

WAYS = ["hfreduce", "hook", "ours"]
TURNS = rotating(expected_s=30)


def lose_a_rank(way: str, nodes: tuple[int, ...], *, unhandled: bool) -> None:
    """The group's timeout is 40 s and more: who ends within 30 s was told of the death, and did not wait for it."""
    *survivors, dead = run_torch_ranks(
        "tests.support.torch_ranks.training", nodes, scenario="lose_a_rank", way=way, unhandled=unhandled, limit_s=30
    )
    assert dead.code == -signal.SIGKILL
    for rank in survivors:
        assert f"rank {len(nodes) - 1} (node {nodes[-1]}" in rank.result["error"], rank.errors[-2000:]
        assert rank.code == (1 if unhandled else 0), rank.errors[-2000:]  # no signal on the way out
        if not unhandled and way != "ours":
            assert rank.result["runtime"]


@pytest.mark.parametrize("way", ["hfreduce", pytest.param("hook", marks=pytest.mark.slow), "ours"])
def test_a_killed_rank_is_named_in_the_backward_pass_of_the_others(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_DUMP_DIR", str(tmp_path))
    lose_a_rank(way, (0, 0, 1), unhandled=False)
    if way != "ours":  # makes its communicator itself
        assert {dump.rank for _, dump in read_dumps(find_dumps([str(tmp_path)]))} == {0, 1}


def test_an_error_that_nobody_handles_ends_the_process_with_code_1() -> None:
    lose_a_rank("hfreduce", (0, 0, 0), unhandled=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["hfreduce", pytest.param("hook", marks=TURNS), pytest.param("ours", marks=TURNS)])
def test_no_way_out_crashes_in_6_deaths(way: str) -> None:
    for attempt in range(6):
        lose_a_rank(way, (0, 0, 0), unhandled=attempt % 2 == 1)


@pytest.mark.slow
@pytest.mark.campaign(expected_s=60)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_no_way_out_crashes_in_60_deaths(way: str) -> None:
    for attempt in range(60):
        lose_a_rank(way, (0, 0, 0), unhandled=attempt % 2 == 1)
