"""A stage that is run phase by phase gives the bits of its forward and backward, and its transfers overlap in pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from tests.support.collectives.thread_ranks import together
from torch import Tensor

from fireflyer.collectives import Communicator
from fireflyer.collectives.dispatch import ExpertPlacement
from fireflyer.recipes.deepseek import PRESETS, DeepseekModel
from fireflyer.recipes.deepseek.rope import rotation_of
from fireflyer.recipes.trainer.phased import PhasedStage
from fireflyer.training.experts import ExpertDispatch
from fireflyer.training.experts.layers import RankDispatch, layers_of
from fireflyer.training.experts.sharding import _keep
from fireflyer.training.pipeline.phases import take_turns
from fireflyer.training.pipeline.stage_passes import StagePasses, finish

CONFIG: Final = PRESETS["tiny"]
RANKS: Final = 2
TOKENS: Final = 6


def stage(comm: Communicator, *, shared: bool = True) -> PhasedStage:
    """The layers of a model, behind its embedding: a dense one, then one with experts."""
    model = DeepseekModel(CONFIG)
    for _, layer in layers_of(model):
        each = layer.gate.sizes.routed // RANKS
        _keep(layer.experts, range(comm.rank * each, (comm.rank + 1) * each))
        exchange = ExpertDispatch(
            comm, ExpertPlacement.even(layer.gate.sizes.routed, comm.plan.node_of_rank), width=CONFIG.shape.hidden,
            per_token=layer.gate.sizes.per_token, max_tokens=TOKENS, dtype=torch.float32, dispatch_codec="f32",
            combine_codec="f32",
        )  # fmt: skip
        layer.dispatcher = RankDispatch(exchange)
        if not shared:
            layer.shared_experts = None
    parts = {f"layers.{number}": layer for number, layer in enumerate(model.layers)}

    def rotation(hidden: Tensor) -> Any:
        return rotation_of(CONFIG, torch.arange(hidden.shape[1]), hidden.dtype)

    return PhasedStage(
        {"embed_tokens": model.embed_tokens, **parts}, model.embed_tokens, list(model.layers), rotation,
        contextlib.nullcontext,
    )  # fmt: skip


def tokens_of(comm: Communicator, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * micro_batch + comm.rank)
    return torch.randint(CONFIG.shape.vocabulary, (1, TOKENS), generator=generator)


def loss(hidden: Tensor) -> Tensor:
    return (hidden**2).sum()


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    return found


def bits_of(body: Callable[[Communicator], Any]) -> None:
    """`body` gives two sets of tensors, which have the same bits on each rank."""
    for rank in together([0] * RANKS, body):
        assert not isinstance(rank, BaseException), rank
        expected, found = rank
        assert expected.keys() == found.keys()
        assert len(expected) > 10
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), name


def closed(module: PhasedStage) -> None:
    for _, layer in layers_of(module):
        layer.dispatcher.exchange.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared experts", "routed experts alone"])
@pytest.mark.parametrize("parts", ["whole", "inputs, then weights"])
def test_phases_compute_what_the_whole_stage_does(parts: str, shared: bool) -> None:
    def body(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module, tokens = stage(comm, shared=shared), tokens_of(comm, 0)
        value = loss(module(tokens))
        torch.autograd.backward(value)
        expected = {**gradients(module), "loss": value.detach()}

        passes = StagePasses("stage", module)
        (value,) = finish(passes.forward(0, (tokens,), loss))
        if parts == "whole":
            finish(passes.backward(0, (torch.ones(()),)))
        else:
            finish(passes.backward_input(0, (torch.ones(()),)))
            passes.backward_weights(0)
        assert passes.in_flight == 0
        closed(module)
        return expected, {**gradients(module), "loss": value.detach()}

    bits_of(body)


def test_a_forward_and_a_backward_take_turns_under_each_others_transfers() -> None:
    def body(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module = stage(comm)
        first, second = tokens_of(comm, 0), tokens_of(comm, 1)
        torch.autograd.backward(loss(module(first)))
        with torch.no_grad():
            ahead = loss(module(second))
        expected = {**gradients(module), "loss": ahead}

        told: list[tuple[str, str, bool]] = []
        passes = StagePasses("stage", module, lambda kind, _, phase, begins: told.append((kind, phase, begins)))
        finish(passes.forward(0, (first,), loss))
        told.clear()
        _, (value,) = take_turns(passes.backward(0, (torch.ones(()),)), passes.forward(1, (second,), loss))
        closed(module)
        order = [(kind, phase) for kind, phase, begins in told if begins]
        assert order[:4] == [("B", "loss"), ("B", "output"), ("B", "combine"), ("F", "attention")]
        assert order.index(("B", "experts")) < order.index(("F", "experts"))
        assert told.index(("F", "attention", False)) < told.index(("B", "combine", False)), "under the combine"
        return expected, {**gradients(module), "loss": value.detach()}

    bits_of(body)
