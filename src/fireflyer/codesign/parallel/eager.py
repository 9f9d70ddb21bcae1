"""Activations of a rank whose operators are not fused: PyTorch without compilation on the CPU.

Counted are the storages that autograd of PyTorch keeps, by operator. Beside those of fused kernels
(`fireflyer.codesign.parallel.memory`) they are:

- a norm keeps its input and the normed input in FP32, beside the result that matrix products read;
- autocast converts the input of each product on its own (three times for separate queries, keys and values), and keeps
  a BF16 copy of each weight for each micro-batch;
- the feed-forward layer keeps the result of the activation function and the product with `up`;
- of a stacked projection the values are a view, which keeps all of it;
- attention whose values have another width than its keys (latent attention) keeps all scores, in FP32;
- the head keeps FP32 log-probabilities of the vocabulary, and holds two more of that size in backward.

A rank of a tensor group has its part of each sequence in the residual stream and in norms, and of all tokens its heads
and inner values, as `fireflyer.training.tensor` divides them. Whole on each rank are what is gathered, and results that
are not added over the ranks yet:

- the input of the matrices before attention and feed-forward, and that of the head; a stacked projection is several
  matrices there, of which each converts its input under autocast;
- of `operators` the results of the matrices behind attention and feed-forward, beside their sums, which are parts;
- logits and log-probabilities, the gradient of a gathered input, and which tokens have their row of the embedding here.

Latent attention and experts are not divided by it; they are counted as if all of them was. A stage of a pipeline keeps
what it has passed on, until its backward pass. Messages on their way are in no figure here.

Blocks are those of `fireflyer.recipes`: `gpt` with stacked projections, the Llama of `transformers`, DeepSeek. Other
blocks of `transformers` are counted as that Llama or as DeepSeek's experts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.model.shape import Attention, Experts, LatentAttention
from fireflyer.codesign.parallel.kept_gradients import ValueBytes
from fireflyer.codesign.parallel.plan import ParallelPlan, Precision
from fireflyer.codesign.parallel.stages import Stage, layer_groups, layers_with

__all__ = ["EagerMemory", "eager_layer", "eager_memory", "eager_values"]

WIDE = 4
"""Bytes of an FP32 value: norms, scores, gates and log-probabilities, whatever products compute in."""
INDEX = 8
"""Bytes of the number of a token, an expert or a row."""


class EagerMemory(NamedTuple):
    """Bytes of one micro-batch of a piece."""

    activations: int
    working: int


class EagerLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per token that forward keeps in one layer on one rank, without copies of weights."""

    everything: float
    operators: float
    """Where only results of matrix products and of attention are kept."""
    block_input: float
    gradients: float
    """Largest gradients that backward holds beside, without those of weights."""

    def kept(self, recompute: str) -> float:
        """Bytes with this recomputation of blocks."""
        return {"none": self.everything, "operators": self.operators, "blocks": self.block_input}.get(recompute, 0.0)


class _Formats(NamedTuple):
    """Bytes of values."""

    stream: int
    """Of the residual stream."""
    product: int
    """Of factors and results of matrix products."""
    cast: bool
    """Autocast: factors are copies."""


def eager_values(precision: Precision) -> ValueBytes:
    """Bytes of values whose gradients are kept for the pass for weights."""
    formats = _formats(precision)
    return ValueBytes(stream=formats.stream, product=formats.product)


def _formats(precision: Precision) -> _Formats:
    cast = precision.parameters == "fp32" and precision.compute == "bf16"
    return _Formats(stream=precision.stream_bytes, product=precision.product_bytes, cast=cast)


@lru_cache(maxsize=256)
def eager_layer(
    shape: ModelShape, has_experts: bool, precision: Precision, sequence_tokens: int, tensor: int = 1
) -> EagerLayer:
    """Bytes per token of one layer on one of `tensor` ranks that divide it."""
    formats = _formats(precision)
    attention = shape.attention
    if isinstance(attention, LatentAttention):
        kept, results = (one / tensor for one in _latent_attention(shape, attention, formats, sequence_tokens))
    else:
        kept, results = _head_attention(shape, attention, formats, tensor)
    experts = shape.experts if has_experts else None
    if experts is None:
        forward = _feed_forward(shape, formats, tensor)
    else:
        of_experts = _experts(shape, experts, formats)
        forward = of_experts[0] / tensor, of_experts[1] / tensor
    widest = shape.feed_forward if experts is None else experts.per_token * max(experts.feed_forward, shape.hidden)
    block_input = formats.stream * shape.hidden
    return EagerLayer(
        everything=2 * _norm(shape.hidden) / tensor + kept + forward[0],
        operators=block_input / tensor + results + forward[1],
        block_input=block_input / tensor,
        gradients=block_input * (1 + 1 / tensor if tensor > 1 else 1) + formats.product * widest / tensor,
    )


