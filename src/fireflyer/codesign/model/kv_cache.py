"""KV cache of a model: bytes per token and per sequence (DeepSeek-V3 paper, 2.1.2 table 1)."""

from __future__ import annotations

from fireflyer.codesign.model.shape import LatentAttention, ModelShape

__all__ = ["kv_bytes_per_sequence", "kv_bytes_per_token", "kv_bytes_read"]


def kv_bytes_per_token(shape: ModelShape, element_bytes: int = 2) -> int:
    """Bytes that a token adds to the cache of all layers, before any window is full: latent and shared rotary key for
    latent attention, with the key of an index of tokens, keys and values of the key-value heads otherwise.

    DeepSeek-V3: 70,272; Qwen-2.5 72B: 327,680; LLaMA-3.1 405B: 516,096.
    """
    return shape.layers * _layer_bytes(shape, element_bytes)


def kv_bytes_per_sequence(shape: ModelShape, tokens: int, element_bytes: int = 2) -> int:
    """Bytes of the cache of a sequence of `tokens`: layers with a window keep at most that many tokens."""
    kept = 0
    for layer in range(shape.layers):
        window = shape.attention.window_of(layer)
        kept += tokens if window is None else min(tokens, window)
    return kept * _layer_bytes(shape, element_bytes)


def kv_bytes_read(shape: ModelShape, tokens: int, element_bytes: int = 2) -> int:
    """Bytes of the cache of a sequence of `tokens` that one more token reads: all of it; where an index chooses tokens
    (DeepSeek-V3.2), all keys of the index, and the latents of what it has chosen."""
    attention = shape.attention
    if not isinstance(attention, LatentAttention) or attention.index is None:
        return kv_bytes_per_sequence(shape, tokens, element_bytes)
    latents = min(tokens, attention.index.tokens) * (attention.kv_rank + attention.rope_dim)
    return shape.layers * (latents + tokens * attention.index.head_dim) * element_bytes


def _layer_bytes(shape: ModelShape, element_bytes: int) -> int:
    attention = shape.attention
    if isinstance(attention, LatentAttention):
        index = 0 if attention.index is None else attention.index.head_dim
        return (attention.kv_rank + attention.rope_dim + index) * element_bytes
    return 2 * attention.kv_heads * attention.head_dim * element_bytes
