"""Sums of real processes: every element type, operation and size, on one node, several nodes and both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.rank_processes import ranks_running

DTYPES = ["f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i32", "i64"]
LAYOUTS = {
    "1x1": [0],
    "1x4": [0, 0, 0, 0],
    "2x2": [0, 0, 1, 1],
    "2x1": [0, 1],
    "3x1": [0, 1, 2],
    "4x1": [0, 1, 2, 3],
    "2+1": [0, 0, 1],
    "interleaved": [0, 1, 0, 1],
    "5x1": [0, 1, 2, 3, 4],
}
SMALL_PLAN: dict[str, Any] = {"chunk_bytes": 4096, "window": 4}
COUNTS = [0, 1, 63, 1024, 1025, 9973, 40_000]  # of 4 KiB chunks: none, parts, exactly one, many times the window


@pytest.mark.serial
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_type_operation_and_size_agrees_with_numpy_and_bitwise_between_ranks(layout: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    with ranks_running(
        tmp_path, nodes, "correctness", dtypes=DTYPES, counts=COUNTS, plan_nodes=nodes, **SMALL_PLAN
    ) as ranks:
        digests = {event["digest"] for event in ranks.wait_for("result").values()}
        assert len(digests) == 1
        assert ranks.exit_codes() == [0] * len(nodes)


@pytest.mark.serial
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
@pytest.mark.parametrize("layout", ["2+1", "5x1"])
def test_the_other_algorithms_agree_as_well(layout: str, algorithm: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    plan: dict[str, Any] = {"plan_nodes": nodes, "algorithm": algorithm, "sockets": 3, **SMALL_PLAN}
    with ranks_running(
        tmp_path, nodes, "correctness", dtypes=["f32", "bf16", "i64"], counts=[0, 1, 63, 9973, 40_000], **plan
    ) as ranks:
        digests = {event["digest"] for event in ranks.wait_for("result").values()}
        assert len(digests) == 1
        assert ranks.exit_codes() == [0] * len(nodes)


@pytest.mark.serial
@pytest.mark.parametrize("layout", ["1x4", "2+1"])
def test_two_runs_give_the_same_bits_whatever_the_window(layout: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    digests = set()
    for run, window in enumerate((2, 8)):
        plan: dict[str, Any] = {"plan_nodes": nodes, "chunk_bytes": 8192, "window": window}
        with ranks_running(
            tmp_path / str(run), nodes, "correctness", dtypes=["f32", "bf16"], counts=[100_003], **plan
        ) as ranks:
            digests |= {event["digest"] for event in ranks.wait_for("result").values()}
            assert ranks.exit_codes() == [0] * len(nodes)
    assert len(digests) == 1


@pytest.mark.serial
@pytest.mark.parametrize("layout", ["1x4", "2x2", "3x1"])
def test_many_operations_under_way_at_once_keep_their_order(layout: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[layout]
    with ranks_running(tmp_path, nodes, "pipelined", operations=120) as ranks:
        ranks.wait_for("result")
        assert ranks.exit_codes() == [0] * len(nodes)
