"""Parameters of a model, counted exactly from its shape: per layer, in total, and those that one token uses.

The router's selection bias of DeepSeek-V3 (one value per expert) is no parameter here: it gets no gradient.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fireflyer.codesign.model.shape import Attention, LatentAttention, ModelShape

__all__ = [
    "LayerParameters",
    "ParameterCount",
    "attention_matrix",
    "count_parameters",
    "expert_parameters",
    "layer_parameters",
    "mtp_parameters",
    "norm_parameters",
    "outer_vectors",
]


class LayerParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one layer, by what parallelism does to them."""

    matrix: int
    """Matrices of attention, dense feed-forward and shared experts; tensor parallelism divides them."""
    vector: int
    """Norms and biases; each rank of tensor parallelism has them whole (biases of divided matrices included)."""
    router: int = 0
    """The matrix that scores the experts, with what else chooses and weighs them; each rank has it whole."""
    routed: int = 0
    """All routed experts; expert parallelism divides them."""
    routed_active: int = 0
    """Those that one token uses."""
    routed_active_bias: int = 0
    """Biases among the latter."""

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.matrix + self.vector + self.router + self.routed

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.routed + self.routed_active

    @property
    def active_matrix(self) -> int:
        """Parameters in matrix products of one token, without the router."""
        return self.matrix + self.routed_active - self.routed_active_bias


class ParameterCount(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a model."""

    total: int
    """All of the main model: embedding, layers, last norm, output head (once where it is the embedding)."""
    active: int
    """Parameters that one token uses: routed experts count as many as a token goes to."""
    embedding: int
    head: int
    """Parameters of the output head without its bias; 0 where it is the embedding."""
    mtp: int
    """Parameters of multi-token prediction that the main model has not; not in `total`."""


def attention_matrix(shape: ModelShape) -> int:
    """Parameters in the matrices of one attention block."""
    attention, hidden = shape.attention, shape.hidden
    if isinstance(attention, Attention):
        return hidden * attention.head_dim * (2 * attention.heads + 2 * attention.kv_heads)
    queries = attention.heads * attention.score_dim
    query = hidden * queries if attention.query_rank is None else attention.query_rank * (hidden + queries)
    down = hidden * (attention.kv_rank + attention.rope_dim)
    up = attention.kv_rank * attention.heads * (attention.nope_dim + attention.value_dim)
    index = 0
    if attention.index is not None:
        keys, heads = attention.index.head_dim, attention.index.heads
        index = (attention.query_rank or 0) * heads * keys + hidden * (keys + heads)  # queries, keys, weights of heads
    return query + down + up + attention.heads * attention.value_dim * hidden + index


def _attention_vector(shape: ModelShape) -> int:
    attention = shape.attention
    if isinstance(attention, LatentAttention):
        norms = attention.kv_rank + (attention.query_rank or 0)
        # The bias of queries is on their latent: without one there is none.
        biases = norms + attention.rope_dim + shape.hidden if attention.bias else 0
        index_norm = 0 if attention.index is None else 2 * attention.index.head_dim  # a LayerNorm of its keys
        return norms + biases + index_norm
    biases = attention.head_dim * (attention.heads + 2 * attention.kv_heads) if attention.qkv_bias else 0
    biases += shape.hidden if attention.output_bias else 0
    norms = 2 * attention.head_dim if attention.qk_norm else 0
    norms += attention.head_dim * (attention.heads + attention.kv_heads) if attention.wide_qk_norm else 0
    return biases + norms + (attention.heads if attention.sinks else 0)


def norm_parameters(shape: ModelShape) -> int:
    """Parameters of one norm of `hidden` values."""
    return 0 if shape.plain_norms else shape.hidden * (2 if shape.layer_norm else 1)


def outer_vectors(shape: ModelShape) -> tuple[int, int]:
    """Parameters outside the layers and matrices: before the first layer, and after the last one."""
    before = norm_parameters(shape) if shape.embedding_norm else 0
    return before, norm_parameters(shape) + (shape.vocabulary if shape.head_bias else 0)


def expert_parameters(shape: ModelShape) -> int:
    """Parameters of one routed expert; 0 for a model without."""
    if shape.experts is None:
        return 0
    return 3 * shape.hidden * shape.experts.feed_forward + _expert_biases(shape)


def _expert_biases(shape: ModelShape) -> int:
    experts = shape.experts
    return 0 if experts is None or not experts.bias else 2 * experts.feed_forward + shape.hidden


def layer_parameters(shape: ModelShape, layer: int) -> LayerParameters:
    """Parameters of `layer`, counted from 0. Layers of multi-token prediction are as the last one."""
    return _layer_parameters(shape, shape.has_experts(layer))


@lru_cache(maxsize=64)
def _layer_parameters(shape: ModelShape, has_experts: bool) -> LayerParameters:
    matrix, vector = attention_matrix(shape), _attention_vector(shape) + shape.norms * norm_parameters(shape)
    experts = shape.experts
    if not has_experts or experts is None:
        matrices = 3 if shape.gated else 2
        if shape.feed_forward_bias:
            vector += (matrices - 1) * shape.feed_forward + shape.hidden
        return LayerParameters(matrix=matrix + matrices * shape.hidden * shape.feed_forward, vector=vector)
    one = expert_parameters(shape)
    router = shape.hidden * experts.routed
    router += (experts.routed if experts.bias else 0) + (shape.hidden if experts.shared_gate else 0)
    return LayerParameters(
        matrix=matrix + 3 * shape.hidden * experts.shared_feed_forward,
        vector=vector,
        router=router,
        routed=experts.routed * one,
        routed_active=experts.per_token * one,
        routed_active_bias=experts.per_token * _expert_biases(shape),
    )


def mtp_parameters(shape: ModelShape) -> int:
    """Parameters of one module of multi-token prediction that the main model has not: a layer, a projection of 2h to h,
    three norms. Embedding and head are those of the main model."""
    last = layer_parameters(shape, shape.layers - 1)
    return last.total + 2 * shape.hidden * shape.hidden + 3 * norm_parameters(shape)


@lru_cache(maxsize=64)
def count_parameters(shape: ModelShape) -> ParameterCount:
    """Parameters of the model of this shape.

    >>> from fireflyer.codesign.model import shape_from_config
    >>> config = dict(model_type="gpt2", n_layer=24, n_embd=1024, n_head=16, n_positions=1024, vocab_size=50257)
    >>> count_parameters(shape_from_config(config)).total
    354823168
    """
    layers = [layer_parameters(shape, layer) for layer in range(shape.layers)]
    embedding = shape.vocabulary * shape.hidden
    head = 0 if shape.tied_embeddings else embedding
    outside = embedding + head + shape.learned_positions * shape.hidden + sum(outer_vectors(shape))
    return ParameterCount(
        total=outside + sum(layer.total for layer in layers),
        active=outside + sum(layer.active for layer in layers),
        embedding=embedding,
        head=head,
        mtp=shape.mtp_layers * mtp_parameters(shape),
    )
