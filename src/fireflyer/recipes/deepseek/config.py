"""What a model is: the dimensions that all of the product shares (`ModelShape`), and what only its code needs.

`DeepseekConfig.from_hugging_face(json.loads(text))` reads the `config.json` of a `deepseek_v3` or `llama`,
`to_hugging_face()` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import (
    Attention,
    ConfigKeys,
    Experts,
    LatentAttention,
    ModelShape,
    ParameterCount,
    count_parameters,
    shape_from_config,
)

__all__ = ["PRESETS", "DeepseekConfig", "Yarn"]

_KNOWN: Final = ("deepseek_v3", "llama")


class Yarn(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary frequencies for contexts longer than the one that was trained (Peng et al. 2023, "YaRN")."""

    factor: float
    original_context: int
    """Tokens of the context that was trained."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def rotation_scale(self) -> float:
        """Factor of cosine and sine."""
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores of latent attention."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


class DeepseekConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions and constants of a model. Raises `UsageError` for what this model is not."""

    shape: ModelShape
    context: int = 4096
    """Longest sequence, in tokens."""
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_interleaved: bool = True
    """Rotated pairs are (0, 1), (2, 3), …; otherwise (0, d/2), (1, d/2 + 1), …."""
    yarn: Yarn | None = None
    routed_scaling: float = 2.5
    """Factor of the weights of routed experts."""
    renormalised: bool = True
    """Weights of the chosen experts are divided by their sum."""
    mtp_hidden_first: bool = False
    """Order of what the projection of a prediction module reads: embedding and then hidden state, as the published
    weights have it, or hidden state first, as the equation of the DeepSeek-V3 report (2.2) has it."""
    deviation: float = 0.02
    """Standard deviation of the initial weights."""
    seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        shape = self.shape
        refusals = {
            f"model_type {shape.model_type!r}": shape.model_type not in _KNOWN,
            "a feed-forward without gate": not shape.gated,
            "learned positions": shape.learned_positions > 0,
            "LayerNorm": shape.layer_norm,
        }
        attention = shape.attention
        if isinstance(attention, Attention):
            refusals |= {
                "norms on queries and keys": attention.qk_norm,
                "an attention window": attention.window is not None,
                "experts or prediction modules beside attention with key-value heads": (
                    shape.experts is not None or shape.mtp_layers > 0
                ),
            }
        for what, refused in refusals.items():
            if refused:
                raise UsageError(
                    f"this model does not have {what}; it has latent attention with experts, or is a llama"
                )
        rotated = attention.rope_dim if isinstance(attention, LatentAttention) else attention.head_dim
        if rotated % 2 or rotated < 2:
            raise UsageError(f"rotary positions turn pairs of values; {rotated} values of a key are rotated")
        experts = shape.experts
        if experts is not None:
            _check_groups(experts)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, object], *, seed: int = 0) -> DeepseekConfig:
        """Config of a decoded `config.json`, in the form of transformers 4 (`rope_theta`, `rope_scaling`) or 5
        (`rope_parameters`). Raises `UsageError`: one line with the key that is missing, wrong or not supported."""
        shape, keys = shape_from_config(config), ConfigKeys(config)
        activation = keys.text("hidden_act", "silu")
        if activation != "silu":
            raise UsageError(f"config.json: 'hidden_act' is {activation!r}; this model has 'silu'")
        rope = keys.table("rope_parameters") or keys.table("rope_scaling")
        theta = keys.real("rope_theta", 10_000.0)
        llama = shape.model_type == "llama"
        context = keys.positive("max_position_embeddings", 2048 if llama else 4096)
        return cls(
            shape=shape,
            context=context,
            norm_eps=keys.real("rms_norm_eps", 1e-6),
            rope_theta=theta if rope is None else rope.real("rope_theta", theta),
            rope_interleaved=not llama and keys.flag("rope_interleave", True),
            yarn=None if rope is None else _yarn(rope, context),
            routed_scaling=keys.real("routed_scaling_factor", 2.5),
            renormalised=keys.flag("norm_topk_prob", True),
            mtp_hidden_first=keys.flag("mtp_hidden_states_first", False),
            deviation=keys.real("initializer_range", 0.02),
            seed=seed,
        )

    def to_hugging_face(self) -> dict[str, object]:
        """`config.json` of this model, from which `from_hugging_face` makes an equal one (but for the seed)."""
        shape = self.shape
        llama = shape.model_type == "llama"
        config: dict[str, object] = {
            "architectures": ["LlamaForCausalLM" if llama else "DeepseekV3ForCausalLM"],
            "model_type": shape.model_type,
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "initializer_range": self.deviation,
            "intermediate_size": shape.feed_forward,
            "max_position_embeddings": self.context,
            "num_attention_heads": shape.attention.heads,
            "num_hidden_layers": shape.layers,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": shape.tied_embeddings,
            "vocab_size": shape.vocabulary,
        }
        if self.yarn is not None:
            config["rope_scaling"] = _yarn_keys(self.yarn)
        attention = shape.attention
        if isinstance(attention, Attention):
            return config | {
                "attention_bias": attention.qkv_bias,
                "head_dim": attention.head_dim,
                "mlp_bias": shape.feed_forward_bias,
                "num_key_value_heads": attention.kv_heads,
            }
        return config | _latent_keys(attention) | self._expert_keys()

    @property
    def parameters(self) -> ParameterCount:
        """Number of parameters, in total and used by one token; the biases of the gates are none."""
        return count_parameters(self.shape)

    def _expert_keys(self) -> dict[str, object]:
        shape, experts = self.shape, self.shape.experts
        keys: dict[str, object] = {
            "first_k_dense_replace": shape.dense_layers,
            "moe_layer_freq": shape.expert_interval,
            "mtp_hidden_states_first": self.mtp_hidden_first,
            "norm_topk_prob": self.renormalised,
            "num_nextn_predict_layers": shape.mtp_layers,
            "rope_interleave": self.rope_interleaved,
            "routed_scaling_factor": self.routed_scaling,
        }
        if experts is None:
            return keys | {"first_k_dense_replace": shape.layers}
        if experts.shared_feed_forward % experts.feed_forward:
            raise UsageError(
                f"shared experts of {experts.shared_feed_forward} values are no multiple of a routed one, "
                f"{experts.feed_forward}; config.json cannot say so"
            )
        return keys | {
            "moe_intermediate_size": experts.feed_forward,
            "n_group": experts.groups,
            "n_routed_experts": experts.routed,
            "n_shared_experts": experts.shared_feed_forward // experts.feed_forward,
            "num_experts_per_tok": experts.per_token,
            "scoring_func": "sigmoid",
            "topk_group": experts.groups_per_token,
            "topk_method": "noaux_tc",
        }


