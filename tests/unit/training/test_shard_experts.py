"""What `shard_experts` refuses, before it changes a model or makes a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel import ParallelPlan, coordinates_of
from fireflyer.recipes.deepseek import PRESETS, DeepseekModel
from fireflyer.training.experts import NotSplit, own_experts, shard_experts
from fireflyer.training.experts.layers import layers_of

CONFIG = PRESETS["tiny"]


def mesh_of(rank: int, **degrees: Any) -> Any:
    """Of a plan, without groups."""
    plan = ParallelPlan(sequence_tokens=8, batch_sequences=16, **degrees)
    return SimpleNamespace(plan=plan, coordinates=coordinates_of(plan, rank))


def test_experts_of_the_ranks_of_a_group_are_consecutive_and_each_is_on_one() -> None:
    owned = [own_experts(mesh_of(rank, shard=4, expert=4), 8) for rank in range(4)]
    assert owned == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    twice = [own_experts(mesh_of(rank, shard=4, expert=2), 8) for rank in range(4)]
    assert twice == [range(4), range(4, 8)] * 2


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="8 experts do not divide among the 3 ranks of an expert group"):
        shard_experts(DeepseekModel(CONFIG), mesh_of(0, shard=3, expert=3))


def test_tensor_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="tensor ranks have the same tokens"):
        shard_experts(DeepseekModel(CONFIG), mesh_of(0, tensor=2, expert=2))


def test_a_model_with_other_experts_than_the_plan_gives_is_refused() -> None:
    model = DeepseekModel(CONFIG, experts=range(4), dispatcher=NotSplit())
    with pytest.raises(UsageError, match=r"has experts 0 to 3 of 8, but the plan gives this rank 4 to 7"):
        shard_experts(model, mesh_of(1, shard=2, expert=2))


def test_a_dtype_that_does_not_travel_is_refused() -> None:
    with pytest.raises(UsageError, match=r"are torch\.float16 on cpu; tokens are dispatched in one of"):
        shard_experts(DeepseekModel(CONFIG).half(), mesh_of(0, shard=2, expert=2))


def test_a_forward_before_the_experts_are_reached_says_what_to_call() -> None:
    model = DeepseekModel(CONFIG, experts=range(4), dispatcher=NotSplit())
    with pytest.raises(UsageError, match="call shard_experts before the first forward"):
        model(torch.zeros(1, 4, dtype=torch.int64))


def test_norms_of_a_stage_and_norms_below_zero_are_refused() -> None:
    model = DeepseekModel(CONFIG)
    with pytest.raises(UsageError, match="pipeline = 2: gradients of other stages are on other ranks"):
        shard_experts(model, mesh_of(0, shard=2, pipeline=2)).clip_gradients(1.0)
    for bad in (0.0, float("nan")):
        with pytest.raises(UsageError, match=f"max_norm is {bad}"):
            shard_experts(model, mesh_of(0, shard=2)).clip_gradients(bad)


def test_without_expert_parallelism_a_whole_model_keeps_its_own_dispatcher() -> None:
    model = DeepseekModel(CONFIG)
    before = [layer.dispatcher for _, layer in layers_of(model)]
    assert before
    shard_experts(model, mesh_of(0, shard=2)).close()
    assert [layer.dispatcher for _, layer in layers_of(model)] == before
