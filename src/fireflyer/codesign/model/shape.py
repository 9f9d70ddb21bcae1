"""`ModelShape`: the dimensions of a transformer, from which parameters, FLOPs and the KV cache follow.

A shape has no weights and no code: it is what the `config.json` of a model says (`fireflyer.codesign.model.config`), in
one form for all architectures. Names of dimensions follow the papers: `hidden` h, `heads` H, `feed_forward` f.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model.keys import MAX_LAYERS

__all__ = ["Attention", "Experts", "LatentAttention", "ModelShape", "TokenIndex"]


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="heads"):
    """Attention with `heads` query heads and `kv_heads` key-value heads: multi-head where they are equal, multi-query
    where there is one, grouped-query (Ainslie et al. 2023) between."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """A norm of `head_dim` values on queries and one on keys."""
    wide_qk_norm: bool = False
    """A norm of the values of all heads on queries and one on keys."""
    sinks: bool = False
    """A logit of each head that takes a share of its attention (gpt-oss)."""
    window: int | None = None
    """Tokens that a query sees in the layers from `first_windowed` on; all before it where absent."""
    first_windowed: int = 0
    full_layers: tuple[int, ...] = ()
    """Later layers in which a query sees all before it nevertheless."""

    @property
    def score_dim(self) -> int:
        """Values of a query or key of one head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Values of a value vector of one head."""
        return self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of `layer` sees, or None for all."""
        return self.window if layer >= self.first_windowed and layer not in self.full_layers else None


class TokenIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Scores by which each query chooses the tokens that it sees (sparse attention of DeepSeek-V3.2): `heads` queries
    are projected from the latent of the queries, and one key of `head_dim` values for each token is cached."""

    heads: int
    head_dim: int
    tokens: int
    """Most tokens that a query sees."""


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """Multi-head latent attention (DeepSeek-V2, 2.1): keys and values are projected from one latent of `kv_rank` values
    per token, and `rope_dim` values of the key are shared by all heads."""

    heads: int
    query_rank: int | None
    """Latent of the queries; None: they are projected from the hidden state."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False
    index: TokenIndex | None = None
    """None: a query sees all tokens before it. Needs a latent of the queries."""

    @property
    def score_dim(self) -> int:
        """Values of a query or key of one head."""
        return self.nope_dim + self.rope_dim

    def window_of(self, layer: int) -> int | None:  # noqa: ARG002
        """Tokens that a query sees: None, all before it."""
        return None


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Feed-forward experts of a mixture-of-experts layer."""

    routed: int
    per_token: int
    feed_forward: int
    """Inner dimension of one routed expert."""
    shared_feed_forward: int = 0
    """Inner dimension of all shared experts together; 0: none."""
    groups: int = 1
    """Groups of experts; node-limited routing (DeepSeek-V3, 4.3) puts each on a node."""
    groups_per_token: int = 1
    """Groups from which the experts of a token are taken."""
    bias: bool = False
    """Routed experts and the router have biases."""
    shared_gate: bool = False
    """A vector of `hidden` values weighs the shared experts (Qwen2-MoE)."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Dimensions of a decoder-only transformer. Raises `UsageError` if they are no model."""

    model_type: str
    layers: int
    hidden: int
    vocabulary: int
    feed_forward: int
    """Inner dimension of the dense layers."""
    attention: Attention | LatentAttention
    gated: bool = True
    """Feed-forward layers have a gate projection beside up and down (SwiGLU)."""
    experts: Experts | None = None
    dense_layers: int = 0
    """First layers without experts, in a model with experts."""
    expert_interval: int = 1
    """Interval of layers with experts: layer i, from `dense_layers` on, has them where i % `expert_interval` is
    `expert_offset`."""
    expert_offset: int = 0
    mtp_layers: int = 0
    """Multi-token prediction modules (DeepSeek-V3, 2.3.3): a layer, a projection of 2h to h and three norms each."""
    tied_embeddings: bool = False
    """The output head is the embedding."""
    head_bias: bool = False
    learned_positions: int = 0
    """Rows of a table of position embeddings; 0: none (rotary)."""
    layer_norm: bool = False
    """Norms have a bias (LayerNorm); otherwise they have a weight only (RMSNorm)."""
    feed_forward_bias: bool = False
    plain_norms: bool = False
    """Norms have neither weight nor bias (OLMo)."""
    embedding_norm: bool = False
    """The embedding has a norm (BLOOM)."""
    norms: int = 2
    """Norms of `hidden` values in a layer: 4 where results of attention and feed-forward have norms, too (Gemma 2), 1
    where both read the same (Falcon)."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocabulary", "feed_forward"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; a model has at least 1")
        if self.layers > MAX_LAYERS:
            raise UsageError(f"a model of {self.layers} layers; up to {MAX_LAYERS} are understood")
        attention = self.attention
        if isinstance(attention, Attention) and attention.heads % attention.kv_heads:
            raise UsageError(
                f"{attention.heads} attention heads are no multiple of the {attention.kv_heads} key-value heads"
            )
        if isinstance(attention, LatentAttention) and attention.index is not None and attention.query_rank is None:
            raise UsageError("an index of tokens is projected from the latent of the queries, and the model has none")
        experts = self.experts
        if experts is not None and not 1 <= experts.per_token <= experts.routed:
            raise UsageError(f"a token goes to {experts.per_token} of {experts.routed} routed experts; use 1 or more")
        if experts is not None and experts.routed % experts.groups:
            raise UsageError(f"{experts.routed} routed experts do not divide into {experts.groups} groups")

    def has_experts(self, layer: int) -> bool:
        """True if the feed-forward part of `layer` is a mixture of experts."""
        return (
            self.experts is not None
            and layer >= self.dense_layers
            and layer % self.expert_interval == self.expert_offset
        )

    @cached_property
    def expert_layers(self) -> int:
        """Layers with experts, without those of multi-token prediction."""
        return sum(self.has_experts(layer) for layer in range(self.layers))
