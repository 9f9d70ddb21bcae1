"""Cuts a model into the stages of a pipeline, for one rank of it.

    embedding -> layers of stage 0 -> layers of stage 1 -> ... -> norm, head, loss

Layers are divided as the plan says (`codesign.parallel.balance_model`); the head may be a stage of its own. A rank has
drawn the whole model, and keeps its stages: so each parameter has the value and the name that it has in one process.
What it does not keep is free when the whole model is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel import ParallelPlan, balance_model
from fireflyer.codesign.schedule import Placement
from fireflyer.recipes.deepseek import DeepseekModel
from fireflyer.recipes.deepseek.rope import rotation_of
from fireflyer.recipes.gpt import GPTModel
from fireflyer.recipes.trainer.models import summed_cross_entropy

__all__ = ["CutModel", "Stage", "cut"]

Loss = Callable[[Tensor, Tensor], Tensor]
Products = Callable[[], contextlib.AbstractContextManager[Any]]


class Stage(nn.Module):
    """Consecutive layers of a model: from tokens `[B, T]` (the first one) or hidden states `[B, T, h]` to hidden
    states. The last one holds, too, what the loss is computed with."""

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        embedding: nn.Module | None,
        layers: Sequence[nn.Module],
        rotation: Callable[[Tensor], Any],
        products: Products,
    ) -> None:
        """`parts`: all that the stage holds, by the name in the whole model."""
        super().__init__()
        self.parts = nn.ModuleDict({_key(name): part for name, part in parts.items()})
        self.named_parts = dict(parts)
        self.run = (embedding, tuple(layers))
        """Embedding of the first stage, and layers, as they are called."""
        self.rotation, self.products = rotation, products

    def forward(self, given: Tensor) -> Tensor:
        """Hidden states `[B, T, h]` behind the last layer of the stage."""
        embedding, layers = self.run
        with self.products():
            hidden = given if embedding is None else embedding(given)
            rotation = self.rotation(hidden) if layers else None
            for layer in layers:
                hidden = layer(hidden, rotation)
            return hidden


@dataclass(frozen=True, slots=True)
class CutModel:
    """What one rank of a pipeline has of a model."""

    stages: dict[tuple[int, int], Stage]
    """By (direction, stage)."""
    loss: Loss
    """Loss to train with, summed over tokens, of hidden states of the last stage and targets `[B, T]`; called where the
    last stage is."""
    evaluated: Loss
    """Cross entropy of the next token alone, summed."""
    shared: list[list[tuple[int, str]]]
    """Places (stage, parameter) that hold copies of one parameter."""

    @property
    def counted(self) -> list[nn.Parameter]:
        """Parameters that no other stage, and no other direction of the schedule, has as one of these."""
        copies = {place for places in self.shared for place in places[1:]}
        found = [
            parameter
            for (direction, number), stage in self.stages.items()
            for name, parameter in stage.named_parameters()
            if direction == 0 and (number, name) not in copies
        ]
        return list({id(one): one for one in found}.values())


def cut(
    model: nn.Module,
    shape: ModelShape,
    plan: ParallelPlan,
    placement: Placement,
    rank: int,
    products: Products,
    kind: type[Stage] = Stage,
) -> CutModel:
    """Takes the stages of `rank` out of the whole `model`, which is then of no more use. `products`: the precision of
    matrix products. `kind`: of the stages. Raises `UsageError` for a model that is not cut."""
    if isinstance(model, GPTModel):
        return _cut(_gpt(model, products), shape, plan, placement, rank, products, kind)
    if isinstance(model, DeepseekModel):
        return _cut(_deepseek(model, products), shape, plan, placement, rank, products, kind)
    raise UsageError(f"{type(model).__name__} is not cut into the stages of a pipeline; use pipeline = 1")


@dataclass(frozen=True, slots=True)
class _Parts:
    """A model, taken apart."""

    embedding: tuple[str, nn.Module]
    layers: list[tuple[str, nn.Module]]
    tail: list[tuple[str, nn.Module]]
    """Beside the layers, what the loss is computed with."""
    rotation: Callable[[Tensor], Any]
    loss: Loss
    evaluated: Loss


def _cut(
    parts: _Parts,
    shape: ModelShape,
    plan: ParallelPlan,
    placement: Placement,
    rank: int,
    products: Products,
    kind: type[Stage],
) -> CutModel:
    pieces = balance_model(shape, plan.pieces, plan.sequence_tokens)
    last = len(pieces) - 1
    stages = {}
    for direction, number in placement.stages_of(rank):
        piece = pieces[number]
        layers = parts.layers[piece.first : piece.first + piece.layers]
        held = [*([parts.embedding] if number == 0 else []), *layers, *(parts.tail if number == last else [])]
        embedding = parts.embedding[1] if number == 0 else None
        stages[direction, number] = kind(dict(held), embedding, [one for _, one in layers], parts.rotation, products)
    twice = parts.embedding[0] in dict(parts.tail)
    places = [(stage, f"parts.{_key(parts.embedding[0])}.weight") for stage in (0, last)]
    # The losses refer to all that is left of the model.
    here = any(number == last for _, number in stages)
    loss, evaluated = (parts.loss, parts.evaluated) if here else (_not_here, _not_here)
    return CutModel(stages, loss, evaluated, [places] if twice else [])


def _not_here(hidden: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001 - a `Loss`
    raise InvariantViolation("this rank does not hold the last stage, and computes no loss")


def _gpt(model: GPTModel, products: Products) -> _Parts:
    cosine, sine = model.get_buffer("cosine"), model.get_buffer("sine")
    layers = [(f"blocks.{number}", block) for number, block in enumerate(model.blocks)]
    model.blocks = nn.ModuleList()  # the loss below refers to the model: not to what other stages hold

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        with products():
            return summed_cross_entropy(model.head(hidden), targets)

    return _Parts(
        embedding=("embedding", model.embedding),
        layers=layers,
        tail=[("norm", model.norm), ("embedding", model.embedding)],
        rotation=lambda hidden: (cosine[: hidden.shape[1]], sine[: hidden.shape[1]]),
        loss=loss,
        evaluated=loss,
    )


def _deepseek(model: DeepseekModel, products: Products) -> _Parts:
    config = model.config
    layers = [(f"layers.{number}", layer) for number, layer in enumerate(model.layers)]
    model.layers = nn.ModuleList()
    tail: list[tuple[str, nn.Module]] = [("norm", model.norm), ("mtp", model.mtp)]
    tail += [] if config.shape.tied_embeddings else [("lm_head", model.lm_head)]
    embedding = ("embed_tokens", model.embed_tokens)
    if config.shape.tied_embeddings or len(model.mtp):
        tail.append(embedding)
    else:
        del model.embed_tokens  # the loss below refers to the model, but not to this

    def rotation(hidden: Tensor) -> Any:
        return rotation_of(config, torch.arange(hidden.shape[1], device=hidden.device), hidden.dtype)

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        with products():
            return model.losses_of(model.norm(hidden), targets).total()

    def evaluated(hidden: Tensor, targets: Tensor) -> Tensor:
        with products():
            return summed_cross_entropy(model.head(model.norm(hidden)), targets)

    return _Parts(embedding, layers, tail, rotation, loss, evaluated)


def _key(name: str) -> str:
    """A name as `nn.ModuleDict` takes it."""
    return name.replace(".", "_")
