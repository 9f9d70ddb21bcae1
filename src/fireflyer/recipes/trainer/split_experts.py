"""A step with the experts of each layer on several ranks, each of which runs all layers on its own tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from fireflyer.recipes.trainer.arrangements import WholeDepth, adamw
from fireflyer.recipes.trainer.core.recipe import OptimizerSettings
from fireflyer.recipes.trainer.models import BuiltModel
from fireflyer.recipes.trainer.stored import StoredModel
from fireflyer.training.experts import shard_experts
from fireflyer.training.gradient_norm import clip_over_ranks, counted_here
from fireflyer.training.mesh import PlanMesh

__all__ = ["ExpertsDivided"]


class ExpertsDivided(WholeDepth):
    """Ranks have different tokens, and exchange them where a layer has experts. Gradients are averaged after the last
    micro-batch: of experts over the ranks with the same ones, of all else over all ranks. With ZeRO 1 the states of the
    optimizer are divided over the shard group."""

    def __init__(self, built: BuiltModel, mesh: PlanMesh, settings: OptimizerSettings, dispatched_tokens: int) -> None:
        """`dispatched_tokens`: the most tokens of one forward pass."""
        super().__init__(built, mesh)
        self._split = self._resources.enter_context(shard_experts(built.module, mesh, max_tokens=dispatched_tokens))
        experts = [one for _, one in self._split.expert_parameters()]
        self.module = self._stored = StoredModel([{"": built.module}], experts, mesh, sharded=mesh.plan.zero == 1)
        self.optimizer = adamw(self._stored, settings)
        self._max_norm = settings.max_norm
        self._counted = counted_here(built.module.parameters(), experts, mesh)

    def backward(self, inputs: Tensor, targets: Tensor) -> float:
        self._stored.gather()
        return super().backward(inputs, targets)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        self._stored.gather_for_evaluation()
        return super().evaluate(inputs, targets)

    def discard(self) -> None:
        self._stored.drop_gradients()
        super().discard()

    def _step(self, before: Callable[[], None]) -> float:
        self._split.add_gradients(average=True)
        self._stored.take_gradients()
        before()
        norm = clip_over_ranks(self._built.module.parameters(), self._counted, self._max_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self._stored.drop_gradients()
        return norm
