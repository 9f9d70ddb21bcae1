"""A DeepSeek-V3 of any size: latent attention, routed and shared experts, multi-token prediction.

config = PRESETS["small"]
model = DeepseekModel(config)
loss = model(tokens, targets) / tokens.numel()
"""

from __future__ import annotations

from fireflyer.recipes.deepseek.block import Block, Gated, MixtureOfExperts
from fireflyer.recipes.deepseek.cache import AttentionCache
from fireflyer.recipes.deepseek.config import PRESETS, DeepseekConfig, Yarn
from fireflyer.recipes.deepseek.decoding import Speculation, generate, speculate
from fireflyer.recipes.deepseek.dispatch import Arrived, Dispatch, LocalDispatch, Pending, Ready
from fireflyer.recipes.deepseek.gate import Gate, Routing
from fireflyer.recipes.deepseek.initialisation import initialise
from fireflyer.recipes.deepseek.model import DeepseekModel, Losses, PredictionModule
from fireflyer.recipes.deepseek.replay import recorded_routing, replayed_routing
from fireflyer.recipes.deepseek.weights import load_weights, read_config, save_weights

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
    "Speculation",
    "Yarn",
    "generate",
    "initialise",
    "load_weights",
    "read_config",
    "recorded_routing",
    "replayed_routing",
    "save_weights",
    "speculate",
]
