"""Parameters, gradients and optimizer states that a plan counts for each rank are those that the trainer's ranks hold,
to the byte."""

from __future__ import annotations

import functools
from typing import Any, Final

import pytest
from tests.support.torch_ranks.processes import Ended, run_torch_ranks
from tests.support.trainer.recipes import raw_recipe

from fireflyer.codesign.parallel.memory import static_memory
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.models import shape_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

GPT: Final = {"kind": "gpt", "vocabulary": 96, "layers": 4, "heads": 4, "width": 32}
BF16: Final = {"parameters": "bf16", "compute": "bf16"}
DEEPSEEK: Final = {"kind": "deepseek", "preset": "tiny", "vocabulary": 96}
OF_TWO: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "dp2": (GPT, {"replicate": 2}),
    "fsdp2": (GPT, {"shard": 2, "zero": 3}),
    "fsdp2, zero 1": (GPT, {"shard": 2, "zero": 1}),
    "fsdp2, zero 2": (GPT, {"shard": 2, "zero": 2}),
    "fsdp2 in bf16": (GPT, {"shard": 2, "zero": 3, "precision": BF16}),
    "fsdp2, zero 1 in bf16": (GPT, {"shard": 2, "zero": 1, "precision": BF16}),
    "fsdp2, zero 2 in bf16, gradients too": (GPT, {"shard": 2, "zero": 2, "precision": {**BF16, "gradients": "bf16"}}),
    "pp2": (GPT, {"pipeline": 2}),
    "pp2, zbv": (GPT, {"pipeline": 2, "schedule": "zbv"}),
    "pp2, dualpipe": (GPT, {"pipeline": 2, "schedule": "dualpipe"}),
    "pp2, prediction modules": (DEEPSEEK, {"pipeline": 2}),
    "ep2": (DEEPSEEK, {"replicate": 2, "expert": 2}),
    "ep2, zero 1": (DEEPSEEK, {"shard": 2, "zero": 1, "expert": 2}),
}
OF_FOUR: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "hsdp2x2": (GPT, {"replicate": 2, "shard": 2, "zero": 3}),
    "pp2, zero 1": (GPT, {"pipeline": 2, "shard": 2, "zero": 1}),
    "pp2xdp2": (GPT, {"pipeline": 2, "replicate": 2}),
    "ep2 and shards of experts, zero 1": (DEEPSEEK, {"shard": 4, "zero": 1, "expert": 2}),
    "ep2xpp2, zero 1": (DEEPSEEK, {"pipeline": 2, "shard": 2, "zero": 1, "expert": 2}),
    "ep2xpp2": (DEEPSEEK, {"pipeline": 2, "replicate": 2, "expert": 2}),
}


def tables(name: str) -> dict[str, Any]:
    model, plan = (OF_TWO | OF_FOUR)[name]
    return {"model": model, "plan": {"sequence_tokens": 8, "batch_sequences": 16, "micro_batch": 2, **plan}}


@functools.cache
def ranks(count: int) -> list[Ended]:
    """All cases of this many ranks, in one start."""
    cases = {name: tables(name) for name in (OF_TWO if count == 2 else OF_FOUR)}
    ended = run_torch_ranks("tests.support.torch_ranks.static_bytes", (0,) * count, limit_s=100, cases=cases)
    assert [one.code for one in ended] == [0] * count, [one.errors[-3000:] for one in ended]
    return ended


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_a_plan_counts_the_static_memory_of_each_rank(name: str) -> None:
    recipe = recipe_of(raw_recipe(**tables(name)))
    plan, shape = recipe.plan, shape_of(recipe.model)
    for rank, ended in enumerate(ranks(plan.world_size)):
        found = ended.result[name]
        planned = static_memory(plan, shape, rank // plan.stage_ranks)
        print(name, rank, planned, found)
        counted = [found["parameters"], found["gradients"], found["states"]]
        if plan.precision.parameters == "bf16" and plan.zero < 3:  # plans count the FP32 shards of FSDP among states
            shards = counted[0] - planned[0]
            counted[0], counted[2] = counted[0] - shards, counted[2] + shards
        assert tuple(counted) == planned, rank
