"""A digest of 64 bits of the bits of a tensor, in the order of its elements, by operations of torch on any device.

The bytes, filled up with zeros, are words w[0], w[1], ... of 64 bits, in the machine's order. With h(w) = w xor (w
>> 32), which is a bijection, and modulo 2**64:

    digest = sum over i of h(w[i]) * a[i mod 16384] * b[i div 16384]

Factors a and b are odd and fixed, drawn by SplitMix64 from the constants below; b goes on for as long as it is needed.
An odd factor has an inverse, so a change of any one word, and so of any one bit, always changes the digest. Changes of
several words cancel with a chance of about 2**-32 or less over the factors. Nothing here resists an attacker.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["combine", "digest"]

ROW: Final = 1 << 14
"""Words: 128 KiB, so that what is computed on the way stays in a cache."""
_ROWS_AT_A_TIME: Final = 16
_LOW: Final = 0xFFFFFFFF
_FACTORS_SEED: Final = 0x46697265466C7972
_ROWS_SEED: Final = 0x47756172644F6E65
_INCREMENT: Final = 0x9E3779B97F4A7C15


def digest(tensor: Tensor) -> Tensor:
    """int64 scalar on the device of `tensor`, which may have any dtype and strides. Nothing waits for the device."""
    words, rest = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    whole = words.numel() // ROW
    rows = words[: whole * ROW].view(whole, ROW)
    factors, of_rows = _factors(_FACTORS_SEED, ROW, tensor.device), _row_factors(whole + 1, tensor.device)
    for begin in range(0, whole, _ROWS_AT_A_TIME):
        part = slice(begin, min(whole, begin + _ROWS_AT_A_TIME))
        total += (_summed(rows[part], factors) * of_rows[part]).sum()
    last = torch.cat((words[whole * ROW :], rest))
    # of at most ROW words: a full row leaves none for the rest, or the rest is its last word
    return total + _summed(last[None], factors[: last.numel()])[0] * of_rows[whole]


def combine(digests: Sequence[int]) -> int:
    """One signed number of 64 bits for a list of such numbers, their order and their count: BLAKE2b."""
    packed = struct.pack(f"<{len(digests)}q", *digests)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little", signed=True)


def _summed(rows: Tensor, factors: Tensor) -> Tensor:
    return ((rows ^ ((rows >> 32) & _LOW)) * factors).sum(dim=1)


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Its bytes as int64, and the last ones, fewer than 8, as a word of their own, or none."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    rest = torch.zeros(8 if flat.numel() > whole else 0, dtype=torch.uint8, device=tensor.device)
    rest[: flat.numel() - whole] = flat[whole:]
    if not whole:  # a tensor without elements may have strides that cannot be viewed otherwise
        return torch.zeros(0, dtype=torch.int64, device=tensor.device), rest.view(torch.int64)
    head = flat[:whole]
    if head.storage_offset() % 8:
        head = head.clone()  # int64 begins at a multiple of 8 bytes
    return head.view(torch.int64), rest.view(torch.int64)


def _row_factors(count: int, device: torch.device) -> Tensor:
    """Of a power of two of rows, so that few tables are made."""
    return _factors(_ROWS_SEED, 1 << max(6, (count - 1).bit_length()), device)[:count]


@lru_cache(maxsize=64)
def _factors(seed: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers, the first of which are the same for every count (SplitMix64: Steele, Lea, Flood, 2014)."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_INCREMENT)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64)).to(device)
