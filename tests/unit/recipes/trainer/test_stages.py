"""A model that is cut into stages computes what it did, and each of its parameters is counted once."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel import ParallelPlan
from fireflyer.codesign.schedule import Schedule, build_schedule, check
from fireflyer.recipes.deepseek import PRESETS, DeepseekModel
from fireflyer.recipes.gpt import GPTConfig, GPTModel
from fireflyer.recipes.trainer.core.checks import shape_of_gpt
from fireflyer.recipes.trainer.core.recipe import GptTable
from fireflyer.recipes.trainer.models import LossModel
from fireflyer.recipes.trainer.pipelines import one_forward
from fireflyer.recipes.trainer.stages import CutModel, cut
from fireflyer.recipes.trainer.stored import StoredModel

GPT = GptTable(vocabulary=32, layers=4, heads=2, width=16)
PLANS: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "dualpipe"},
    {"schedule": "interleaved", "chunks": 2},
    {"schedule": "zbv"},
]
CASES = [*(("gpt", plan) for plan in PLANS), *(("deepseek", plan) for plan in PLANS[:2]), ("untied", PLANS[0])]


def whole(kind: str) -> tuple[nn.Module, ModelShape]:
    if kind == "gpt":
        return GPTModel(GPTConfig(vocab_size=32, layers=4, heads=2, width=16, context=8)), shape_of_gpt(GPT)
    config = PRESETS["tiny"]
    if kind == "untied":  # and without prediction modules, which use the embedding
        shape = msgspec.structs.replace(config.shape, mtp_layers=0)
        config = msgspec.structs.replace(config, shape=shape)
    return DeepseekModel(config), config.shape


def cut_into(kind: str, **plan: Any) -> tuple[Schedule, list[CutModel]]:
    """Of all ranks."""
    division = ParallelPlan(sequence_tokens=8, batch_sequences=8, pipeline=2, **plan)
    schedule = build_schedule(division.schedule, 2, 8, division.chunks)
    model, shape = whole(kind)
    placement = schedule.placement
    return schedule, [
        cut(copy.deepcopy(model), shape, division, placement, rank, contextlib.nullcontext) for rank in range(2)
    ]


@pytest.mark.parametrize(("kind", "plan"), CASES, ids=str)
def test_stages_one_after_the_other_give_the_loss_of_the_whole_model(kind: str, plan: dict[str, Any]) -> None:
    tokens, targets = torch.randint(32, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    schedule, ranks = cut_into(kind, **plan)
    for direction, holders in enumerate(schedule.placement.rank_of):
        hidden = tokens
        for stage, rank in enumerate(holders):
            hidden = ranks[rank].stages[direction, stage](hidden)
        last = ranks[holders[-1]]
        model = LossModel(whole(kind)[0])
        assert torch.equal(last.loss(hidden, targets), model(tokens, targets))
        model.eval()
        assert torch.equal(last.evaluated(hidden, targets), model(tokens, targets))


@pytest.mark.parametrize(("kind", "plan"), CASES, ids=str)
def test_each_parameter_has_its_name_of_the_whole_model_and_is_counted_by_one_rank(
    kind: str, plan: dict[str, Any]
) -> None:
    held: set[str] = set()
    counted: Counter[str] = Counter()
    mesh: Any = None  # no experts are divided
    for part in cut_into(kind, **plan)[1]:
        stored = StoredModel((stage.named_parts for stage in part.stages.values()), (), mesh)
        held.update(stored.state_dict())
        names = {id(one): name for name, one in stored.named_parameters()}
        counted.update(names[id(one)] for one in part.counted)
    model, _ = whole(kind)
    assert held == set(model.state_dict())
    assert counted == Counter(dict(model.named_parameters()).keys())


@pytest.mark.parametrize("kind", ["gpt", "deepseek", "untied"])
def test_a_rank_keeps_no_parameter_but_those_of_its_stages(kind: str) -> None:
    for rank in range(2):
        model, shape = whole(kind)
        every = {name: weakref.ref(one) for name, one in model.named_parameters()}
        division = ParallelPlan(sequence_tokens=8, batch_sequences=8, pipeline=2)
        placement = build_schedule("1f1b", 2, 8).placement
        part = cut(model, shape, division, placement, rank, contextlib.nullcontext)
        del model
        gc.collect()
        own = {id(one) for stage in part.stages.values() for one in stage.parameters()}
        assert {name for name, one in every.items() if one() is not None} == {
            name for name, one in every.items() if id(one()) in own
        }
        assert len(own) < len(every)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_batch_of_evaluation_passes_each_stage_once(plan: dict[str, Any]) -> None:
    trained = build_schedule(plan["schedule"], 2, 8, plan.get("chunks", 1))
    forward = one_forward(trained.placement)
    check(forward)
    assert forward.micro_batches == 1
    assert forward.placement.rank_of[0] == trained.placement.rank_of[0]
