"""A DeepSeek-V3 of any size: latent attention, routed and shared experts, multi-token prediction.

config = PRESETS["small"]
model = DeepseekModel(config)
loss = model(tokens, targets) / tokens.numel()
"""

from __future__ import annotations

from fireflyer.recipes.deepseek.block import Block, Gated, MixtureOfExperts
from fireflyer.recipes.deepseek.cache import AttentionCache
from fireflyer.recipes.deepseek.config import PRESETS, DeepseekConfig, Yarn
from fireflyer.recipes.deepseek.dispatch import Arrived, Dispatch, LocalDispatch, Pending, Ready
from fireflyer.recipes.deepseek.gate import Gate, Routing
from fireflyer.recipes.deepseek.initialisation import initialise
from fireflyer.recipes.deepseek.model import DeepseekModel, Losses, PredictionModule

__all__ = [
    "PRESETS",
    "Arrived",
    "AttentionCache",
    "Block",
    "DeepseekConfig",
    "DeepseekModel",
    "Dispatch",
    "Gate",
    "Gated",
    "LocalDispatch",
    "Losses",
    "MixtureOfExperts",
    "Pending",
    "PredictionModule",
    "Ready",
    "Routing",
    "Yarn",
    "initialise",
]
