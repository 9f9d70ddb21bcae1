"""What must hold before any rank starts: the recipe fits its model, and its checkpoints are of that model and plan."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
import torch

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint import stored_plans
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel import Kernels, mesh_dims
from fireflyer.recipes.deepseek.weights import read_keys
from fireflyer.recipes.trainer.core.checks import check_recipe, check_restart
from fireflyer.recipes.trainer.core.recipe import GptTable, ModelTable, Recipe
from fireflyer.recipes.trainer.models import context_of, shape_of

__all__ = ["check_checkpoints", "checked_shape", "identity_of_model", "kernels_here", "plan_of_checkpoints"]

_NOT_THE_MODEL: Final = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of a `config.json` that may differ between two of one model."""


def checked_shape(recipe: Recipe) -> ModelShape:
    """Dimensions of the model. Raises `UsageError` with every reason why the recipe is not executed."""
    shape = shape_of(recipe.model)
    check_recipe(recipe, shape, context_of(recipe.model))
    return shape


def kernels_here() -> Kernels:
    """How a rank on this machine computes, for `peak_memory`."""
    return "fused" if torch.cuda.is_available() else "eager"


def identity_of_model(table: ModelTable) -> str:
    """Digest of the table and of the content of its `config.json`, but for the seed of the weights."""
    fields: dict[str, Any] = {name: getattr(table, name) for name in table.__struct_fields__ if name != "seed"}
    if not isinstance(table, GptTable) and table.config is not None:
        fields["config"] = {name: key for name, key in read_keys(table.config).items() if name not in _NOT_THE_MODEL}
    kind = table.__struct_config__.tag
    return hashlib.blake2b(msgspec.json.encode([kind, fields], order="sorted"), digest_size=16).hexdigest()


def plan_of_checkpoints(recipe: Recipe) -> dict[str, Any]:
    """What checkpoints of the recipe say about it; `check_checkpoints` reads it."""
    return {
        "mesh": dict(mesh_dims(recipe.plan)),
        "zero": recipe.plan.zero,
        "model": identity_of_model(recipe.model),
    }


def check_checkpoints(recipe: Recipe) -> None:
    """Raises `UsageError` where the run would go on from checkpoints of another program or model, or of a plan that the
    recipe's does not follow."""
    directory = recipe.checkpoint.directory
    plans = stored_plans(directory)
    if not plans:
        check_restart(recipe, None)
        return
    saved = plans[-1].plan
    mesh = saved.get("mesh")
    if not isinstance(mesh, dict) or not all(isinstance(size, int) for size in mesh.values()):
        raise UsageError(f"{directory} has checkpoints that `ff train` did not write; give a fresh directory")
    if saved.get("model", identity_of_model(recipe.model)) != identity_of_model(recipe.model):
        raise UsageError(
            f"the checkpoints in {directory} are of another model: [model], or its config.json, has changed since; "
            "give the model that they were saved with, or a fresh directory"
        )
    check_restart(recipe, mesh)
