"""Rotary positions (Su et al. 2021), with the frequencies of YaRN where a config has it.

Angles are computed in fp64 at each call from the positions, so that a model has no table that a cast could round.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fireflyer.codesign.model import Attention
from fireflyer.recipes.deepseek.config import DeepseekConfig, Yarn

__all__ = ["Rotation", "rotate", "rotation_of"]


class Rotation(NamedTuple):
    """Cosine and sine `[T, d/2]` of T positions and d rotated values; fp32, or fp64 for a model in fp64."""

    cosine: Tensor
    sine: Tensor
    interleaved: bool


def rotation_of(config: DeepseekConfig, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """Rotation of `positions [T]`, for the rotated part of queries and keys of a model in `dtype`."""
    attention = config.shape.attention
    dim = attention.head_dim if isinstance(attention, Attention) else attention.rope_dim
    frequencies = torch.tensor(_frequencies(config, dim), dtype=torch.float64, device=positions.device)
    angles = torch.outer(positions.double(), frequencies)
    scale = 1.0 if config.yarn is None else config.yarn.rotation_scale
    wide = torch.promote_types(dtype, torch.float32)
    return Rotation((angles.cos() * scale).to(wide), (angles.sin() * scale).to(wide), config.rope_interleaved)


def rotate(values: Tensor, rotation: Rotation) -> Tensor:
    """Turns the pairs of `values [..., T, d]` by the angles of their positions. The result has the first values of all
    pairs, then the second ones, whichever pairs were turned: scores do not depend on it, as queries and keys agree."""
    first, second = (values[..., 0::2], values[..., 1::2]) if rotation.interleaved else values.chunk(2, dim=-1)
    cosine, sine = rotation.cosine, rotation.sine
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(values.dtype)


def _frequencies(config: DeepseekConfig, dim: int) -> list[float]:
    plain = [config.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
    yarn = config.yarn
    if yarn is None:
        return plain
    # Fast frequencies stay, slow ones are divided by the factor, those between are mixed (YaRN, 3.2).
    low = max(math.floor(_pair_with(yarn.beta_fast, yarn, config.rope_theta, dim)), 0)
    high = min(math.ceil(_pair_with(yarn.beta_slow, yarn, config.rope_theta, dim)), dim - 1)
    width = high - low or 0.001
    slow = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
    return [one / yarn.factor * share + one * (1 - share) for one, share in zip(plain, slow, strict=True)]


def _pair_with(turns: float, yarn: Yarn, theta: float, dim: int) -> float:
    """Number of the pair that turns so often within the context that was trained."""
    return dim * math.log(yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
