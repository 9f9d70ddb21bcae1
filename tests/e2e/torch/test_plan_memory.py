"""Activations that a plan counts for each rank, beside those that the trainer's ranks keep.

With FSDP saved tensors are compared, else all that is there as a backward pass begins, and the peak. Each difference is
printed (`pytest -rPx`).
"""

from __future__ import annotations

import functools
from typing import Any, Final

import pytest
from tests.support.torch_ranks.processes import Ended, run_torch_ranks
from tests.support.trainer.recipes import raw_recipe

from fireflyer.codesign.parallel import ParallelPlan, plan_memory
from fireflyer.codesign.schedule import Kind, build_schedule
from fireflyer.codesign.schedule.actions import passes
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.models import shape_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

BOUND: Final = 0.1
GPT: Final = {"kind": "gpt", "vocabulary": 96, "layers": 4, "heads": 4, "width": 128}
DEEP: Final = {**GPT, "layers": 8}
SHALLOW: Final = {**GPT, "layers": 2}
DEEPSEEK: Final = {"kind": "deepseek", "preset": "small", "vocabulary": 96}
AUTOCAST: Final = {"parameters": "fp32", "compute": "bf16"}
BF16: Final = {"parameters": "bf16", "compute": "bf16"}
FSDP: Final = {"shard": 2, "zero": 3}

OF_TWO: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "dp2": (GPT, {"replicate": 2}),
    "fsdp2": (GPT, FSDP),
    "fsdp2 in bf16": (DEEPSEEK, {**FSDP, "precision": BF16}),
    "tp2": (SHALLOW, {"tensor": 2}),
    "tp2 with autocast": (SHALLOW, {"tensor": 2, "precision": AUTOCAST}),
    "tp2, operators": (SHALLOW, {"tensor": 2, "recompute": "operators"}),
    "tp2, blocks": (SHALLOW, {"tensor": 2, "recompute": "blocks"}),
    "pp2": (GPT, {"pipeline": 2}),
    "pp2, gpipe": (GPT, {"pipeline": 2, "schedule": "gpipe"}),
    "pp2, zb-h1": (GPT, {"pipeline": 2, "schedule": "zb-h1"}),
    "pp2, zbv": (GPT, {"pipeline": 2, "schedule": "zbv"}),
    "pp2, dualpipe": (GPT, {"pipeline": 2, "schedule": "dualpipe"}),
    "pp2, dualpipev": (GPT, {"pipeline": 2, "schedule": "dualpipev"}),
    "pp2, zb-h1, experts": (DEEPSEEK, {"pipeline": 2, "schedule": "zb-h1"}),
    "pp2, zbv, experts": (DEEPSEEK, {"pipeline": 2, "schedule": "zbv"}),
    "pp2, zb-h1 with autocast": (DEEPSEEK, {"pipeline": 2, "schedule": "zb-h1", "precision": AUTOCAST}),
    "pp2 with autocast": (DEEPSEEK, {"pipeline": 2, "precision": AUTOCAST}),
    "pp2, full": (DEEPSEEK, {"pipeline": 2, "recompute": "full"}),
    "ep2": (DEEPSEEK, {"replicate": 2, "expert": 2}),
    "ep2 with autocast": (DEEPSEEK, {"replicate": 2, "expert": 2, "precision": AUTOCAST}),
}
OF_FOUR: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "fsdp4": (GPT, {"shard": 4, "zero": 3}),
    "hsdp2x2": (GPT, {"replicate": 2, **FSDP}),
    "pp4": (GPT, {"pipeline": 4}),
    "pp4, gpipe": (GPT, {"pipeline": 4, "schedule": "gpipe"}),
    "pp4, zb-h1": (GPT, {"pipeline": 4, "schedule": "zb-h1"}),
    "pp4, zbv": (DEEP, {"pipeline": 4, "schedule": "zbv"}),
    "pp4, dualpipe": (DEEP, {"pipeline": 4, "schedule": "dualpipe"}),
    "pp4, dualpipev": (DEEP, {"pipeline": 4, "schedule": "dualpipev"}),
    "ep4": (DEEPSEEK, {"replicate": 4, "expert": 4}),
    "pp2xdp2": (GPT, {"pipeline": 2, "replicate": 2}),
    "tp2xdp2": (SHALLOW, {"tensor": 2, "replicate": 2}),
    "ep2xpp2": (DEEPSEEK, {"pipeline": 2, "replicate": 2, "expert": 2}),
    "fsdp2xtp2": (SHALLOW, {**FSDP, "tensor": 2}),
}


def tables(name: str) -> dict[str, Any]:
    """The recipe of a case: micro-batches as many as make the pipeline full, else one."""
    model, plan = (OF_TWO | OF_FOUR)[name]
    stages, data = plan.get("pipeline", 1), plan.get("replicate", 1) * plan.get("shard", 1)
    full = 2 * stages if plan.get("schedule") in ("zbv", "dualpipe", "dualpipev") else stages + 1
    sequences = 2 * data * (1 if stages == 1 else full)
    return {
        "model": model,
        "plan": {"sequence_tokens": 32, "batch_sequences": sequences, "micro_batch": 2, **plan},
    }


def splits_backward(plan: ParallelPlan) -> bool:
    if plan.pipeline == 1:
        return False
    rows = build_schedule(plan.schedule, plan.pipeline, plan.micro_batches, plan.chunks).rows
    return any(action.kind is Kind.INPUT for row in rows for item in row for action in passes(item))


@functools.cache
def ranks(count: int) -> list[Ended]:
    """All cases of this many ranks, in one start."""
    cases = {name: tables(name) for name in (OF_TWO if count == 2 else OF_FOUR)}
    ended = run_torch_ranks("tests.support.torch_ranks.activations", (0,) * count, limit_s=100, cases=cases)
    assert [one.code for one in ended] == [0] * count, [one.errors[-3000:] for one in ended]
    return ended


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_a_plan_counts_what_each_rank_keeps(name: str) -> None:
    recipe = recipe_of(raw_recipe(**tables(name)))
    stages = plan_memory(recipe.plan, shape_of(recipe.model), "eager")
    for rank, ended in enumerate(ranks(recipe.plan.world_size)):
        planned, found = stages[rank // recipe.plan.stage_ranks], ended.result[name]
        kept = found["saved"] if recipe.plan.zero else found["kept"]
        print(f"{name}, rank {rank}: kept {planned.activations / kept - 1:+.1%}", end=" ")
        assert planned.activations == pytest.approx(kept, rel=BOUND), rank
        if recipe.plan.recompute == "none" and not splits_backward(recipe.plan):  # beside them gradients are kept
            assert planned.activations == pytest.approx(found["saved"], rel=BOUND), rank
        if not recipe.plan.zero:
            print(f"peak {(planned.activations + planned.working) / found['peak'] - 1:+.1%}", end="")
            assert planned.activations + planned.working == pytest.approx(found["peak"], rel=BOUND), rank
        print()
