"""Real ranks under the silent-corruption guard: one flipped bit is found, and its rank and tensor are named."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from tests.support.torch_ranks.guarded import FLIP_AT
from tests.support.torch_ranks.processes import run_torch_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MODULE = "tests.support.torch_ranks.guarded"
WEIGHT = "2.weight"


def results(ranks: int, every: int) -> dict[str, Any]:
    ended = run_torch_ranks(MODULE, [0] * ranks, scenario="flips", every=every)
    assert [rank.code for rank in ended] == [0] * ranks, [rank.errors[-2000:] for rank in ended]
    assert all(rank.result == ended[0].result for rank in ended), "ranks come to different verdicts"
    return ended[0].result  # type: ignore[no-any-return]


def test_of_three_ranks_the_one_with_a_flipped_bit_is_named_with_the_tensor() -> None:
    found = results(3, every=1)
    for where, point, tensor, agreed in (
        ("parameter", "after_commit", f"parameter {WEIGHT}", FLIP_AT),
        ("moment", "after_commit", f"optimizer {WEIGHT} exp_avg_sq", FLIP_AT),
        ("gradient", "before_commit", f"gradient {WEIGHT}", FLIP_AT - 1),
    ):
        assert found[where] == {
            "step": FLIP_AT,
            "point": point,
            "finding": "ranks",
            "ranks": [2],
            "tensors": [tensor],
            "agreed": agreed,
        }, where
    assert found["undisturbed"] == {"found": 0, "looks": 120}
    assert (
        "step 0, before commit: ranks [1] differ from the majority of [0, 1, 2]: parameter 0.weight" in found["raised"]
    )


def test_two_ranks_name_the_pair_within_the_steps_between_looks() -> None:
    found = results(2, every=4)
    for where in ("parameter", "moment"):
        verdict = found[where]
        assert (verdict["finding"], verdict["ranks"], verdict["step"]) == ("pair", [0, 1], 8), where
        assert any(WEIGHT in name for name in verdict["tensors"]), where
        assert verdict["agreed"] == 4
    assert found["undisturbed"] == {"found": 0, "looks": 120}
    assert "ranks [0, 1] differ, and two replicas do not say which is right" in found["raised"]


def test_a_rank_that_dies_is_an_error_of_the_others() -> None:
    first, dead, third = run_torch_ranks(MODULE, [0] * 3, scenario="dies", every=1)
    assert dead.code == -signal.SIGKILL
    for rank in (first, third):
        assert rank.code == 0, rank.errors[-2000:]
        assert "could not exchange digests at step 0" in rank.result
