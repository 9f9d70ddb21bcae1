"""What decoding keeps of the tokens that were read: for latent attention the latent and the shared rotary key of each,
for attention with key-value heads its keys and values. One row per token and layer."""

from __future__ import annotations

import torch
from torch import Tensor

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Attention, ModelShape

__all__ = ["AttentionCache", "LayerCache"]


class LayerCache:
    """Rows `[B, limit, width]` of one layer, of which `length` are in use."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self.length = 0

    def append(self, rows: Tensor) -> Tensor:
        """Adds `rows [B, T, width]` and returns all `[B, length, width]`. Raises `UsageError` if they do not fit."""
        end = self.length + rows.shape[1]
        if end > self._rows.shape[1]:
            raise UsageError(f"the cache holds {self._rows.shape[1]} tokens; {end} are needed: make it larger")
        self._rows[:, self.length : end] = rows
        self.length = end
        return self._rows[:, :end]

    def truncate(self, length: int) -> None:
        """Forgets all tokens but the first `length`."""
        self.length = min(self.length, length)


class AttentionCache:
    """Caches of `layers` layers for sequences of up to `limit` tokens."""

    def __init__(
        self,
        shape: ModelShape,
        limit: int,
        *,
        batch: int = 1,
        layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        attention = shape.attention
        if isinstance(attention, Attention):
            width = 2 * attention.kv_heads * attention.head_dim
        else:
            width = attention.kv_rank + attention.rope_dim
        count = shape.layers if layers is None else layers
        self._all = torch.zeros(count, batch, limit, width, dtype=dtype, device=device)
        self.layers = [LayerCache(rows) for rows in self._all]

    @property
    def length(self) -> int:
        """Tokens that are kept."""
        return self.layers[0].length if self.layers else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence in all layers."""
        layers, _, _, width = self._all.shape
        return layers * width * self._all.element_size()

    def truncate(self, length: int) -> None:
        """Forgets all tokens but the first `length`."""
        for layer in self.layers:
            layer.truncate(length)
