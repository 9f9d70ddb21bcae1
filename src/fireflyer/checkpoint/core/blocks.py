"""Sums of blocks: what lets a part of a large tensor be verified without reading all of it.

A tensor that is larger than a block has, beside its own CRC32C, one of each block of `BLOCK_BYTES` from its first byte
on. Its own sum is formed from those of its blocks: bytes are read once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple

__all__ = ["BLOCK_BYTES", "Summed", "all_block_sizes", "block_sizes", "combine", "needed_blocks", "summed"]

BLOCK_BYTES: Final = 4 << 20
"""Part of the format: `TensorRecord.blocks` counts in it."""
_POLYNOMIAL: Final = 0x82F63B78
"""Of CRC32C, bits reflected."""

Matrix = tuple[int, ...]
"""Over GF(2): 32 columns of 32 bits."""


class Summed(NamedTuple):
    """Of several tensors, a column for each kind of sum: there may be a million."""

    crc32c: Sequence[int]
    blocks: Sequence[tuple[int, ...]]
    """Empty for a tensor that is not larger than a block."""


def block_sizes(size_bytes: int) -> list[int]:
    """Of the blocks of a tensor; of one that is not larger than a block, its size."""
    if size_bytes <= BLOCK_BYTES:
        return [size_bytes]
    return [min(BLOCK_BYTES, size_bytes - begin) for begin in range(0, size_bytes, BLOCK_BYTES)]


def all_block_sizes(sizes: Sequence[int]) -> list[int]:
    """Of the blocks of tensors of these sizes, one after the other."""
    if max(sizes, default=0) <= BLOCK_BYTES:
        return list(sizes)
    return [size for whole in sizes for size in block_sizes(whole)]


def summed(sizes: Sequence[int], sums: Sequence[int]) -> Summed:
    """Of tensors of these sizes, from the sums of their `all_block_sizes`."""
    if max(sizes, default=0) <= BLOCK_BYTES:
        return Summed(sums, [()] * len(sums))
    of_tensors: list[int] = []
    of_blocks: list[tuple[int, ...]] = []
    at = 0
    for size_bytes in sizes:
        if size_bytes <= BLOCK_BYTES:
            of_tensors.append(sums[at])
            of_blocks.append(())
            at += 1
            continue
        blocks = block_sizes(size_bytes)
        parts = tuple(sums[at : at + len(blocks)])
        at += len(blocks)
        crc = parts[0]
        for part, size in zip(parts[1:], blocks[1:], strict=True):
            crc = combine(crc, part, size)
        of_tensors.append(crc)
        of_blocks.append(parts)
    return Summed(of_tensors, of_blocks)


def needed_blocks(size_bytes: int, next_wanted: Callable[[int], int | None]) -> list[int]:
    """The numbers of the blocks of a tensor that have a byte that is wanted, rising. `next_wanted` gives the first such
    byte from the one on that it is given."""
    numbers: list[int] = []
    at = next_wanted(0)
    while at is not None and at < size_bytes:
        numbers.append(at // BLOCK_BYTES)
        at = next_wanted((numbers[-1] + 1) * BLOCK_BYTES)
    return numbers


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of two ranges of bytes, one after the other, from that of each and the length of the second."""
    power = 0
    while second_bytes:
        if second_bytes & 1:
            first = _apply(_zeros(power), first)
        second_bytes >>= 1
        power += 1
    return first ^ second


@cache
def _zeros(power: int) -> Matrix:
    """What 2**power zero bytes after it make of a sum."""
    if power:
        half = _zeros(power - 1)
        return tuple(_apply(half, column) for column in half)
    bit = (_POLYNOMIAL, *(1 << number for number in range(31)))
    for _ in range(3):
        bit = tuple(_apply(bit, column) for column in bit)
    return bit


def _apply(matrix: Matrix, vector: int) -> int:
    result, column = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[column]
        vector >>= 1
        column += 1
    return result