def _norm(width: int) -> int:
    """Input and normed input, and one statistic."""
    return 2 * WIDE * width + WIDE


def _inputs(width: int, products: int, formats: _Formats) -> int:
    """What `products` matrix products of one input keep of it."""
    return formats.product * width * (products if formats.cast else 1)


def _added(width: int, formats: _Formats, tensor: int) -> float:
    """Result of a matrix whose inputs are divided, and its part of the sum over the ranks."""
    return formats.product * width * (1 + 1 / tensor if tensor > 1 else 1)


def _head_attention(shape: ModelShape, attention: Attention, formats: _Formats, tensor: int) -> tuple[float, float]:
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    statistics = WIDE * attention.heads
    stacked = shape.model_type == "gpt"
    values = queries + 2 * keys if stacked else keys
    # There heads are contiguous, and where they are several put in the order of tokens by a copy.
    output = 2 * queries if stacked and attention.heads > tensor else queries
    kept = statistics + formats.product * (queries + keys + values + output)
    results = statistics + formats.product * (2 * queries + 2 * keys)
    read = _inputs(shape.hidden, 1 if stacked and tensor == 1 else 3, formats)
    return read + kept / tensor, results / tensor + _added(shape.hidden, formats, tensor)


def _latent_attention(
    shape: ModelShape, attention: LatentAttention, formats: _Formats, sequence_tokens: int
) -> tuple[int, int]:
    heads, rank, latents = attention.heads, attention.query_rank, attention.kv_rank + attention.rope_dim
    queries, values = heads * attention.score_dim, heads * attention.value_dim
    scores = WIDE * heads * sequence_tokens
    # The latent that is normed is a view of its rows in FP32, and a copy of its own where it is converted.
    rows = latents if formats.product == WIDE else attention.kv_rank
    kept = _inputs(shape.hidden, 2, formats) + WIDE * (rows + attention.kv_rank + 1) + formats.product * latents
    kept += WIDE * (2 * queries + values) + scores + formats.product * values
    if rank is not None:
        kept += _norm(rank) + formats.product * rank
    expanded = heads * (attention.nope_dim + attention.value_dim)
    results = formats.product * ((rank or 0) + queries + latents + expanded + shape.hidden)
    return kept, results + scores + WIDE * values


def _feed_forward(shape: ModelShape, formats: _Formats, tensor: int) -> tuple[float, float]:
    matrices = 2 if shape.gated else 1
    inner = formats.product * matrices * shape.feed_forward / tensor
    return _inputs(shape.hidden, matrices, formats) + 2 * inner, inner + _added(shape.hidden, formats, tensor)


def _experts(shape: ModelShape, experts: Experts, formats: _Formats) -> tuple[int, int]:
    h, each = shape.hidden, experts.per_token
    gate = WIDE * (h + experts.routed + 1)  # the FP32 input of the gate is the other products' where they are FP32
    gate += each * (4 * INDEX + 3 * WIDE)  # chosen, sorted, and their places; weights before and after
    routed = each * (_inputs(h, 2, formats) + 4 * formats.product * experts.feed_forward + WIDE * h)
    kept, results = gate + routed, WIDE * experts.routed + formats.product * each * (2 * experts.feed_forward + h)
    if experts.shared_feed_forward:
        kept += 4 * formats.product * experts.shared_feed_forward
        kept += 0 if formats.product == WIDE else _inputs(h, 2, formats)
        results += formats.product * (2 * experts.shared_feed_forward + h)
    return kept, results


class _Head(NamedTuple):
    """Bytes of the last norm, of the output heads, and of modules of multi-token prediction outside their blocks."""

    kept: float
    again: float
    """What backward computes again of a module that is recomputed."""
    freed: float
    """Of the head whose backward is the first, when that of the last block begins."""
    cast: float
    """Copy of the head's weight."""


