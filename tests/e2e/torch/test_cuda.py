"""CUDA tensors in the hfreduce group, with real processes that may share one GPU: `pytest -m gpu`.

None of this has a meaning without a GPU; without one it is skipped. How the copies are ordered is tested without one in
tests/unit/collectives/operations/test_device_path.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.torch_ranks.processes import Ended, run_torch_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

PAIRS = {2: [(0, 1)], 4: [(0, 1), (2, 3)]}
STEPS = 4


def ranks(scenario: str, world: int, *, paired: bool = False, **arguments: Any) -> list[Any]:
    pairs = PAIRS[world] if paired else []
    ended = run_torch_ranks(
        "tests.support.torch_ranks.cuda", (0,) * world, scenario=scenario, pairs=pairs, limit_s=380, **arguments
    )
    assert [rank.code for rank in ended] == [0] * world, [rank.errors[-3000:] for rank in ended]
    return [rank.result["result"] for rank in ended]


@pytest.mark.parametrize("paired", [False, True], ids=["each", "pairs"])
@pytest.mark.parametrize("world", [2, 4])
def test_sums_are_those_of_host_memory(world: int, paired: bool) -> None:
    ranks("reductions", world, paired=paired)


def test_float8_sums() -> None:
    ranks("float8", 2, paired=True)


@pytest.mark.parametrize("world", [2, 4])
def test_other_operations(world: int) -> None:
    ranks("others", world)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_may_wait_at_once_or_not(world: int) -> None:
    ranks("at_once", world)


@pytest.mark.parametrize("paired", [False, True], ids=["each", "pairs"])
def test_streams_order_operations(paired: bool) -> None:
    ranks("streams", 2, paired=paired)


def test_the_arena_can_be_pinned() -> None:
    ranks("pinned", 2)


def test_an_allreduce_is_copies_only(tmp_path: Path) -> None:
    for found in ranks("profile", 2, directory=str(tmp_path)):
        assert found["names"], "the profiler saw nothing"
        assert all(name.startswith("Memcpy") for name in found["names"]), found["names"]
        assert all("Pageable" not in name for name in found["names"]), found["names"]
        assert found["both_us"] > 0


def test_training_goes_as_over_gloo() -> None:
    for found in ranks("training", 2, steps=STEPS):
        expected = found.pop("gloo")
        for way, losses in found.items():
            for model in expected:
                assert losses[model] == pytest.approx(expected[model], rel=1e-3), (way, model)


@pytest.mark.parametrize("paired", [False, True], ids=["each", "pairs"])
def test_a_killed_rank_is_named(paired: bool) -> None:
    ended: list[Ended] = run_torch_ranks(
        "tests.support.torch_ranks.cuda",
        (0, 0, 0, 0),
        scenario="lose_a_rank",
        pairs=PAIRS[4] if paired else [],
        limit_s=120,
    )
    for rank in ended[:-1]:
        assert rank.result is not None, rank.errors[-3000:]
        assert rank.result["result"]["error"], "it was not noticed"
    told = [rank.result["result"]["error"] for rank in ended[:-1]]
    assert any("rank 3" in text or "died" in text for text in told), told
