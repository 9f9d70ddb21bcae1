"""Parts of a `config.json` that several families of models have in common."""

from __future__ import annotations

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model.keys import MAX_LAYERS, ConfigKeys
from fireflyer.codesign.model.shape import Attention, Experts, LatentAttention, ModelShape, TokenIndex

__all__ = ["attention_heads", "deepseek_experts", "dense_first", "full_layers", "gpt_shape", "latent_attention"]
__all__ += ["layer_count", "llama_shape", "model_shape", "qwen_window"]


def attention_heads(
    keys: ConfigKeys,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    wide_qk_norm: bool = False,
    sinks: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    window: int | None = None,
    first_windowed: int = 0,
    full_layers: tuple[int, ...] = (),
) -> Attention:
    heads, hidden = keys.positive("num_attention_heads"), keys.positive("hidden_size")
    width = keys.optional("head_dim") or head_dim
    if width is None:
        if hidden % heads:
            raise UsageError(f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        width = hidden // heads
    return Attention(
        heads=heads,
        kv_heads=keys.positive("num_key_value_heads", kv_heads or heads),
        head_dim=width,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        wide_qk_norm=wide_qk_norm,
        sinks=sinks,
        window=window,
        first_windowed=first_windowed,
        full_layers=full_layers,
    )


def layer_count(keys: ConfigKeys, name: str = "num_hidden_layers") -> int:
    """Layers of the model; lists of as many may be made. Raises `UsageError` for more than `MAX_LAYERS`."""
    layers = keys.positive(name)
    if layers > MAX_LAYERS:
        raise UsageError(f"config.json: {name!r} is {layers}; models of up to {MAX_LAYERS} layers are understood")
    return layers


def model_shape(keys: ConfigKeys, attention: Attention | LatentAttention, **more: object) -> ModelShape:
    fields: dict[str, object] = {
        "model_type": keys.model_type(),
        "layers": layer_count(keys),
        "hidden": keys.positive("hidden_size"),
        "vocabulary": keys.positive("vocab_size"),
        "feed_forward": keys.positive("intermediate_size"),
        "attention": attention,
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
    }
    return ModelShape(**(fields | more))  # type: ignore[arg-type]


def gpt_shape(keys: ConfigKeys, *, kv_heads: int | None = None, **more: object) -> ModelShape:
    """GPT-2 and its kin, whose keys are `n_embd`, `n_layer` and `n_head`: biases everywhere, LayerNorm, learned
    positions, a head that is the embedding."""
    hidden, heads = keys.positive("n_embd"), keys.positive("n_head")
    if hidden % heads:
        raise UsageError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}")
    attention = Attention(
        heads=heads, kv_heads=kv_heads or heads, head_dim=hidden // heads, qkv_bias=True, output_bias=True
    )
    fields: dict[str, object] = {
        "model_type": keys.model_type(),
        "layers": layer_count(keys, "n_layer"),
        "hidden": hidden,
        "vocabulary": keys.positive("vocab_size"),
        "feed_forward": keys.optional("n_inner") or 4 * hidden,
        "attention": attention,
        "gated": False,
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "learned_positions": keys.positive("n_positions", 1024),
        "layer_norm": True,
        "feed_forward_bias": True,
    }
    return ModelShape(**(fields | more))  # type: ignore[arg-type]


def llama_shape(keys: ConfigKeys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    return model_shape(
        keys,
        attention_heads(keys, qkv_bias=bias, output_bias=bias),
        feed_forward_bias=keys.flag("mlp_bias", False),
    )


def latent_attention(keys: ConfigKeys, index: TokenIndex | None = None) -> LatentAttention:
    return LatentAttention(
        heads=keys.positive("num_attention_heads"),
        query_rank=keys.optional("q_lora_rank") or None,
        kv_rank=keys.positive("kv_lora_rank"),
        nope_dim=keys.positive("qk_nope_head_dim"),
        rope_dim=keys.positive("qk_rope_head_dim"),
        value_dim=keys.positive("v_head_dim"),
        bias=keys.flag("attention_bias", False),
        index=index,
    )


def dense_first(keys: ConfigKeys) -> ConfigKeys:
    """With `first_k_dense_replace` as `mlp_layer_types` says it, if that is there. Raises `UsageError` for dense layers
    after one with experts."""
    kinds = keys.words("mlp_layer_types")
    if kinds is None:
        return keys
    dense, layers = kinds.count("dense"), layer_count(keys)
    if list(kinds) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UsageError(
            f"config.json: 'mlp_layer_types': dense layers and then sparse ones, {layers} in all, are understood"
        )
    return keys.with_values(first_k_dense_replace=dense)


def deepseek_experts(keys: ConfigKeys) -> dict[str, object]:
    routed = keys.optional("n_routed_experts")
    if not routed:
        return {}
    feed_forward = keys.positive("moe_intermediate_size")
    groups = keys.positive("n_group", 1)
    return {
        "experts": Experts(
            routed=routed,
            per_token=keys.positive("num_experts_per_tok"),
            feed_forward=feed_forward,
            shared_feed_forward=feed_forward * keys.number("n_shared_experts", 0),
            groups=groups,
            groups_per_token=keys.positive("topk_group", groups),
        ),
        "dense_layers": keys.number("first_k_dense_replace", 0),
        "expert_interval": keys.positive("moe_layer_freq", 1),
    }


def qwen_window(keys: ConfigKeys) -> tuple[int | None, int]:
    if not keys.flag("use_sliding_window", False):
        return None, 0
    return keys.positive("sliding_window", 4096), keys.number("max_window_layers", 28)


def full_layers(keys: ConfigKeys, every: int) -> tuple[int, ...]:
    """Layers without a window: those that `layer_types` names, or every `every`-th one. Raises `UsageError` for other
    kinds of layers."""
    layers, kinds = layer_count(keys), keys.words("layer_types")
    if kinds is None:
        return tuple(range(every - 1, layers, every))
    other = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if other is not None or len(kinds) != layers:
        what = f"{len(kinds)} of them for {layers} layers" if other is None else f"{other!r} is not known"
        raise UsageError(f"config.json: 'layer_types': {what}; full_attention and sliding_attention are understood")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
