"""What is due at a step: the settings of the optimizer, an evaluation, a trace."""

from __future__ import annotations

import math
from typing import Any

from fireflyer.recipes.trainer.core.recipe import EvaluationSettings, OptimizerSettings, ProfileSettings

__all__ = ["adamw_settings", "evaluation_due", "learning_rate", "traced"]


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Of step `step` (from 1): linear warm-up, then constant or half a cosine down to the final share.

    >>> settings = OptimizerSettings(steps=100, learning_rate=0.5, warm_up_steps=10)
    >>> learning_rate(5, settings), learning_rate(50, settings)
    (0.25, 0.5)
    """
    if step < settings.warm_up_steps:
        return settings.learning_rate * step / settings.warm_up_steps
    if settings.decay == "constant":
        return settings.learning_rate
    done = min(1.0, (step - settings.warm_up_steps) / settings.decay_steps)
    share = settings.final_share + (1 - settings.final_share) * 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * share


def adamw_settings(step: int, settings: OptimizerSettings) -> dict[str, Any]:
    """Of each parameter group of torch's AdamW at step `step` (from 1). They follow from the recipe alone: a checkpoint
    that was saved with others restores those, and the recipe may have been changed since."""
    return {
        "lr": learning_rate(step, settings),
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }


def evaluation_due(step: int, last: int, settings: EvaluationSettings) -> bool:
    """After step `step` of `last`; the last one always, so that runs can be compared."""
    return step == last or (settings.period_steps > 0 and step % settings.period_steps == 0)


def traced(step: int, profile: ProfileSettings | None) -> bool:
    """Whether step `step` is in the range of steps of the trace."""
    return profile is not None and profile.first_step <= step <= profile.last_step
