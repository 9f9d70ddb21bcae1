"""Readers of further families of dense models, each with the defaults of its `transformers` configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model.keys import ConfigKeys
from fireflyer.codesign.model.readers import (
    attention_heads,
    full_layers,
    gpt_shape,
    layer_count,
    llama_shape,
    model_shape,
)
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
    return gpt_shape(keys, kv_heads=1 if keys.flag("multi_query", True) else None)


def _gptj(keys: ConfigKeys) -> ModelShape:
    """Rotary positions, no biases in attention; one norm, which attention and feed-forward both read."""
    shape = gpt_shape(keys.with_defaults(tie_word_embeddings=False), learned_positions=0, norms=1, head_bias=True)
    return _without_biases(shape, output=False)


def _gpt_neo(keys: ConfigKeys) -> ModelShape:
    """Attention of some layers has a window."""
    hidden, layers = keys.positive("hidden_size", 2048), layer_count(keys, "num_layers")
    inner, positions = keys.optional("intermediate_size"), keys.positive("max_position_embeddings", 2048)
    kinds = keys.repeated("attention_types") or ("global", "local") * 12
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise UsageError(
            f"config.json: 'attention_types' has {len(kinds)} layers of {', '.join(sorted(set(kinds)))}; {layers} of "
            "global and local are needed"
        )
    keys = keys.with_values(
        n_embd=hidden, n_layer=layers, n_head=keys.positive("num_heads", 16), n_inner=inner, n_positions=positions
    )
    shape = _without_biases(gpt_shape(keys), output=True)
    return msgspec.structs.replace(
        shape,
        attention=msgspec.structs.replace(
            shape.attention,
            window=keys.positive("window_size", 256),
            full_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "global"),
        ),
    )


def _without_biases(shape: ModelShape, *, output: bool) -> ModelShape:
    """Queries, keys and values have none; the output projection where it is said."""
    attention = msgspec.structs.replace(shape.attention, qkv_bias=False, output_bias=output)
    return msgspec.structs.replace(shape, attention=attention)


def _bloom(keys: ConfigKeys) -> ModelShape:
    """ALiBi; older files have `n_embed` and `num_attention_heads`."""
    hidden = keys.optional("n_embed") or keys.positive("hidden_size")
    layers, heads = keys.optional("n_layer") or layer_count(keys), keys.optional("n_head")
    keys = keys.with_values(
        n_embd=hidden, n_layer=layers, n_head=heads or keys.positive("num_attention_heads"), n_inner=4 * hidden
    )
    return gpt_shape(keys, learned_positions=0, embedding_norm=True)


def _mpt(keys: ConfigKeys) -> ModelShape:
    """ALiBi, no biases, LayerNorm with weights only."""
    inner = keys.table("attn_config")
    if inner is not None:
        inner.refuse("qk_ln", "norms of queries and keys are not understood for this type")
        if inner.text("attn_type", _MPT_ATTENTION) != _MPT_ATTENTION or not inner.flag("alibi", True):
            raise UsageError(f"config.json: 'attn_config': {_MPT_ATTENTION} with alibi is understood for this type")
    if not keys.flag("no_bias", True):
        raise UsageError("config.json: 'no_bias' is False; models without biases are understood for this type")
    hidden = keys.positive("d_model")
    keys = keys.with_values(
        n_embd=hidden,
        n_layer=layer_count(keys, "n_layers"),
        n_head=keys.positive("n_heads"),
        n_inner=hidden * keys.positive("expansion_ratio", 4),
    )
    shape = gpt_shape(keys, learned_positions=0, layer_norm=False, feed_forward_bias=False)
    return _without_biases(shape, output=False)


_MPT_ATTENTION: Final = "multihead_attention"


def _opt(keys: ConfigKeys) -> ModelShape:
    """Also Galactica, without biases and with norms that have no weights."""
    hidden, bias = keys.positive("hidden_size"), keys.flag("enable_bias", True)
    if keys.positive("word_embed_proj_dim", hidden) != hidden or not keys.flag("do_layer_norm_before", True):
        raise UsageError(
            "config.json: embeddings as wide as hidden_size, and norms before attention (do_layer_norm_before), are "
            "understood for this type"
        )
    keys.refuse("_remove_final_layer_norm", "models with a last norm are understood for this type")
    keys = keys.with_defaults(tie_word_embeddings=True).with_values(intermediate_size=keys.positive("ffn_dim"))
    whole = keys.with_values(num_key_value_heads=keys.positive("num_attention_heads"))
    return model_shape(
        keys,
        attention_heads(whole, qkv_bias=bias, output_bias=bias),
        gated=False,
        layer_norm=True,
        plain_norms=not keys.flag("layer_norm_elementwise_affine", True),
        feed_forward_bias=bias,
        learned_positions=keys.positive("max_position_embeddings", 2048) + _OPT_OFFSET,
    )


_OPT_OFFSET: Final = 2
"""Rows of the table of positions before that of the first token."""


def _olmo(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    return model_shape(keys, attention_heads(keys, qkv_bias=bias, output_bias=bias), plain_norms=True)


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
    "bloom": _bloom,
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
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "granite": llama_shape,
    "hunyuan_v1_dense": _hunyuan,
    "ministral3": _ministral3,
    "mpt": _mpt,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "seed_oss": _seed,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""Readers by `model_type`."""
