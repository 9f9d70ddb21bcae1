"""Reads the dimensions of a model from its Hugging Face `config.json`.

Keys and their defaults are those of the `transformers` configuration of each `model_type`. A key that has no safe
default must be there; what is not understood (an unknown `model_type`, a wrong kind of value) is one clear error, since
a guess would give wrong counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model.expert_families import EXPERT_FAMILIES
from fireflyer.codesign.model.families import FAMILIES
from fireflyer.codesign.model.keys import ConfigKeys
from fireflyer.codesign.model.readers import (
    attention_heads,
    deepseek_experts,
    gpt_shape,
    latent_attention,
    llama_shape,
    model_shape,
    qwen_window,
)
from fireflyer.codesign.model.shape import Experts, ModelShape

__all__ = ["MODEL_TYPES", "shape_from_config"]


def _mistral(keys: ConfigKeys) -> ModelShape:
    return model_shape(keys, attention_heads(keys, kv_heads=8, window=keys.optional("sliding_window") or None))


def _qwen2(keys: ConfigKeys) -> ModelShape:
    window, first = qwen_window(keys)
    return model_shape(keys, attention_heads(keys, qkv_bias=True, window=window, first_windowed=first))


def _qwen3(keys: ConfigKeys) -> ModelShape:
    window, first = qwen_window(keys)
    bias = keys.flag("attention_bias", False)
    attention = attention_heads(
        keys, qkv_bias=bias, output_bias=bias, qk_norm=True, head_dim=128, window=window, first_windowed=first
    )
    return model_shape(keys, attention)


def _mixtral(keys: ConfigKeys) -> ModelShape:
    experts = Experts(
        routed=keys.positive("num_local_experts", 8),
        per_token=keys.positive("num_experts_per_tok", 2),
        feed_forward=keys.positive("intermediate_size"),
    )
    attention = attention_heads(keys, kv_heads=8, window=keys.optional("sliding_window") or None)
    return model_shape(keys, attention, experts=experts)


def _deepseek(keys: ConfigKeys) -> ModelShape:
    """DeepSeekMoE: multi-head attention and experts."""
    bias = keys.flag("attention_bias", False)
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, output_bias=bias), **deepseek_experts(keys))


def _deepseek_latent(keys: ConfigKeys) -> ModelShape:
    """DeepSeek-V2 and V3."""
    attention = latent_attention(keys)
    return model_shape(keys, attention, mtp_layers=keys.number("num_nextn_predict_layers", 0), **deepseek_experts(keys))


MODEL_TYPES: Final[Mapping[str, Callable[[ConfigKeys], ModelShape]]] = {
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_latent,
    "deepseek_v3": _deepseek_latent,
    "gpt2": gpt_shape,
    "kimi_k2": _deepseek_latent,
    "llama": llama_shape,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    **FAMILIES,
    **EXPERT_FAMILIES,
}
"""Readers by `model_type`."""


def shape_from_config(config: Mapping[str, object]) -> ModelShape:
    """Shape of the model that a decoded `config.json` describes; of one that also sees or hears, of its language model
    (`text_config`). Raises `UsageError`: one line with the key that is missing or wrong, or the model types that are
    known.

    >>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    >>> shape_from_config(config).layers
    12
    """
    keys = ConfigKeys(config, MODEL_TYPES)
    inner = keys.table("text_config")
    if inner is not None and keys.model_type() not in MODEL_TYPES:
        keys = inner.with_defaults(**{name: config[name] for name in ("tie_word_embeddings",) if name in config})
    reader = MODEL_TYPES.get(keys.model_type())
    if reader is None:
        raise UsageError(
            f"config.json: model_type {keys.model_type()!r} is not known; known are {', '.join(sorted(MODEL_TYPES))}"
        )
    return reader(keys)
