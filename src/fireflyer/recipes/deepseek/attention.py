"""Multi-head latent attention (DeepSeek-V2, 2.1), and attention with key-value heads for a llama.

Names of parameters are those of Hugging Face. In the code B is the batch, T the tokens of the call, S all tokens so
far, H the heads, r the rank of the latent, d the values of a head.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.codesign.model import Attention, LatentAttention
from fireflyer.recipes.deepseek.cache import LayerCache
from fireflyer.recipes.deepseek.config import DeepseekConfig
from fireflyer.recipes.deepseek.rope import Rotation, rotate

__all__ = ["HeadAttention", "MultiHeadLatentAttention", "attention_of"]

LATENT_NORM_EPS: Final = 1e-6
"""Of the norms of latents in the published code, whatever `rms_norm_eps` is."""


def attention_of(config: DeepseekConfig) -> HeadAttention | MultiHeadLatentAttention:
    """Attention module of the kind that the shape says."""
    attention = config.shape.attention
    if isinstance(attention, Attention):
        return HeadAttention(config, attention)
    return MultiHeadLatentAttention(config, attention)


class MultiHeadLatentAttention(nn.Module):
    """Attention of which only `latents` need to be kept: keys and values of all heads are projected from them."""

    def __init__(self, config: DeepseekConfig, attention: LatentAttention) -> None:
        super().__init__()
        self.sizes = attention
        hidden, heads, bias = config.shape.hidden, attention.heads, attention.bias
        self.score_scale = attention.score_dim**-0.5 * (1.0 if config.yarn is None else config.yarn.score_scale)
        if attention.query_rank is None:
            self.q_proj = nn.Linear(hidden, heads * attention.score_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, attention.query_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(attention.query_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(attention.query_rank, heads * attention.score_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, attention.kv_rank + attention.rope_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(attention.kv_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(attention.kv_rank, heads * (attention.nope_dim + attention.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * attention.value_dim, hidden, bias=bias)

    def forward(
        self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None = None, absorbed: bool | None = None
    ) -> Tensor:
        """Attention of `hidden [B, T, h]` to itself and to what `cache` has; the latents are added to it.

        `absorbed`: compute with latents alone, never with keys and values of heads. That is cheaper where few tokens
        look at many, so by default where the cache has tokens already. The results differ by rounding.
        """
        first = cache is None or cache.length == 0
        query = self.queries(hidden, rotation)
        latents = self.latents(hidden, rotation)
        if cache is not None:
            latents = cache.append(latents)
        attend = self.attend_expanded if (first if absorbed is None else not absorbed) else self.attend_absorbed
        out: Tensor = self.o_proj(attend(query, latents).transpose(1, 2).flatten(2))
        return out

    def queries(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Queries `[B, H, T, nope + rope]`, the last part rotated."""
        sizes = self.sizes
        if sizes.query_rank is None:
            query = self.q_proj(hidden)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query = query.view(*query.shape[:2], sizes.heads, -1).transpose(1, 2)
        plain, turned = query[..., : sizes.nope_dim], query[..., sizes.nope_dim :]
        return torch.cat((plain, rotate(turned, rotation)), dim=-1)

    def latents(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Latents `[B, T, r + rope]`: normed latent of keys and values, and the rotated key that heads share. These
        are the rows of the cache."""
        rows, rank = self.kv_a_proj_with_mqa(hidden), self.sizes.kv_rank
        return torch.cat((self.kv_a_layernorm(rows[..., :rank]), rotate(rows[..., rank:], rotation)), dim=-1)

    def attend_expanded(self, query: Tensor, latents: Tensor) -> Tensor:
        """Weighted values `[B, H, T, d]` from keys and values of all heads."""
        sizes = self.sizes
        latent, shared = latents[..., : sizes.kv_rank], latents[..., sizes.kv_rank :]
        expanded = self.kv_b_proj(latent).view(*latent.shape[:2], sizes.heads, -1).transpose(1, 2)
        key, value = expanded[..., : sizes.nope_dim], expanded[..., sizes.nope_dim :]
        key = torch.cat((key, shared.unsqueeze(1).expand(-1, sizes.heads, -1, -1)), dim=-1)
        return _attend(query, key, value, self.score_scale)

    def attend_absorbed(self, query: Tensor, latents: Tensor) -> Tensor:
        """The same from latents alone (DeepSeek-V2, 2.1.2): the projection to keys is applied to the queries, that to
        values to the weighted latents. All heads read one row per token."""
        sizes = self.sizes
        projection = self.kv_b_proj.weight.view(sizes.heads, -1, sizes.kv_rank)
        to_key, to_value = projection[:, : sizes.nope_dim], projection[:, sizes.nope_dim :]
        plain, turned = query[..., : sizes.nope_dim], query[..., sizes.nope_dim :]
        query = torch.cat((torch.einsum("bhtd,hdr->bhtr", plain, to_key), turned), dim=-1)
        rows = latents.unsqueeze(1).expand(-1, sizes.heads, -1, -1)
        mixed = _attend(query, rows, rows[..., : sizes.kv_rank], self.score_scale)
        return torch.einsum("bhtr,hdr->bhtd", mixed, to_value)


class HeadAttention(nn.Module):
    """Grouped-query attention, as in a llama."""

    def __init__(self, config: DeepseekConfig, attention: Attention) -> None:
        super().__init__()
        self.sizes = attention
        hidden, width = config.shape.hidden, attention.head_dim
        self.q_proj = nn.Linear(hidden, attention.heads * width, bias=attention.qkv_bias)
        self.k_proj = nn.Linear(hidden, attention.kv_heads * width, bias=attention.qkv_bias)
        self.v_proj = nn.Linear(hidden, attention.kv_heads * width, bias=attention.qkv_bias)
        self.o_proj = nn.Linear(attention.heads * width, hidden, bias=attention.output_bias)

    def forward(self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        """Attention of `hidden [B, T, h]` to itself and to what `cache` has; keys and values are added to it."""
        width = self.sizes.head_dim
        query, key, value = (
            project(hidden).view(*hidden.shape[:2], -1, width).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        if cache is not None:
            rows = cache.append(torch.cat((key, value), dim=1).transpose(1, 2).flatten(2))
            key, value = rows.view(*rows.shape[:2], -1, width).transpose(1, 2).chunk(2, dim=1)
        out: Tensor = self.o_proj(_attend(query, key, value, width**-0.5).transpose(1, 2).flatten(2))
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last T of S positions."""
    queries, keys = query.shape[2], key.shape[2]
    mask = None
    if 1 < queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=queries == keys,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
