"""The model: embedding, layers, norm, output head, and modules that predict further tokens.

    tokens [B, T] -> embed -> layers -> norm -> head -> logits of the next token
                                          |
                                  mtp 0 (with the embedding of the next token) -> head -> logits of the token after it
                                          |
                                  mtp 1 …

An ordinary PyTorch module: nothing in it knows of ranks. Weights are drawn by name (`initialisation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.base.errors import UsageError
from fireflyer.recipes.deepseek.block import Block
from fireflyer.recipes.deepseek.cache import AttentionCache, LayerCache
from fireflyer.recipes.deepseek.config import DeepseekConfig
from fireflyer.recipes.deepseek.dispatch import Dispatch
from fireflyer.recipes.deepseek.gate import BIAS_STEP, Gate
from fireflyer.recipes.deepseek.initialisation import initialise
from fireflyer.recipes.deepseek.rope import Rotation, rotation_of

__all__ = ["MTP_WEIGHT", "DeepseekModel", "Losses", "PredictionModule"]

MTP_WEIGHT: Final = 0.3
"""Weight of the mean loss of prediction modules in the first part of the training of DeepSeek-V3 (4.2)."""


@dataclass(slots=True, frozen=True)
class Losses:
    """Cross entropies, each summed over its tokens, in fp32 or wider."""

    main: Tensor
    """Loss of the next token, a sum over B·T tokens."""
    mtp: tuple[Tensor, ...]
    """Losses of the prediction modules; that of depth k (from 1) is a sum over B·(T − k) tokens."""

    def total(self, mtp_weight: float = MTP_WEIGHT) -> Tensor:
        """Loss to train with: main, and the mean of the modules' times `mtp_weight`. Divided by B·T it is that of the
        DeepSeek-V3 report (equations 24 and 25), which divides every depth by T."""
        if not self.mtp:
            return self.main
        return self.main + mtp_weight / len(self.mtp) * torch.stack(self.mtp).sum()


class PredictionModule(nn.Module):
    """Multi-token prediction of one depth (DeepSeek-V3, 2.2): two norms, a projection of 2h to h, a layer, a norm."""

    def __init__(
        self, config: DeepseekConfig, *, experts: range | None = None, dispatcher: Dispatch | None = None
    ) -> None:
        super().__init__()
        shape = config.shape
        self.hidden_first = config.mtp_hidden_first
        self.enorm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        self.hnorm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.block = Block(config, shape.layers - 1, experts=experts, dispatcher=dispatcher)
        self.norm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)

    def forward(self, hidden: Tensor, embedded: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        """Normed hidden states `[B, T, h]` of this depth k: for the head, and for the module of depth k + 1.

        `hidden [B, T, h]` are those of depth k − 1 (of the main model behind its last norm), `embedded [B, T, h]` the
        embeddings of the tokens k places later.
        """
        parts = (self.enorm(embedded), self.hnorm(hidden))
        projected = self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        result: Tensor = self.norm(self.block(projected, rotation, cache))
        return result


class DeepseekModel(nn.Module):
    """Model of `config`. `experts` are the numbers of the routed experts that this process has (all, where None) and
    `dispatcher` reaches those of the others."""

    def __init__(
        self, config: DeepseekConfig, *, experts: range | None = None, dispatcher: Dispatch | None = None
    ) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(
            Block(config, layer, experts=experts, dispatcher=dispatcher) for layer in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        if not shape.tied_embeddings:
            self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.mtp = nn.ModuleList(
            PredictionModule(config, experts=experts, dispatcher=dispatcher) for _ in range(shape.mtp_layers)
        )
        initialise(self, config)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits `[B, T, vocabulary]` for int64 `tokens [B, T]`; with `targets [B, T]` instead the loss to train with,
        summed over all tokens (`Losses.total`)."""
        if targets is None:
            return self.head(self.hidden(tokens))
        return self.losses(tokens, targets).total()

    def hidden(self, tokens: Tensor, cache: AttentionCache | None = None) -> Tensor:
        """Hidden states `[B, T, h]` behind the last norm. With `cache`, `tokens` follow those that it has, and are
        added to it. Raises `UsageError` for more tokens than the context has."""
        begin = 0 if cache is None else cache.length
        end = begin + tokens.shape[1]
        if end > self.config.context:
            raise UsageError(f"{end} tokens; this model was made for at most context={self.config.context}")
        rotation = self.rotation(begin, end)
        hidden = self.embed_tokens(tokens)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, None if cache is None else cache.layers[number])
        result: Tensor = self.norm(hidden)
        return result

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[B, T, vocabulary]` of normed hidden states; prediction modules use the same head."""
        weight = self.embed_tokens.weight if self.config.shape.tied_embeddings else self.lm_head.weight
        return functional.linear(hidden, weight)

    def losses(self, tokens: Tensor, targets: Tensor) -> Losses:
        """Losses of `tokens [B, T]`, where `targets [B, T]` are the tokens one place later. Raises `UsageError` for a
        sequence too short for the prediction modules."""
        return self.losses_of(self.hidden(tokens), targets)

    def losses_of(self, hidden: Tensor, targets: Tensor) -> Losses:
        """The same, of the hidden states `[B, T, h]` behind the last norm. Raises as `losses`."""
        length, depths = targets.shape[1], len(self.mtp)
        if length <= depths:
            raise UsageError(
                f"a sequence of {length} tokens is too short for {depths} prediction modules: the last one has no "
                f"token to predict; give {depths + 1} or more"
            )
        main = _cross_entropy(self.head(hidden), targets)
        further: list[Tensor] = []
        embedded = self.embed_tokens(targets) if depths else targets  # a last stage may have no embedding
        for depth, module in enumerate(self.mtp, start=1):
            # Position i reads token i + depth, which is target i + depth - 1, and predicts target i + depth.
            count = length - depth
            hidden = module(hidden[:, :count], embedded[:, depth - 1 : length - 1], self.rotation(0, count))
            further.append(_cross_entropy(self.head(hidden), targets[:, depth:]))
        return Losses(main, tuple(further))

    def rotation(self, begin: int, end: int) -> Rotation:
        """Rotation of the positions from `begin` to `end`."""
        weight = self.embed_tokens.weight
        return rotation_of(self.config, torch.arange(begin, end, device=weight.device), weight.dtype)

    def gates(self) -> Iterator[tuple[str, Gate]]:
        """Names and gates of the layers with experts, prediction modules last."""
        for name, module in self.named_modules():
            if isinstance(module, Gate):
                yield name, module

    def expert_counts(self) -> Tensor:
        """Tokens that each expert got since the biases were moved, `[gates, E]` int64: what ranks with other tokens add
        up before `move_biases`."""
        counts = [gate.counts for _, gate in self.gates()]
        if not counts:
            raise UsageError("this model has no experts, so it has no counts of them")
        return torch.stack(counts)

    def move_biases(self, counts: Tensor | None = None, step: float = BIAS_STEP) -> None:
        """Balances the experts, once a step: moves the biases of all gates by `counts [gates, E]` (those of this
        process, where None)."""
        counts = self.expert_counts() if counts is None else counts
        for (_, gate), own in zip(self.gates(), counts, strict=True):
            gate.move_bias(own, step)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)  # a sum over tokens in bf16 has 8 significant bits
    return functional.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten(), reduction="sum")
