"""Which runs a comparison has: for each seed the baseline and the technique, with everything else alike.

This is how DeepSeek-V3's techniques were validated (Insights into DeepSeek-V3, 2.4): on small models first, and by the
relative difference of the loss.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import Recipe

__all__ = ["ARMS", "Arm", "PlannedRun", "laid_over", "planned_runs", "technique_of"]

Arm = Literal["baseline", "technique"]
ARMS: Final[tuple[Arm, ...]] = ("baseline", "technique")
_OWN: Final = ("compare", "technique")
"""Tables that belong to the comparison and to no run."""


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its recipe, and where its files are."""

    arm: Arm
    seed: int
    directory: str
    recipe: Recipe


def laid_over(raw: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with the values of `overlay` in place of its own: tables are merged key by key, all else is replaced."""
    merged = dict(raw)
    for key, value in overlay.items():
        before = merged.get(key)
        merged[key] = laid_over(before, value) if isinstance(value, Mapping) and isinstance(before, Mapping) else value
    return merged


def technique_of(raw: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> tuple[Recipe, Recipe]:
    """Baseline and technique: of a recipe with `[technique]`, or of two recipes. Raises `UsageError`."""
    baseline = recipe_of(raw)
    if other is not None:
        if baseline.technique:
            raise UsageError("there are two recipes, and the first has [technique]; give one of both")
        technique = recipe_of(other)
    else:
        if not baseline.technique:
            raise UsageError("nothing to compare with: give a second recipe, or lay [technique] over this one")
        for key in _OWN:
            if key in baseline.technique:
                raise UsageError(f"[technique.{key}] is not possible; it says what is laid over the other tables")
        try:
            technique = recipe_of(laid_over(_without(raw), baseline.technique))
        except UsageError as error:
            raise UsageError(f"with [technique] laid over it: {error}") from error
    if not baseline.data.evaluation or not technique.data.evaluation:
        raise UsageError("[data] evaluation has no source; held-out losses are compared")
    return baseline, technique


def planned_runs(baseline: Recipe, technique: Recipe, directory: str) -> list[PlannedRun]:
    """Pair by pair, the baseline first; each in its own directory below `directory`. Paths of both are absolute
    (`recipe.resolved`): those of two recipes may be from two directories. Raises `UsageError` where the two have
    different held-out data."""
    if _held_out(baseline) != _held_out(technique):
        raise UsageError(
            "baseline and technique have different held-out data; give both the same paths in [data] evaluation, "
            "[evaluation] sequences and [plan] sequence_tokens"
        )
    return [
        _planned(recipe, arm, seed, posixpath.join(directory, f"{arm}-{seed}"))
        for seed in baseline.compare.seeds
        for arm, recipe in zip(ARMS, (baseline, technique), strict=True)
    ]


def _held_out(recipe: Recipe) -> tuple[list[str], int, int]:
    """What decides which tokens are evaluated, with which context."""
    paths = [source.path for source in recipe.data.evaluation]
    return paths, recipe.evaluation.sequences, recipe.plan.sequence_tokens


def _planned(recipe: Recipe, arm: Arm, seed: int, directory: str) -> PlannedRun:
    replace = msgspec.structs.replace
    metrics = replace(recipe.metrics, file=posixpath.join(directory, "metrics.jsonl"))
    if metrics.profile is not None:
        trace = replace(metrics.profile, file=posixpath.join(directory, "trace.json"))
        metrics = replace(metrics, profile=trace)
    run = replace(
        recipe,
        model=replace(recipe.model, seed=seed),
        data=replace(recipe.data, seed=seed),
        checkpoint=replace(recipe.checkpoint, directory=posixpath.join(directory, "checkpoints")),
        metrics=metrics,
        technique={},
    )
    return PlannedRun(arm=arm, seed=seed, directory=directory, recipe=run)


def _without(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != "technique"}
