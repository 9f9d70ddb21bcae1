"""FLOPs of training per token, and MFU, by the conventions of the DeepSeek-V3 paper (2.2.1 table 2, 5.1.2 table 4).

`training_flops` counts the matrices that a token uses (6 FLOPs per parameter: forward 2, backward 4) with the output
head, without the input embedding and the router, and the attention scores: of the lower triangle (causal, as
FlashAttention computes them) or of the whole matrix (non-causal, as Megatron counts them). `dense_flops` is what table
2 uses for its dense rows: 12 L h^2 parameters and the head, whatever the attention and feed-forward dimensions are.
Both are in use, so both are printed.
"""

from __future__ import annotations

from functools import lru_cache

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model.parameters import layer_parameters
from fireflyer.codesign.model.shape import LatentAttention, ModelShape

__all__ = ["attention_flops", "dense_flops", "model_flops_utilization", "training_flops"]


def attention_flops(shape: ModelShape, layer: int, sequence_tokens: int, *, causal: bool = True) -> float:
    """FLOPs per token of the scores and weighted sums of one layer, forward only. A window bounds the keys of a
    query, as an index of tokens does, whose own scores are of all keys."""
    attention = shape.attention
    index = attention.index if isinstance(attention, LatentAttention) else None
    window = attention.window_of(layer) if index is None else index.tokens
    seen = 2 * _keys(sequence_tokens, window, causal=causal)
    scores = seen * attention.heads * (attention.score_dim + attention.value_dim)
    if index is None:
        return scores
    return scores + 2 * _keys(sequence_tokens, None, causal=causal) * index.heads * index.head_dim


def _keys(sequence_tokens: int, window: int | None, *, causal: bool) -> float:
    """Keys of a query, the mean of a sequence."""
    if window is not None and window < sequence_tokens:
        return window - window * window / (2 * sequence_tokens) if causal else window
    return sequence_tokens / 2 if causal else sequence_tokens


@lru_cache(maxsize=256)
def training_flops(shape: ModelShape, sequence_tokens: int, *, causal: bool = True) -> float:
    """FLOPs per token of a training step of the main model: forward and backward, without recomputation. Raises
    `UsageError` for a sequence without tokens.

    DeepSeek-V3 with 4096 tokens: 249.81e9 causal, 280.51e9 non-causal.
    """
    if sequence_tokens < 1:
        raise UsageError(f"a sequence of {sequence_tokens} tokens is none; use 1 or more")
    matrix = shape.vocabulary * shape.hidden
    scores = 0.0
    for layer in range(shape.layers):
        matrix += layer_parameters(shape, layer).active_matrix
        scores += attention_flops(shape, layer, sequence_tokens, causal=causal)
    return 6 * matrix + 3 * scores


def dense_flops(shape: ModelShape) -> float:
    """FLOPs per token by 6 (12 L h^2 + V h): no attention scores, no grouped heads, no gate. Table 2 of the DeepSeek-V3
    paper counts its dense rows so: 394.02e9 for Qwen-72B, 2447.85e9 for LLaMa-405B."""
    return 6.0 * (12 * shape.layers * shape.hidden**2 + shape.vocabulary * shape.hidden)


def model_flops_utilization(flops_per_token: float, tokens_per_s: float, gpus: int, peak_flops: float) -> float:
    """MFU: the share of the peak of `gpus` GPUs, each `peak_flops` per second, that `tokens_per_s` of the whole job
    use."""
    return flops_per_token * tokens_per_s / (gpus * peak_flops)
