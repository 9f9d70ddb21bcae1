"""A model whose experts are on several ranks, beside one process that has all of them."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.torch_ranks.processes import Ended, run_torch_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MODULE = "tests.support.torch_ranks.experts"
OF_TWO = ("ep2", "ep2-replayed", "ep1")
OF_FOUR = ("ep4", "ep2", "ep2-whole", "ep4-replayed")


@functools.cache
def ranks(count: int) -> list[Ended]:
    """All cases of this many ranks, in one start."""
    cases = OF_TWO if count == 2 else OF_FOUR
    ended = run_torch_ranks(MODULE, (0,) * count, job="parity", cases=cases, same=f"ep{count}")
    assert all(one.code == 0 and one.result for one in ended), [one.errors[-3000:] for one in ended]
    return ended


@functools.cache
def other_ranks() -> list[Ended]:
    ended = run_torch_ranks(MODULE, (0, 0), job="codecs")
    assert all(one.code == 0 and one.result for one in ended), [one.errors[-3000:] for one in ended]
    return ended


ALL = [(2, case) for case in OF_TWO] + [(4, case) for case in OF_FOUR]


@pytest.mark.parametrize(("count", "case"), ALL, ids=str)
def test_gradients_are_those_of_one_process(count: int, case: str) -> None:
    """`ep2` of four ranks: two ranks have the same experts."""
    for rank in ranks(count):
        assert rank.result[case]["gradient"] <= (5e-6 if case.endswith("replayed") else 1e-10)


@pytest.mark.parametrize(("count", "case"), ALL, ids=str)
def test_each_expert_is_drawn_as_in_one_process(count: int, case: str) -> None:
    assert all(rank.result[case]["drawn"] for rank in ranks(count))


@pytest.mark.parametrize(("count", "case"), ALL, ids=str)
def test_counts_are_sums_over_micro_batches_and_ranks_and_move_the_same_biases(count: int, case: str) -> None:
    for rank in ranks(count):
        assert rank.result[case]["counts"]
        assert rank.result[case]["biases"]


@pytest.mark.parametrize("count", [2, 4])
def test_gradients_are_clipped_by_the_norm_of_one_process_and_shared_parameters_stay_the_same(count: int) -> None:
    """Two ranks have the same experts where there are four."""
    found = [rank.result["clipped"] for rank in ranks(count)]
    assert all(one["norms"] == found[0]["norms"] for one in found), "the same bits on all ranks"
    for norm, wanted in found[0]["norms"]:
        assert norm == pytest.approx(wanted, rel=1e-12)
        assert norm > 0.01, "it is scaled down"
    assert found[0]["alone"] != found[1]["alone"], "the norm of what one rank has is another one"
    assert {one["shared"] for one in found} == {found[0]["shared"]}
    assert all(one["parameter"] <= 1e-10 for one in found)


@pytest.mark.parametrize("count", [2, 4])
def test_two_runs_have_equal_bits(count: int) -> None:
    for rank in ranks(count):
        first, second = rank.result["digests"]
        assert first == second


def test_a_step_with_a_codec_of_the_plan_is_near_that_of_one_process_in_fp64() -> None:
    """Twice the error of the codec for Gaussian values, at the most; in FP32 no more than rounding."""
    errors = {
        "fp32": 1e-6, "bf16": 0.0017, "logfmt10": 0.0035, "e5m6": 0.0041, "logfmt8": 0.014, "fp8": 0.026,
        "fp8_ue8m0": 0.027,
    }  # fmt: skip
    for ended in other_ranks():
        found = ended.result["codecs"]
        assert found.keys() == errors.keys()
        for form, error in errors.items():
            print(form, found[form])
            assert found[form]["gradients"] <= 2 * error, form
            assert found[form]["loss"] <= error, form
            assert form == "fp32" or found[form]["gradients"] >= error / 20, "it is used"


def test_experts_on_other_ranks_compute_the_same() -> None:
    """Their results are added in another order: not bitwise."""
    for ended in other_ranks():
        found = ended.result["renumbered"]
        assert max(found["losses"]) <= 1e-10
        assert found["parameter"] <= 1e-10
        assert found["biases"]


def test_a_checkpoint_is_restored_by_expert_groups_of_another_size(tmp_path: Path) -> None:
    def run(count: int, **params: Any) -> list[dict[str, Any]]:
        ended = run_torch_ranks(MODULE, (0,) * count, job="checkpoint", directory=str(tmp_path / "state"), **params)
        assert all(one.code == 0 for one in ended), [one.errors[-3000:] for one in ended]
        return [one.result for one in ended]

    saved = run(2, expert=2, restore=False)
    assert all(rank["parameter"] <= 1e-10 for rank in saved)
    assert all(rank["parameter"] <= 1e-10 for rank in run(4, expert=4, restore=True))


def test_a_rank_that_dies_with_rows_of_others_is_named_by_the_error_of_the_others() -> None:
    *survivors, dead = run_torch_ranks(MODULE, (0, 0), job="death")
    assert dead.code == -signal.SIGKILL
    for one in survivors:
        assert one.code == 0, one.errors[-3000:]
        assert one.result["error"].startswith("PeerFailed: ")
        assert "rank 1" in one.result["error"]