def _check_groups(experts: Experts) -> None:
    if not 1 <= experts.groups_per_token <= experts.groups:
        raise UsageError(f"experts are taken from {experts.groups_per_token} of {experts.groups} groups; use 1 or more")
    reachable = experts.groups_per_token * (experts.routed // experts.groups)
    if experts.per_token > reachable:
        raise UsageError(f"a token goes to {experts.per_token} experts, but only {reachable} are in its groups")


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(rope: ConfigKeys, context: int) -> Yarn | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise UsageError(f"config.json: rotary positions of type {kind!r}; known are 'default' and 'yarn'")
    original = rope.positive("original_max_position_embeddings")
    return Yarn(
        factor=rope.real("factor", context / original),
        original_context=original,
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
        mscale=rope.real("mscale") if rope.has("mscale") else None,
        mscale_all_dim=rope.real("mscale_all_dim") if rope.has("mscale_all_dim") else None,
    )


def _yarn_keys(yarn: Yarn) -> dict[str, object]:
    keys: dict[str, object] = {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_context,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return keys | {name: value for name, value in scales.items() if value is not None}


def _latent_keys(attention: LatentAttention) -> dict[str, object]:
    return {
        "attention_bias": attention.bias,
        "kv_lora_rank": attention.kv_rank,
        "num_key_value_heads": attention.heads,
        "q_lora_rank": attention.query_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
    }


def _preset(
    *, hidden: int, layers: int, heads: int, vocabulary: int, experts: Experts, context: int, mtp: int = 1
) -> DeepseekConfig:
    attention = LatentAttention(
        heads=heads, query_rank=hidden // 2, kv_rank=hidden // 4, nope_dim=24, rope_dim=8, value_dim=24
    )
    shape = ModelShape(
        model_type="deepseek_v3",
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        feed_forward=3 * hidden,
        attention=attention,
        experts=experts,
        dense_layers=1,
        mtp_layers=mtp,
    )
    return DeepseekConfig(shape=shape, context=context)


PRESETS: Final[Mapping[str, DeepseekConfig]] = {
    "tiny": _preset(
        hidden=32,
        layers=2,
        heads=2,
        vocabulary=96,
        experts=Experts(routed=8, per_token=3, feed_forward=16, shared_feed_forward=16, groups=4, groups_per_token=2),
        context=64,
    ),
    "small": _preset(
        hidden=128,
        layers=4,
        heads=4,
        vocabulary=1024,
        experts=Experts(routed=8, per_token=2, feed_forward=64, shared_feed_forward=64, groups=4, groups_per_token=2),
        context=256,
    ),
}
"""Models of 50 thousand and 1.5 million parameters."""
