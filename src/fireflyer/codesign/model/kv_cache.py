"""KV cache of a model: bytes per token and per sequence (DeepSeek-V3 paper, 2.1.2 table 1)."""

from __future__ import annotations

from fireflyer.codesign.model.shape import LatentAttention, ModelShape

__all__ = ["kv_bytes_per_sequence", "kv_bytes_per_token"]


def kv_bytes_per_token(shape: ModelShape, value_bytes: int = 2) -> int:
    """Bytes that a token adds to the cache of all layers, before any window is full: latent and shared rotary key for
    latent attention, keys and values of the key-value heads otherwise.

    DeepSeek-V3: 70,272; Qwen-2.5 72B: 327,680; LLaMA-3.1 405B: 516,096.
    """
    return shape.layers * _layer_bytes(shape, value_bytes)


def kv_bytes_per_sequence(shape: ModelShape, tokens: int, value_bytes: int = 2) -> int:
    """Bytes of the cache of a sequence of `tokens`: layers with a window keep at most that many tokens."""
    kept = 0
    for layer in range(shape.layers):
        window = shape.attention.window_of(layer)
        kept += tokens if window is None else min(tokens, window)
    return kept * _layer_bytes(shape, value_bytes)


def _layer_bytes(shape: ModelShape, value_bytes: int) -> int:
    attention = shape.attention
    if isinstance(attention, LatentAttention):
        return (attention.kv_rank + attention.rope_dim) * value_bytes
    return 2 * attention.kv_heads * attention.head_dim * value_bytes
