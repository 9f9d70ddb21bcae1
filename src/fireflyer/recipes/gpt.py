"""A small GPT, an ordinary PyTorch module: nothing in it knows of ranks, checkpoints or this package's trainers.

    tokens [batch, length] -> embedding -> layers × (RMSNorm, attention, RMSNorm, MLP), residual -> RMSNorm -> logits

Causal attention with rotary positions, a GELU MLP four times as wide, no biases, output weights tied to the embedding.
Weights come from the seed in the config, whatever the state of torch's own generator. In the code B is the batch, T the
length, D the width, H the heads.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.base.errors import UsageError

__all__ = ["PRESETS", "GPTConfig", "GPTModel"]


class GPTConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a GPT, and the seed of its weights."""

    vocab_size: int = 1024
    layers: int = 4
    heads: int = 4
    width: int = 160
    context: int = 128
    """Longest sequence, in tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "heads", "width", "context"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}; it must be at least 1")
        if self.width % (2 * self.heads):
            raise UsageError(f"width={self.width} must be a multiple of twice the heads ({self.heads})")

    @property
    def parameters(self) -> int:
        """Trainable numbers: embedding, per layer 12·width² and two norms, and the last norm."""
        return self.vocab_size * self.width + self.layers * (12 * self.width**2 + 2 * self.width) + self.width


PRESETS: Final[dict[str, GPTConfig]] = {
    "tiny": GPTConfig(layers=2, heads=2, width=32, context=64),
    "small": GPTConfig(),
    "medium": GPTConfig(layers=6, heads=6, width=192),
}


class GPTModel(nn.Module):
    """GPT with learned positions: tokens (batch, time) int64 in, logits (batch, time, vocabulary) fp32 out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        cosine, sine = _rotations(config.context, config.width // config.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self._initialise()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits `[B, T, vocab_size]` for int64 `tokens [B, T]`; with `targets [B, T]` instead the cross entropy summed
        over all B·T tokens, a scalar (a sum, so that ranks with different batches can be added up exactly)."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise UsageError(f"{length} tokens; this model was made for at most context={self.config.context}")
        hidden = self.embedding(tokens)
        rotation = self.rotation(length)
        for block in self.blocks:
            hidden = block(hidden, rotation)
        logits = self.head(hidden)
        if targets is None:
            return logits
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[length, width / heads / 2]` that each block takes beside its input."""
        return self.get_buffer("cosine")[:length], self.get_buffer("sine")[:length]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[B, T, vocab_size]` of what the last block gives, `hidden [B, T, width]`."""
        return functional.linear(self.norm(hidden), self.embedding.weight)

    def _initialise(self) -> None:
        """Normal weights; what is added to the residual stream is scaled down by its depth (as in GPT-2)."""
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            onto_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            deviation = 0.02 / math.sqrt(2 * self.config.layers) if onto_residual else 0.02
            nn.init.normal_(parameter, std=deviation, generator=generator)


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.attention_norm = nn.RMSNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden), rotation)
        added: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + added

    def _attend(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = hidden.shape
        # The number of heads is what the projection gives: with tensor parallelism those of this rank.
        heads = self.attention_in(hidden).view(batch, length, 3, -1, self.head_width)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, H, T, D/H] each
        mixed = functional.scaled_dot_product_attention(
            _rotate(query, rotation), _rotate(key, rotation), value, is_causal=True
        )
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


def _rotations(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[length, head_width / 2]` of position × frequency (Su et al., "RoFormer", 2021)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (component i, component i + half) of `[B, H, T, D/H]` by its position's angle."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
