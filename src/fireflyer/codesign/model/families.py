"""Readers of further families of dense models, each with the defaults of its `transformers` configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fireflyer.codesign.model.keys import ConfigKeys
from fireflyer.codesign.model.readers import attention_heads, full_layers, llama_shape, model_shape
from fireflyer.codesign.model.shape import Attention, ModelShape

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


def _cohere2(keys: ConfigKeys) -> ModelShape:
    """Three layers of four have a window."""
    keys, bias = keys.with_defaults(tie_word_embeddings=True, sliding_window=4096), keys.flag("attention_bias", False)
    return model_shape(keys, _windowed(keys, every=4, qkv_bias=bias, output_bias=bias), norms=1)


def _olmo3(keys: ConfigKeys) -> ModelShape:
    keys, bias = keys.with_defaults(sliding_window=4096), keys.flag("attention_bias", False)
    return model_shape(keys, _windowed(keys, every=4, qkv_bias=bias, output_bias=bias, wide_qk_norm=True))


def _exaone4(keys: ConfigKeys) -> ModelShape:
    if keys.is_text("sliding_window_pattern", "LLLG"):
        keys = keys.with_values(sliding_window_pattern=4)
    pattern = keys.positive("sliding_window_pattern", 4)
    return model_shape(keys, _windowed(keys, every=pattern, qk_norm=True))


def _windowed(keys: ConfigKeys, *, every: int, **more: bool) -> Attention:
    """Attention whose `every`-th layers, or those that `layer_types` names, see all before them."""
    window = keys.optional("sliding_window") or None
    return attention_heads(keys, window=window, full_layers=full_layers(keys, every), **more)


def _glm4(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", True)
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, kv_heads=2, head_dim=128), norms=4)


def _ernie(keys: ConfigKeys) -> ModelShape:
    bias, keys = keys.flag("use_bias", False), keys.with_defaults(tie_word_embeddings=True)
    attention = attention_heads(keys, qkv_bias=bias, output_bias=bias, kv_heads=2, head_dim=128)
    return model_shape(keys, attention, feed_forward_bias=bias)


def _arcee(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    attention = attention_heads(keys, qkv_bias=bias, output_bias=bias)
    return model_shape(keys, attention, gated=False, feed_forward_bias=keys.flag("mlp_bias", False))


def _stablelm(keys: ConfigKeys) -> ModelShape:
    keys.refuse("qk_layernorm", "norms of queries and keys are not understood for this type")
    attention = attention_heads(keys, qkv_bias=keys.flag("use_qkv_bias", False))
    parallel = keys.flag("use_parallel_residual", False)
    return model_shape(keys, attention, layer_norm=True, norms=1 if parallel else 2)


def _hunyuan(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, output_bias=bias, qk_norm=True))


def _ministral3(keys: ConfigKeys) -> ModelShape:
    window = keys.optional("sliding_window") or None
    return model_shape(keys, attention_heads(keys, kv_heads=8, head_dim=128, window=window))


def _phi(keys: ConfigKeys) -> ModelShape:
    keys.refuse("qk_layernorm", "norms of queries and keys are not understood for this type")
    attention = attention_heads(keys, qkv_bias=True, output_bias=True)
    return model_shape(keys, attention, gated=False, layer_norm=True, feed_forward_bias=True, norms=1, head_bias=True)


FAMILIES: Final[Mapping[str, Callable[[ConfigKeys], ModelShape]]] = {
    "arcee": _arcee,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "granite": llama_shape,
    "hunyuan_v1_dense": _hunyuan,
    "ministral3": _ministral3,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "phi": _phi,
    "phi3": _phi3,
    "seed_oss": _seed,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""Readers by `model_type`."""
