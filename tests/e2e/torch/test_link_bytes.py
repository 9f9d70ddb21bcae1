"""Bytes that a plan states for a step of each rank, beside those that `stats()` of its communicators has counted."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from tests.support.torch_ranks.processes import Ended, run_torch_ranks
from tests.support.trainer.recipes import raw_recipe

from fireflyer.codesign.parallel import NodeModel, ParallelPlan, groups, load_node
from fireflyer.codesign.parallel.traffic import stage_message_bytes, stage_traffic
from fireflyer.collectives.dispatch import ExpertPlacement
from fireflyer.collectives.dispatch.traffic import traffic
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.models import shape_of
from fireflyer.training.pipeline.messages import HEADER_BYTES

pytestmark = [pytest.mark.processes, pytest.mark.slow]

GPT: Final = {"kind": "gpt", "vocabulary": 96, "layers": 4, "heads": 4, "width": 32}
DEEPSEEK: Final = {"kind": "deepseek", "preset": "tiny", "vocabulary": 96}
SMALL: Final = {"kind": "deepseek", "preset": "small", "vocabulary": 96}
FSDP: Final = {"shard": 2, "zero": 3}
AUTOCAST: Final = {"parameters": "fp32", "compute": "bf16"}
BF16: Final = {"parameters": "bf16", "compute": "bf16"}
CODECS: Final = {"parameters": "fp32", "compute": "fp32", "dispatch": "fp8", "combine": "logfmt10"}
OF_TWO: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "dp2": (GPT, {"replicate": 2}),
    "fsdp2": (GPT, FSDP),
    "fsdp2, zero 1": (GPT, {"shard": 2, "zero": 1}),
    "fsdp2, zero 2": (GPT, {"shard": 2, "zero": 2}),
    "fsdp2 in bf16": (DEEPSEEK, {**FSDP, "precision": BF16}),
    "pp2": (GPT, {"pipeline": 2}),
    "pp2, gpipe": (GPT, {"pipeline": 2, "schedule": "gpipe"}),
    "pp2, zb-h1": (GPT, {"pipeline": 2, "schedule": "zb-h1"}),
    "pp2, zbv": (GPT, {"pipeline": 2, "schedule": "zbv"}),
    "pp2, dualpipe": (GPT, {"pipeline": 2, "schedule": "dualpipe"}),
    "pp2, dualpipev": (GPT, {"pipeline": 2, "schedule": "dualpipev"}),
    "pp2, prediction modules": (DEEPSEEK, {"pipeline": 2}),
    "pp2 with autocast": (GPT, {"pipeline": 2, "precision": AUTOCAST}),
    "tp2": (GPT, {"tensor": 2}),
    "tp2, blocks": (GPT, {"tensor": 2, "recompute": "blocks"}),
    "tp2 with autocast": (GPT, {"tensor": 2, "precision": AUTOCAST}),
    "ep2": (DEEPSEEK, {"replicate": 2, "expert": 2}),
    "ep2, codecs": (SMALL, {"replicate": 2, "expert": 2, "precision": CODECS}),
}
OF_FOUR: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "fsdp2xtp2": (GPT, {**FSDP, "tensor": 2}),
    "fsdp2xtp2, zero 1": (GPT, {"shard": 2, "zero": 1, "tensor": 2}),
    "fsdp4": (GPT, {"shard": 4, "zero": 3}),
    "hsdp2x2": (GPT, {"replicate": 2, **FSDP}),
    "hsdp2x2, zero 1": (GPT, {"replicate": 2, "shard": 2, "zero": 1}),
    "pp4": (GPT, {"pipeline": 4}),
    "pp4, dualpipe": ({**GPT, "layers": 8}, {"pipeline": 4, "schedule": "dualpipe"}),
    "ep4": (DEEPSEEK, {"replicate": 4, "expert": 4}),
    "pp2, zero 1": (GPT, {"pipeline": 2, "shard": 2, "zero": 1}),
    "pp2xdp2": (GPT, {"pipeline": 2, "replicate": 2}),
    "tp2xdp2": (GPT, {"tensor": 2, "replicate": 2}),
    "ep2xdp2": (DEEPSEEK, {"replicate": 4, "expert": 2}),
    "ep2xdp2, zero 1": (SMALL, {"shard": 4, "zero": 1, "expert": 2}),
    "ep2xpp2": (DEEPSEEK, {"pipeline": 2, "replicate": 2, "expert": 2}),
}
GRANULE_BYTES: Final = 4096
"""To which the executor of a pipeline rounds messages from the second step on."""
DDP_FLAG_BYTES: Final = 4
"""A value behind the last bucket, by which a rank says that gradients are missing."""
ROUTING: Final = 0.25
"""Routing of a new gate is not uniform, as plans take it to be."""


def tables(name: str) -> dict[str, Any]:
    model, plan = (OF_TWO | OF_FOUR)[name]
    return {"model": model, "plan": {"sequence_tokens": 16, "batch_sequences": 32, "micro_batch": 2, **plan}}


ALONE: Final = ("fsdp2xtp2, zero 1", "hsdp2x2, zero 1", "tp2xdp2")
"""In processes of their own: DTensor keeps what it has planned for an equal mesh, with the groups of that one."""


def ranks(name: str) -> list[Ended]:
    """Of a start that has this case."""
    together = OF_TWO if name in OF_TWO else OF_FOUR
    return _started((name,) if name in ALONE else tuple(one for one in together if one not in ALONE))


@functools.cache
def _started(names: tuple[str, ...]) -> list[Ended]:
    cases, count = {name: tables(name) for name in names}, 2 if names[0] in OF_TWO else 4
    ended = run_torch_ranks("tests.support.torch_ranks.link_bytes", (0,) * count, limit_s=100, cases=cases)
    assert [one.code for one in ended] == [0] * count, [one.errors[-3000:] for one in ended]
    return ended


def node_of(plan: ParallelPlan) -> NodeModel:
    """One with all ranks; NVLink joins those of a tensor group. Gradients go to host memory and back."""
    return msgspec.structs.replace(
        load_node("pcie-a100"), gpus=plan.world_size, nics=1, bridge_gpus=1, nvlink_gpus=plan.tensor
    )


def counted(sent: Mapping[str, Mapping[str, int]], plan: ParallelPlan) -> dict[str, float]:
    """By purpose of the plan. A gradient and a gathered parameter count with the whole array, as it is copied to host
    memory or from there; a tensor rank sends all parts but its own of an array in a ring, twice in an allreduce."""
    sizes = {axis: len(next(groups(plan, axis))) for axis in sent}  # type: ignore[arg-type]
    found = dict.fromkeys(("gradients", "parameters", "tensor", "messages", "copies", "experts"), 0.0)
    for axis, kinds in sent.items():
        size = sizes[axis]
        scattered, gathered = size * kinds.get("reduce_scatter", 0), size * kinds.get("allgather", 0)
        if axis == "tensor":
            found["tensor"] += (size - 1) / size * (2 * kinds.get("allreduce", 0) + scattered + gathered)
        elif axis == "expert":
            found["experts"] += kinds.get("message", 0) + kinds.get("send", 0)
            found["gradients"] += kinds.get("allreduce", 0)
        elif axis == "pipeline":
            found["messages"] += kinds.get("message", 0)
            found["copies"] += kinds.get("send", 0)
        else:
            found["gradients"] += kinds.get("allreduce", 0) + scattered
            found["parameters"] += gathered
    return found


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_a_plan_states_the_bytes_that_each_rank_sends(name: str) -> None:
    recipe = recipe_of(raw_recipe(**tables(name)))
    plan, shape = recipe.plan, shape_of(recipe.model)
    for rank, ended in enumerate(ranks(name)):
        found = counted(ended.result[name]["sent"], plan)
        stage = stage_traffic(plan, shape, node_of(plan), rank // plan.stage_ranks).by_purpose
        planned: dict[str, float] = {purpose: links.get("pcie", 0.0) for purpose, links in stage.items()}
        planned["tensor"] = stage["tensor"].get("nvlink", 0.0)
        experts = planned.pop("experts")
        if plan.schedule == "dualpipe":  # whose copies of stages are added as other shared parameters are
            planned["copies"] += planned.pop("gradients")
            assert found.pop("gradients") == 0
        if plan.world_size == plan.replicate and plan.expert == 1:
            planned["gradients"] += DDP_FLAG_BYTES
        message = stage_message_bytes(plan, shape)
        framed = -(-(HEADER_BYTES + message) // GRANULE_BYTES) * GRANULE_BYTES
        planned["messages"] = planned.pop("pipeline") / message * framed
        print(name, rank, planned, found)
        dispatched = found.pop("experts")
        assert found == pytest.approx(planned, rel=1e-12), rank
        assert dispatched == ended.result[name]["dispatched"]
        assert (dispatched > 0) == (experts > 0)


@pytest.mark.parametrize("name", [name for name in OF_TWO | OF_FOUR if "dualpipe" not in name])
def test_a_plan_states_which_gradients_come_back_to_a_rank(name: str) -> None:
    """Those of an allreduce do, parts of a reduce-scatter stay where they are added: both directions of a bridge."""
    recipe = recipe_of(raw_recipe(**tables(name)))
    plan, shape = recipe.plan, shape_of(recipe.model)
    flag = DDP_FLAG_BYTES if plan.world_size == plan.replicate and plan.expert == 1 else 0
    for rank, ended in enumerate(ranks(name)):
        sent = ended.result[name]["sent"]
        found = counted(sent, plan)["gradients"]
        found += sum(kinds.get("allreduce", 0) for axis, kinds in sent.items() if axis not in ("tensor", "pipeline"))
        stage = stage_traffic(plan, shape, node_of(plan), rank // plan.stage_ranks).by_purpose
        assert found == pytest.approx(stage["gradients"].get("host_bridge", 0.0) + 2 * flag, rel=1e-12), rank


@pytest.mark.parametrize("name", [name for name, (_, plan) in (OF_TWO | OF_FOUR).items() if "expert" in plan])
def test_dispatch_sends_the_bytes_of_its_routing_and_about_those_of_the_plan(name: str) -> None:
    """Exchanges of a group are counted again from the experts that its tokens chose."""
    recipe = recipe_of(raw_recipe(**tables(name)))
    plan, shape = recipe.plan, shape_of(recipe.model)
    assert shape.experts is not None
    placement = ExpertPlacement.even(shape.experts.routed, (0,) * plan.expert)
    there, back = plan.precision.dispatch_bytes(shape.hidden), plan.precision.combine_bytes(shape.hidden)
    results = [ended.result[name] for ended in ranks(name)]
    for group in groups(plan, "expert"):
        sent, rows = np.zeros(plan.expert), 0
        for gate in zip(*(results[rank]["routing"] for rank in group), strict=True):
            for forward in zip(*gate, strict=True):
                chosen = [np.array(one) for one in forward]
                sent += exchanged(chosen, placement, there, back).sum(axis=1)
                rows += int((exchanged(chosen, placement, there, back) - exchanged(chosen, placement, 0, 0)).sum())
        assert sent.tolist() == [results[rank]["dispatched"] for rank in group]
        planned = stage_traffic(plan, shape, node_of(plan), group[0] // plan.stage_ranks).by_purpose["experts"]["pcie"]
        print(name, f"planned over counted rows {planned * plan.expert / rows - 1:+.1%}, all bytes {sent.sum() / rows}")
        assert planned * plan.expert == pytest.approx(rows, rel=ROUTING)


def exchanged(
    chosen: list[Any], placement: ExpertPlacement, there: int, back: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes from each rank of a node to each other in a forward and a backward pass. Backward rows have the routes of
    the forward pass, and the gradient of each weight comes back in FP32."""
    whole, bare, counts = (
        traffic(chosen, placement, dispatch_row_bytes=row, combine_row_bytes=result)
        for row, result in ((there, back), (0, 0), (1, 0))
    )
    rows, headers = counts.dispatch - bare.dispatch, bare.combine  # one node: a message to each other rank
    entries = (bare.dispatch - 2 * headers - 4 * rows) // 12
    found: np.ndarray[Any, np.dtype[np.int64]]
    found = 2 * (whole.dispatch + whole.combine) - bare.dispatch + headers + 4 * entries.T
    return found
