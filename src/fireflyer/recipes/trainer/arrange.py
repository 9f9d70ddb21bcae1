"""Chooses the arrangement that executes a plan, and prepares the model for it."""

from __future__ import annotations

from fireflyer.codesign.model import ModelShape
from fireflyer.recipes.trainer.arrangements import Arrangement, Replicated, Sharded, TensorParallel
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.models import BuiltModel
from fireflyer.recipes.trainer.pipelines import Pipelined
from fireflyer.recipes.trainer.split_experts import ExpertsDivided
from fireflyer.training.fp8 import convert
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.recompute import recompute
from fireflyer.training.tensor import tensor_parallel

__all__ = ["arrange"]


def arrange(built: BuiltModel, shape: ModelShape, mesh: PlanMesh, recipe: Recipe) -> Arrangement:
    """Divides `built` as the plan of `mesh`, which is that of `recipe`, says. Collective. Raises `UsageError`."""
    plan, settings = mesh.plan, recipe.optimizer
    if plan.precision.compute == "fp8":
        convert(built.module)
    if plan.tensor > 1:
        tensor_parallel(built.module, mesh.tensor)
    if plan.recompute != "full" or plan.pipeline == 1:
        recompute(built.module, plan.recompute, blocks=built.blocks)
    dispatched_tokens = max(plan.micro_batch, recipe.evaluation.batch) * plan.sequence_tokens
    if plan.pipeline > 1:
        return Pipelined(built, shape, mesh, settings, dispatched_tokens)
    if plan.expert > 1:
        return ExpertsDivided(built, mesh, settings, dispatched_tokens)
    if plan.zero:
        return Sharded(built, mesh, settings)
    if plan.tensor > 1:
        return TensorParallel(built, mesh, settings)
    return Replicated(built, mesh, settings)
