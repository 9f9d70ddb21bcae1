"""Readers of further families of models, each with the defaults of its `transformers` configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fireflyer.codesign.model.keys import ConfigKeys
from fireflyer.codesign.model.readers import attention_heads, deepseek_experts, full_layers, llama_shape, model_shape
from fireflyer.codesign.model.shape import Attention, Experts, ModelShape

__all__ = ["FAMILIES"]


def _gemma(keys: ConfigKeys) -> ModelShape:
    keys = keys.with_defaults(num_key_value_heads=16, head_dim=256, tie_word_embeddings=True)
    bias = keys.flag("attention_bias", False)
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, output_bias=bias))


def _gemma2(keys: ConfigKeys) -> ModelShape:
    keys = keys.with_defaults(
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True, sliding_window=4096
    )
    return _normed_twice(keys, every=2)


def _gemma3(keys: ConfigKeys) -> ModelShape:
    keys = keys.with_defaults(
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        tie_word_embeddings=True,
        sliding_window=4096,
    )
    return _normed_twice(keys, every=keys.positive("sliding_window_pattern", 6), qk_norm=True)


def _normed_twice(keys: ConfigKeys, *, every: int, qk_norm: bool = False) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    attention = attention_heads(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        window=keys.optional("sliding_window") or None,
        full_layers=full_layers(keys, every),
    )
    return model_shape(keys, attention, norms=4)


def _phi3(keys: ConfigKeys) -> ModelShape:
    return model_shape(keys, attention_heads(keys, window=keys.optional("sliding_window") or None))


def _smollm3(keys: ConfigKeys) -> ModelShape:
    keys.refuse("use_sliding_window", "windows are not understood for this type")
    return llama_shape(keys.with_defaults(tie_word_embeddings=True))


def _seed(keys: ConfigKeys) -> ModelShape:
    attention = attention_heads(
        keys,
        qkv_bias=keys.flag("attention_bias", True),
        output_bias=keys.flag("attention_out_bias", False),
        head_dim=128,
    )
    return model_shape(keys, attention, feed_forward_bias=keys.flag("mlp_bias", False))


def _olmo2(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, output_bias=bias, wide_qk_norm=True))


def _cohere(keys: ConfigKeys) -> ModelShape:
    keys, bias = keys.with_defaults(tie_word_embeddings=True), keys.flag("attention_bias", False)
    normed = keys.flag("use_qk_norm", False)
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, output_bias=bias, wide_qk_norm=normed), norms=1)


def _starcoder2(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("use_bias", True)
    keys = keys.with_defaults(num_key_value_heads=2, tie_word_embeddings=True)
    attention = attention_heads(keys, qkv_bias=bias, output_bias=bias, window=keys.optional("sliding_window") or None)
    return model_shape(keys, attention, gated=False, layer_norm=True, feed_forward_bias=bias)


def _gpt_neox(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", True)
    whole = keys.with_values(num_key_value_heads=keys.positive("num_attention_heads"))
    attention = attention_heads(whole, qkv_bias=bias, output_bias=bias)
    return model_shape(keys, attention, gated=False, layer_norm=True, feed_forward_bias=True)


def _nemotron(keys: ConfigKeys) -> ModelShape:
    bias, inner = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    attention = attention_heads(keys, qkv_bias=bias, output_bias=bias)
    return model_shape(keys, attention, gated=False, layer_norm=True, feed_forward_bias=inner)


def _gpt_bigcode(keys: ConfigKeys) -> ModelShape:
    """GPT-2 with one key-value head."""
    hidden, heads = keys.positive("n_embd"), keys.positive("n_head")
    attention = Attention(
        heads=heads,
        kv_heads=1 if keys.flag("multi_query", True) else heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        output_bias=True,
    )
    return ModelShape(
        model_type=keys.model_type(),
        layers=keys.positive("n_layer"),
        hidden=hidden,
        vocabulary=keys.positive("vocab_size"),
        feed_forward=keys.optional("n_inner") or 4 * hidden,
        attention=attention,
        gated=False,
        tied_embeddings=keys.flag("tie_word_embeddings", True),
        learned_positions=keys.positive("n_positions", 1024),
        layer_norm=True,
        feed_forward_bias=True,
    )


def _falcon(keys: ConfigKeys) -> ModelShape:
    heads, hidden = keys.positive("num_attention_heads"), keys.positive("hidden_size")
    grouped, bias = keys.flag("new_decoder_architecture", False), keys.flag("bias", False)
    several = keys.positive("num_kv_heads", heads) if grouped else 1 if keys.flag("multi_query", True) else heads
    both = grouped and keys.number("num_ln_in_parallel_attn", 2) == 2
    inner = keys.positive("ffn_hidden_size", 4 * hidden)
    keys = keys.with_defaults(tie_word_embeddings=True)
    keys = keys.with_values(intermediate_size=inner, num_key_value_heads=several)
    return model_shape(
        keys,
        attention_heads(keys, qkv_bias=bias, output_bias=bias),
        gated=False,
        layer_norm=True,
        feed_forward_bias=bias,
        norms=2 if both or not keys.flag("parallel_attn", True) else 1,
    )


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


FAMILIES: Final[Mapping[str, Callable[[ConfigKeys], ModelShape]]] = {
    "cohere": _cohere,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4_moe": _glm4_moe,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "granite": llama_shape,
    "granitemoe": _local_experts,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "olmoe": _local_experts,
    "phi3": _phi3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "seed_oss": _seed,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
"""Readers by `model_type`."""