def eager_memory(plan: ParallelPlan, shape: ModelShape, piece: Stage) -> EagerMemory:
    """Of one micro-batch of a piece on one rank; and the most that the end of forward, the backward of a head, or that
    of the block with most, holds beside it."""
    tokens, formats = plan.micro_batch_tokens, _formats(plan.precision)
    layers = [
        (count, eager_layer(shape, has_experts, plan.precision, plan.sequence_tokens, plan.tensor), mode)
        for count, has_experts, mode in layer_groups(plan.recompute, shape, piece)
    ]
    count = sum(number for number, _, _ in layers)
    head = _head(plan, shape, piece)
    cached, of_experts = _casts(plan, shape, piece, formats)
    casts = cached - head.cast + of_experts
    # In a block that is computed backward: gradients, and that of the largest matrix before it is added to others.
    matrix = formats.product * shape.hidden * max(shape.feed_forward, shape.attention.heads * shape.attention.score_dim)
    gradients = (
        max((tokens * layer.gradients for _, layer, _ in layers), default=0.0) + matrix / plan.tensor - head.freed
    )
    logits = tokens * shape.vocabulary if piece.head else 0.0
    forward, backward_head = logits * (WIDE if formats.product == WIDE else WIDE + formats.product), 2 * WIDE * logits
    between = formats.stream * shape.hidden / plan.tensor
    passed_on = tokens * between if plan.pipeline > 1 and not piece.head else 0.0
    if plan.recompute == "full":
        everything = tokens * sum(number * layer.everything for number, layer, _ in layers) + head.kept + head.again
        outside = _outside_of_recomputation(plan, shape, piece, head)
        kept = tokens * (2 * INDEX if piece.embedding else between) + outside
        again = everything + casts + head.cast - kept
        if plan.pipeline > 1:  # all of the loss is done before
            again -= outside - head.freed
        return EagerMemory(round(kept + passed_on), round(again + max(backward_head, gradients)))
    kept = tokens * sum(number * layer.kept(mode) for number, layer, mode in layers)
    kept += head.kept + head.cast + passed_on
    if piece.embedding and plan.tensor > 1:
        kept += tokens * (INDEX + 1)
    again = max((tokens * (layer.everything - layer.kept(mode)) for _, layer, mode in layers), default=0.0) + head.again
    if plan.tensor > 1 and any(mode == "operators" for _, _, mode in layers):
        again += tokens * _added(shape.hidden, formats, plan.tensor)  # a block is computed until before its last result
    plain = layers_with(plan.recompute, shape, piece, "none") / count if count else float(_last_mode(plan) == "none")
    kept += plain * casts
    if plain < 1:
        forward += (1 - plain) * (cached - head.cast)  # until autocast ends; what is kept has none of them
        again += casts / max(1, count)
    return EagerMemory(round(kept), round(max(forward, backward_head, again + gradients, 0.0)))


def _last_mode(plan: ParallelPlan) -> str:
    """Recomputation of the last layer, which modules of multi-token prediction are."""
    return plan.recompute[-1] if isinstance(plan.recompute, tuple) else plan.recompute


def _outside_of_recomputation(plan: ParallelPlan, shape: ModelShape, piece: Stage, head: _Head) -> float:
    """Bytes that are kept all the same where a whole stage is computed again. The loss of a pipeline is outside of its
    last stage, and with it norm, head and prediction modules. Of other models than DeepSeek's, whose loss is in them,
    log-probabilities are."""
    if not piece.head:
        return 0.0
    tokens = plan.micro_batch_tokens
    if plan.pipeline == 1:
        return 0.0 if shape.model_type == "deepseek_v3" else float(tokens * WIDE * shape.vocabulary)
    last = eager_layer(shape, shape.has_experts(shape.layers - 1), plan.precision, plan.sequence_tokens, plan.tensor)
    return head.kept + head.cast + (piece.heads - 1) * tokens * last.everything


def _head(plan: ParallelPlan, shape: ModelShape, piece: Stage) -> _Head:
    if not piece.head:
        return _Head(0.0, 0.0, 0.0, 0.0)
    formats, h = _formats(plan.precision), shape.hidden
    tokens, modules = plan.micro_batch_tokens, piece.heads - 1
    norm, output = _norm(h) / plan.tensor, formats.product * h + WIDE * shape.vocabulary
    # Its input is that of the head before, where the head computes in FP32 and so keeps no copy.
    hidden = 0 if formats.product == WIDE else formats.stream * h
    # Of a module: two norms, of which one has that input; both side by side; the last norm.
    module = 3 * norm - (0 if hidden else WIDE * h) + 2 * formats.product * h
    again = 0.0
    mode = _last_mode(plan)
    if mode in ("operators", "blocks"):  # the module is one block, whose input is its two
        kept = hidden + (formats.product * h if mode == "operators" else 0)
        module, again = kept, module - kept if modules else 0
    cast = formats.product * shape.vocabulary * h / plan.tensor if formats.cast else 0.0
    freed = output if modules else norm + output
    return _Head(tokens * (norm + output + modules * (module + output)), tokens * again, tokens * freed, cast)


def _casts(plan: ParallelPlan, shape: ModelShape, piece: Stage, formats: _Formats) -> tuple[float, float]:
    """Bytes of copies of weights under autocast: those that it holds until its end, and of experts, which it does not.
    An embedding is read without one."""
    if not formats.cast:
        return 0.0, 0.0
    embedding = shape.vocabulary * shape.hidden
    looked_up = piece.embedding and not (piece.head and shape.tied_embeddings)
    copied = piece.copies if shape.mtp_layers and not shape.tied_embeddings else 0
    matrix = piece.matrix - (embedding if looked_up else 0) - copied
    return formats.product * matrix / plan.tensor, formats.product * piece.routed / plan.expert
