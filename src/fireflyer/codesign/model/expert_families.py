"""Readers of further families of models with experts, each with the defaults of its `transformers` configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fireflyer.codesign.model.keys import ConfigKeys
from fireflyer.codesign.model.readers import (
    attention_heads,
    deepseek_experts,
    dense_first,
    full_layers,
    latent_attention,
    layer_count,
    model_shape,
)
from fireflyer.codesign.model.shape import Experts, ModelShape, TokenIndex

__all__ = ["EXPERT_FAMILIES"]


def _qwen2_moe(keys: ConfigKeys) -> ModelShape:
    keys = keys.with_defaults(num_experts_per_tok=4, moe_intermediate_size=1408, num_experts=60)
    experts = Experts(
        routed=keys.positive("num_experts"),
        per_token=keys.positive("num_experts_per_tok"),
        feed_forward=keys.positive("moe_intermediate_size"),
        shared_feed_forward=keys.positive("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    _every_layer(keys)
    return model_shape(keys, attention_heads(keys, qkv_bias=keys.flag("qkv_bias", True)), experts=experts)


def _qwen3_moe(keys: ConfigKeys) -> ModelShape:
    experts = Experts(
        routed=keys.positive("num_experts", keys.optional("num_local_experts") or 128),
        per_token=keys.positive("num_experts_per_tok", 8),
        feed_forward=keys.positive("moe_intermediate_size", 768),
    )
    _every_layer(keys)
    bias = keys.flag("attention_bias", False)
    attention = attention_heads(keys, qkv_bias=bias, output_bias=bias, qk_norm=True, kv_heads=4)
    return model_shape(keys, attention, experts=experts)


def _every_layer(keys: ConfigKeys) -> None:
    """Raises `UsageError` where some layers have no experts, or windows."""
    keys.refuse("mlp_only_layers", "experts in every layer are understood")
    keys.refuse("use_sliding_window", "windows are not understood for this type")
    if keys.positive("decoder_sparse_step", 1) > 1:
        keys.refuse("decoder_sparse_step", "experts in every layer are understood")


def _local_experts(keys: ConfigKeys) -> ModelShape:
    """OLMoE and Granite: all layers have experts of `intermediate_size`."""
    olmo = keys.model_type() == "olmoe"
    routed = keys.positive("num_experts", 64) if olmo else keys.positive("num_local_experts", 8)
    experts = Experts(
        routed=routed,
        per_token=keys.positive("num_experts_per_tok", 8 if olmo else 2),
        feed_forward=keys.positive("intermediate_size"),
    )
    bias = keys.flag("attention_bias", False)
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, output_bias=bias, wide_qk_norm=olmo), experts=experts)


def _gpt_oss(keys: ConfigKeys) -> ModelShape:
    keys = keys.with_defaults(head_dim=64, num_key_value_heads=8, sliding_window=128)
    bias = keys.flag("attention_bias", True)
    experts = Experts(
        routed=keys.positive("num_local_experts", 128),
        per_token=keys.positive("num_experts_per_tok", 4),
        feed_forward=keys.positive("intermediate_size"),
        bias=True,
    )
    attention = attention_heads(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        window=keys.optional("sliding_window") or None,
        full_layers=full_layers(keys, 2),
    )
    return model_shape(keys, attention, experts=experts)


def _glm4_moe(keys: ConfigKeys) -> ModelShape:
    attention = attention_heads(
        keys,
        qkv_bias=keys.flag("attention_bias", False),
        qk_norm=keys.flag("use_qk_norm", False),
        kv_heads=8,
    )
    keys = keys.with_defaults(first_k_dense_replace=1, n_shared_experts=1, num_experts_per_tok=8)
    predictions = keys.number("num_nextn_predict_layers", 0)
    return model_shape(keys, attention, mtp_layers=predictions, **deepseek_experts(keys))


def _llama4(keys: ConfigKeys) -> ModelShape:
    """Layers of chunked attention are taken as windows of a chunk: their KV cache is exact, their scores are up to
    twice what they are. Norms of queries and keys have no weights."""
    keys = keys.with_defaults(head_dim=128, num_key_value_heads=8, attention_chunk_size=8192)
    inner, bias = keys.positive("intermediate_size", 8192), keys.flag("attention_bias", False)
    step = keys.positive("interleave_moe_layer_step", 1)
    layers, whole = layer_count(keys), keys.positive("no_rope_layer_interval", 4)
    if keys.numbers("moe_layers") not in (None, tuple(range(step - 1, layers, step))):
        keys.refuse("moe_layers", "experts in every interleave_moe_layer_step-th layer are understood")
    rotary = keys.numbers("no_rope_layers") or tuple(int((layer + 1) % whole != 0) for layer in range(layers))
    attention = attention_heads(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        window=keys.optional("attention_chunk_size") or None,
        full_layers=tuple(layer for layer, has_positions in enumerate(rotary) if not has_positions),
    )
    experts = Experts(
        routed=keys.positive("num_local_experts", 16),
        per_token=keys.positive("num_experts_per_tok", 1),
        feed_forward=inner,
        shared_feed_forward=inner,
    )
    dense = keys.positive("intermediate_size_mlp", 16_384)
    return model_shape(
        keys, attention, feed_forward=dense, experts=experts, expert_interval=step, expert_offset=step - 1
    )


def _ernie_experts(keys: ConfigKeys) -> ModelShape:
    keys = keys.with_defaults(tie_word_embeddings=True)
    keys.refuse("use_bias", "models without biases are understood for this type")
    layers = layer_count(keys)
    if keys.layer("moe_layer_end_index", -1, layers) < layers - 1:
        keys.refuse("moe_layer_end_index", "experts up to the last layer are understood")
    feed_forward = keys.positive("moe_intermediate_size", 1536)
    interval = keys.positive("moe_layer_interval", 1)
    experts = Experts(
        routed=keys.positive("moe_num_experts", 64),
        per_token=keys.positive("moe_k", 6),
        feed_forward=feed_forward,
        shared_feed_forward=feed_forward * keys.number("moe_num_shared_experts", 2),
    )
    return model_shape(
        keys,
        attention_heads(keys, kv_heads=4),
        experts=experts,
        dense_layers=keys.number("moe_layer_start_index", 1),
        expert_interval=interval,
        expert_offset=interval - 1,
    )


def _dots(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    attention = attention_heads(keys, qkv_bias=bias, output_bias=bias, qk_norm=True)
    if "sliding_attention" in (keys.words("layer_types") or ()):
        keys.refuse("layer_types", "windows are not understood for this type")
    return model_shape(keys, attention, **deepseek_experts(keys))


def _phimoe(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    attention = attention_heads(
        keys, qkv_bias=bias, output_bias=bias, kv_heads=8, window=keys.optional("sliding_window") or None
    )
    experts = _of_width(keys, routed=16, per_token=2)
    return model_shape(keys, attention, experts=experts, layer_norm=True, head_bias=keys.flag("lm_head_bias", False))


def _minimax(keys: ConfigKeys) -> ModelShape:
    attention = attention_heads(keys, kv_heads=8, head_dim=128, wide_qk_norm=True)
    return model_shape(keys, attention, experts=_of_width(keys, routed=256, per_token=8))


def _of_width(keys: ConfigKeys, *, routed: int, per_token: int) -> Experts:
    """In every layer, of `intermediate_size`."""
    return Experts(
        routed=keys.positive("num_local_experts", routed),
        per_token=keys.positive("num_experts_per_tok", per_token),
        feed_forward=keys.positive("intermediate_size"),
    )


def _hunyuan_experts(keys: ConfigKeys) -> ModelShape:
    """One shared expert of the width of a routed one."""
    bias, inner = keys.flag("attention_bias", False), keys.positive("intermediate_size")
    experts = Experts(
        routed=keys.positive("num_experts", 1),
        per_token=keys.positive("moe_topk", 1),
        feed_forward=inner,
        shared_feed_forward=inner,
    )
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, output_bias=bias, qk_norm=True), experts=experts)


def _glm4_moe_lite(keys: ConfigKeys) -> ModelShape:
    """Latent attention, and experts as those of DeepSeek-V3."""
    keys = dense_first(keys.with_defaults(q_lora_rank=768, first_k_dense_replace=1, **_GLM4_LITE_EXPERTS))
    predictions = keys.number("num_nextn_predict_layers", 0)
    return model_shape(keys, latent_attention(keys), mtp_layers=predictions, **deepseek_experts(keys))


_GLM4_LITE_EXPERTS: Final = {
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
}


def _deepseek_v32(keys: ConfigKeys) -> ModelShape:
    """DeepSeek-V3 with an index that chooses the tokens which a query sees, in training as in decoding."""
    index = TokenIndex(
        heads=keys.positive("index_n_heads", 64),
        head_dim=keys.positive("index_head_dim", 128),
        tokens=keys.positive("index_topk", 2048),
    )
    keys.positive("n_routed_experts")  # without, `deepseek_experts` takes the model for a dense one
    keys = dense_first(keys.with_defaults(first_k_dense_replace=3))
    predictions = keys.number("num_nextn_predict_layers", 0)
    return model_shape(keys, latent_attention(keys, index), mtp_layers=predictions, **deepseek_experts(keys))


EXPERT_FAMILIES: Final[Mapping[str, Callable[[ConfigKeys], ModelShape]]] = {
    "deepseek_v32": _deepseek_v32,
    "dots1": _dots,
    "ernie4_5_moe": _ernie_experts,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "granitemoe": _local_experts,
    "hunyuan_v1_moe": _hunyuan_experts,
    "llama4_text": _llama4,
    "minimax_m2": _minimax,
    "olmoe": _local_experts,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
"""Readers by `model_type`."""
