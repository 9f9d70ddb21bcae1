"""What is summed: integers from -8 to 8, so that every order of adding gives the same bits, fp8 included."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fireflyer.collectives.kernels import decode, encode

__all__ = ["ELEMENT_BYTES", "NATIVE", "Array", "block_of", "expected_sum", "filled_with", "repeat_into"]

Array = npt.NDArray[Any]

BLOCK: Final = 1 << 18
ELEMENT_BYTES: Final = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
NATIVE: Final = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "fp8": "f8e4m3"}
"""The product's names of the types."""


def block_of(rank: int, dtype: str) -> Array:
    """A block of the values of a rank, in the type that carries them in NumPy."""
    values = np.random.default_rng(rank).integers(-8, 9, BLOCK).astype(np.float32)
    return encode(values, NATIVE[dtype])


def expected_sum(world_size: int, dtype: str) -> Array:
    total = sum(decode(block_of(rank, dtype), NATIVE[dtype]).astype(np.float32) for rank in range(world_size))
    return encode(np.asarray(total, np.float32), NATIVE[dtype])


def repeat_into(array: Array, block: Array) -> None:
    for at in range(0, array.size, block.size):
        part = array[at : at + block.size]
        part[:] = block[: part.size]


def filled_with(array: Array, block: Array, dtype: str) -> bool:
    """Whether `array` is that block again and again; 0 and -0 are the same."""
    wanted = decode(block, NATIVE[dtype])
    parts = (array[at : at + block.size] for at in range(0, array.size, block.size))
    return all(np.array_equal(decode(part, NATIVE[dtype]), wanted[: part.size]) for part in parts)
