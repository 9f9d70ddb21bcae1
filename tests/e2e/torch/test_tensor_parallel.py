"""Tensor and sequence parallelism, alone and with data parallelism, beside one process: gradients, norm, loss."""

from __future__ import annotations

import functools
import signal
from typing import Any

import pytest
from tests.support.torch_ranks.processes import Ended, run_torch_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OF_TWO = (
    "gpt-tp2",
    "gpt-tp2-sp",
    "gpt-tp2-sp-lp",
    "gpt-tp2-sp-fp32",
    "gpt-tp2-sp-full",
    "gpt-tp2-sp-operators",
    "llama-tp2",
    "llama-tp2-sp-lp",
    "llama-tp2-sp-mixed",
    "llama-tp2-sp-fp32",
    "tied-tp2-sp",
)
OF_FOUR = (
    "gpt-tp4-sp",
    "gpt-tp2xdp2-sp",
    "gpt-tp2xdp2-sp-fp32",
    "gpt-fsdp2xtp2-sp-blocks",
    "llama-tp4-sp",
    "llama-tp2xdp2-sp",
    "llama-fsdp2xtp2-sp",
    "llama-fsdp2xtp2-sp-fp32",
)


@functools.cache
def ranks(count: int) -> list[Ended]:
    """All cases of this many ranks, in one start; the last of two ranks dies at the end."""
    more: dict[str, Any] = {"lose_a_rank": True} if count == 2 else {"meshes": True}
    ended = run_torch_ranks(
        "tests.support.torch_ranks.tensor",
        (0,) * count,
        limit_s=100,
        imports=("transformers.models.llama.modeling_llama",),
        cases=OF_TWO if count == 2 else OF_FOUR,
        **more,
    )
    assert all(one.result for one in ended), [one.errors[-3000:] for one in ended]
    return ended


@pytest.mark.parametrize("case", [*OF_TWO, *OF_FOUR])
def test_gradients_and_their_norm_are_those_of_one_process(case: str) -> None:
    allowed = 5e-6 if case.endswith("fp32") else 1e-10
    for rank in ranks(2 if case in OF_TWO else 4):
        assert rank.result[case]["gradient"] <= allowed
        assert rank.result[case]["norm"] <= allowed
        assert rank.result[case]["loss"] <= allowed


def test_groups_of_a_plan_are_those_of_its_pure_layout_and_work() -> None:
    for rank in ranks(4):
        assert rank.code == 0, rank.errors[-3000:]
        assert rank.result["meshes"]["wrong"] == []


def test_plans_that_differ_or_do_not_fit_are_one_error_on_every_rank() -> None:
    expected = {
        "plans differ": "the parallel plans of ranks 2 differ from rank 0's in micro_batch; give all ranks one plan",
        "does not fit": "pipeline 1 x replicate 3 x shard 1 x tensor 2 = 6 ranks, but the job has 4",
        "some say their node": "ranks 0 did not say on which node they are; pass node= on all ranks or on none",
        "pairs across nodes": "tensor group [0, 1] is on nodes [0, 1]; start all its ranks on one node; tensor group "
        "[2, 3] is on nodes [0, 1]; start all its ranks on one node",
    }
    for rank in ranks(4):
        assert {name: rank.result["meshes"][name] for name in expected} == expected


def test_a_rank_that_dies_in_backward_is_an_error_on_the_other() -> None:
    survivor, dead = ranks(2)
    assert dead.code == -signal.SIGKILL
    assert survivor.code == 0, survivor.errors[-3000:]
    assert survivor.result["error"] != "no error"
    assert "gloo" in survivor.result["error"].lower()
