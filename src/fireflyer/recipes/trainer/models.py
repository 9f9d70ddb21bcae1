"""Makes the model that a recipe names, and says what its parts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import ModelShape, shape_from_config
from fireflyer.recipes.deepseek import PRESETS, DeepseekConfig, DeepseekModel
from fireflyer.recipes.deepseek.weights import read_keys
from fireflyer.recipes.gpt import GPTConfig, GPTModel
from fireflyer.recipes.trainer.core.checks import shape_of_gpt
from fireflyer.recipes.trainer.core.recipe import DeepseekTable, GptTable, HuggingFaceTable, ModelTable

__all__ = ["BuiltModel", "LossModel", "build_model", "context_of", "shape_of", "summed_cross_entropy"]


class LossModel(nn.Module):
    """Wraps a model so that its forward pass is the loss to train with, summed over tokens, a scalar: what wrappers for
    parallel training wrap. A sum, so that ranks with different batches can be added up."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """For int64 `tokens [B, T]` and `targets [B, T]`. In evaluation mode the cross entropy of the next token alone,
        so that models whose losses have more terms can be compared."""
        if self.training and isinstance(self.model, DeepseekModel):
            loss: Tensor = self.model(tokens, targets)
            return loss
        result = self.model(tokens)
        return summed_cross_entropy(getattr(result, "logits", result), targets)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of `logits [B, T, vocabulary]` summed over `targets [B, T]`, in fp32 or wider: a scalar."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, targets.flatten(), reduction="sum")


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on one device, undivided."""

    loss: LossModel
    blocks: Sequence[nn.Module]
    """Layers in the order in which they run: units of FSDP and of recomputation."""

    @property
    def module(self) -> nn.Module:
        """The model itself: what checkpoints hold."""
        return self.loss.model


def shape_of(table: ModelTable) -> ModelShape:
    """Dimensions of the model, without making it. Raises `UsageError`."""
    if isinstance(table, GptTable):
        return shape_of_gpt(table)
    if isinstance(table, DeepseekTable):
        return _deepseek_config(table).shape
    return shape_from_config(read_keys(table.config))


def context_of(table: ModelTable) -> int | None:
    """Longest sequence that the model takes, in tokens; None where the model is made for that of the plan. Raises
    `UsageError`."""
    if isinstance(table, GptTable):
        return None
    if isinstance(table, DeepseekTable):
        return _deepseek_config(table).context
    keys = read_keys(table.config)
    context = keys.get("max_position_embeddings", keys.get("n_positions"))
    return context if isinstance(context, int) else None


def build_model(table: ModelTable, *, context: int, device: torch.device) -> BuiltModel:
    """With weights from the seed of the table, float32, for sequences of `context` tokens, as `context_of` allows.
    Raises `UsageError`."""
    if isinstance(table, GptTable):
        gpt = GPTModel(_gpt_config(table, context)).to(device)
        return BuiltModel(LossModel(gpt), list(gpt.blocks))
    if isinstance(table, DeepseekTable):
        deepseek = DeepseekModel(_deepseek_config(table)).to(device)
        return BuiltModel(LossModel(deepseek), [*deepseek.layers, *deepseek.mtp])
    return _hugging_face(table, device)


def _gpt_config(table: GptTable, context: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=table.vocabulary,
        layers=table.layers,
        heads=table.heads,
        width=table.width,
        context=context,
        seed=table.seed,
    )


def _deepseek_config(table: DeepseekTable) -> DeepseekConfig:
    if table.config is not None:
        config = DeepseekConfig.from_hugging_face(read_keys(table.config), seed=table.seed)
    else:
        config = msgspec.structs.replace(PRESETS[table.preset or "small"], seed=table.seed)
    if table.vocabulary is not None:
        shape = msgspec.structs.replace(config.shape, vocabulary=table.vocabulary)
        config = msgspec.structs.replace(config, shape=shape)
    return config


def _hugging_face(table: HuggingFaceTable, device: torch.device) -> BuiltModel:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(
            "[model] of kind huggingface needs transformers: pip install 'fireflyer[transformers]'"
        ) from error
    keys = read_keys(table.config)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UsageError(f"model {table.config!r} has no 'model_type'; give a config.json")
    made: Any
    try:
        config = AutoConfig.for_model(model_type, **keys)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(table.seed)
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"model {table.config!r}: {str(error).splitlines()[0]}") from error
    made.config.use_cache = False
    layers = getattr(made.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UsageError(f"model {table.config!r}: {type(made).__name__} has no list of layers; use another model type")
    return BuiltModel(LossModel(made.to(device)), list(layers))
