"""Types and values of the tensors that tests sum on devices."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["NUMBERS", "scattered"]

NUMBERS: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
)
"""What all backends sum."""


def scattered(count: int, dtype: torch.dtype, seed: int, *, least: int, most: int) -> torch.Tensor:
    """Whole numbers from `least` to `most`, so that no two pieces of a tensor, and no two seeds, are alike."""
    numbers = (torch.arange(count) + 977 * seed) * 2654435761 >> 13
    return (numbers % (most - least + 1) + least).to(torch.float32).to(dtype)
