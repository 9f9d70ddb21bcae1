"""What real processes get: every operation, element type, way to reduce, layout and kind of memory, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.collectives.calls import PLACES
from tests.support.collectives.fp8_overflow import expected_clipped, overflows
from tests.support.ranks.processes import ranks_running

LAYOUTS = {
    "1x1": [0],
    "1x2": [0, 0],
    "1x4": [0, 0, 0, 0],
    "2x2": [0, 0, 1, 1],
    "2x1": [0, 1],
    "3x1": [0, 1, 2],
    "4x1": [0, 1, 2, 3],
    "2+1": [0, 0, 1],
    "3+1": [0, 0, 0, 1],
    "interleaved": [0, 1, 0, 1],
    "5x1": [0, 1, 2, 3, 4],
}
SMALL_PLAN: dict[str, Any] = {"chunk_bytes": 4096, "window": 4}
COUNTS = [0, 1, 63, 1024, 1025, 9973, 70_001]  # of 4 KiB chunks: none, parts, exactly one, many times the window
COMBINED_COUNTS = [*COUNTS[:-1], 25_013]
"""Where every operation meets every size and memory: the largest is still more than a window of each type, and takes a
third of the bytes. Those of `COUNTS` are sent with every operation and type, in every layout, by `make test`."""
SLOW = pytest.mark.slow
OFTEN = ("1x4", "2x2", "5x1")
"""Layouts of which every commit sends each size from each memory; the others take turns."""
ROUND_S = 0.8
"""Processor time of a round of all operations, of all ranks."""


def all_agree(directory: Path, layout: str, **params: Any) -> tuple[str, int]:
    """The digest of all results, and how many operations gave them."""
    nodes = LAYOUTS[layout]
    params = {"counts": COUNTS, "plan_nodes": nodes, **SMALL_PLAN, **params}
    with ranks_running(directory, nodes, "correctness", **params) as ranks:
        results = list(ranks.wait_for("result", limit_s=100 * len(range(*params.get("rounds", (0, 1))))).values())
        assert ranks.exit_codes() == [0] * len(nodes)
    assert len({event["digest"] for event in results}) == 1
    return results[0]["digest"], results[0]["operations"]


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation_type_and_size_agrees_with_numpy_and_bitwise_between_ranks(layout: str, tmp_path: Path) -> None:
    _, operations = all_agree(tmp_path, layout)
    assert operations > 190


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["1x4", "2x2", "3+1"])
def test_ranks_that_may_not_read_each_others_memory_get_the_same(layout: str, tmp_path: Path) -> None:
    all_agree(tmp_path, layout, peer_memory=False)


def combined() -> Iterator[Any]:
    """Layouts, ways to reach the memory of others on the node, and rounds: the first ones have every size and every
    memory, all of them half of the combinations of both."""
    first, end = len(PLACES), len(PLACES) * len(COMBINED_COUNTS) // 2
    turns = rotating(expected_s=first * ROUND_S)
    for layout, nodes in LAYOUTS.items():
        for peer_memory in (True, False):
            if not peer_memory and len(set(nodes)) == len(nodes):
                continue  # who is alone on its node has nobody whose memory to read
            name = f"{layout}-{'peer memory' if peer_memory else 'staged'}"
            yield pytest.param(layout, peer_memory, (0, first), id=name, marks=SLOW if layout in OFTEN else turns)
            for at in range(first, end, first):
                yield pytest.param(layout, peer_memory, (at, at + first), id=f"{name}-{at}", marks=turns)


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "peer_memory", "rounds"), list(combined()))
def test_every_operation_with_every_size_and_memory(
    layout: str, peer_memory: bool, rounds: tuple[int, int], tmp_path: Path
) -> None:
    all_agree(tmp_path, layout, peer_memory=peer_memory, rounds=rounds, counts=COMBINED_COUNTS)


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
@pytest.mark.parametrize("layout", ["2+1", "5x1"])
def test_the_other_algorithms_agree_as_well(layout: str, algorithm: str, tmp_path: Path) -> None:
    all_agree(tmp_path, layout, kinds=["allreduce"], rounds=(0, 2), algorithm=algorithm, sockets=3)


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["2+1", "5x1"])
def test_a_line_agrees_whatever_the_operation(layout: str, tmp_path: Path) -> None:
    """As across zones, where a ring would come back."""
    kinds = ["allreduce", "reduce_scatter", "allgather"]
    all_agree(tmp_path, layout, kinds=kinds, counts=COMBINED_COUNTS, algorithm="line", sockets=2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("layout", "params"),
    [
        pytest.param("1x4", {}, id="1x4"),
        pytest.param("2+1", {"algorithm": "ring"}, id="2+1-ring"),
        pytest.param("1x4", {"peer_memory": False}, id="1x4-staged", marks=rotating(expected_s=2)),
        pytest.param("2x2", {}, id="2x2", marks=SLOW),
        pytest.param("interleaved", {"peer_memory": False}, id="interleaved-staged", marks=rotating(expected_s=2)),
        pytest.param("5x1", {"algorithm": "halving_doubling"}, id="5x1-halving_doubling", marks=rotating(expected_s=2)),
        pytest.param("3x1", {}, id="3x1", marks=rotating(expected_s=2)),
    ],
)
def test_every_fp8_number_that_does_not_fit_is_counted_once(
    layout: str, params: dict[str, Any], tmp_path: Path
) -> None:
    nodes, counts = LAYOUTS[layout], [64, 9973, 70_001]  # on one node: in mailboxes, and not
    params = {"counts": counts, "plan_nodes": nodes, **SMALL_PLAN, **params}
    with ranks_running(tmp_path, nodes, "overflowing", **params) as ranks:
        results = ranks.wait_for("result")
        assert ranks.exit_codes() == [0] * len(nodes)
    expected = [expected_clipped(call, len(nodes)) for call in overflows(counts, len(nodes))]
    assert [sum(each) for each in zip(*(event["clipped"] for event in results.values()), strict=True)] == expected
    assert sum(expected) > 100_000


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["1x4", "2+1"])
def test_two_runs_give_the_same_bits_whatever_the_window(layout: str, tmp_path: Path) -> None:
    kinds, dtypes = ["allreduce"], ["f32", "bf16"]
    digests = {
        all_agree(
            tmp_path / str(window),
            layout,
            kinds=kinds,
            dtypes=dtypes,
            counts=[100_003],
            chunk_bytes=8192,
            window=window,
        )
        for window in (2, 8)
    }
    assert len(digests) == 1
