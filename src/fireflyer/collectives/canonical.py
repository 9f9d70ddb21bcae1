"""Reductions whose bits do not depend on which ranks sit on which node.

The group's own `allreduce` adds inside nodes first. Here every rank receives its slice of the array from all ranks,
adds the slices in ascending order of ranks (in the accumulation type, rounded once), and hands the result to everybody:
the bits that one node of all ranks gives, for any layout. It moves as many bytes between ranks as a ring, but knows
nothing of nodes. The array is taken in blocks, so that the memory it needs does not grow with it; while one block is
being added up the next one is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fireflyer.base.units import MIB
from fireflyer.collectives.arrays import DTYPES, FlatArray
from fireflyer.collectives.exchange import Flight, Part, RankExchange
from fireflyer.native import reduce

__all__ = ["SCRATCH_BYTES", "canonical_allreduce"]

SCRATCH_BYTES: Final = 8 * MIB
"""Of each of the two buffers that a call needs, whatever the array's size; at least a cache line for every rank."""
_LINE_BYTES: Final = 64


class _Block:
    """So many elements of the array, from `first`: each rank adds up a slice of them."""

    def __init__(self, flat: FlatArray, first: int, elements: int, world_size: int, slice_elements: int) -> None:
        self.unit = DTYPES[flat.dtype]
        self.address = flat.address + first * self.unit
        borders = [min(elements, rank * slice_elements) for rank in range(world_size + 1)]
        self.slices = [(low, high - low) for low, high in pairwise(borders)]

    def parts(self) -> list[Part]:
        """Every rank's slice, where it lies in the array."""
        return [
            (rank, self.address + low * self.unit, size * self.unit) for rank, (low, size) in enumerate(self.slices)
        ]


def canonical_allreduce(exchange: RankExchange, flat: FlatArray, op: str, wait: Callable[[Flight], object]) -> None:
    """Replaces the array by the element-wise `op` over all ranks; returns when that is done.

    `wait` returns when a flight is over, and raises what it failed with. All ranks call this at the same place in their
    order of operations; it counts as two operations for each block.
    """
    rank, world_size = exchange.rank, exchange.world_size
    unit = DTYPES[flat.dtype]
    slice_elements = max(_LINE_BYTES, SCRATCH_BYTES // world_size) // unit
    step = slice_elements * world_size
    blocks = [
        _Block(flat, first, min(step, flat.elements - first), world_size, slice_elements)
        for first in range(0, flat.elements, step)
    ]
    rows = min(slice_elements, flat.elements) * unit
    scratch = [np.empty((world_size, rows), "u1") for _ in range(min(2, len(blocks)))]
    results = [np.empty(rows, "u1") for _ in scratch]
    collecting = [_collect(exchange, block, buffer, flat) for block, buffer in zip(blocks, scratch, strict=False)]
    spreading: list[Flight] = []
    for number, block in enumerate(blocks):
        buffer, result = scratch[number % 2], results[number % 2]
        wait(collecting[number])
        if number >= 2:
            wait(spreading[number - 2])
        _add_up(result, buffer, block, rank, flat.dtype, op, world_size)
        spreading.append(_spread(exchange, block, result, flat))
        if number + 2 < len(blocks):
            collecting.append(_collect(exchange, blocks[number + 2], buffer, flat))
    for flight in spreading[-2:]:
        wait(flight)


def _collect(exchange: RankExchange, block: _Block, buffer: npt.NDArray[Any], flat: FlatArray) -> Flight:
    size = block.slices[exchange.rank][1] * block.unit
    incoming = [(source, buffer[source].ctypes.data, size) for source in range(exchange.world_size)]
    return exchange.start("all_to_all", 0, flat.dtype, -1, block.parts(), incoming, (flat.keeper, buffer))


def _add_up(
    result: npt.NDArray[Any],
    buffer: npt.NDArray[Any],
    block: _Block,
    rank: int,
    dtype: str,
    op: str,
    world_size: int,
) -> None:
    size = block.slices[rank][1] * block.unit
    if size > 0:
        if op == "mean":
            reduce(result[:size], [row[:size] for row in buffer], dtype, "sum", world_size)
        else:
            reduce(result[:size], [row[:size] for row in buffer], dtype, op)


def _spread(exchange: RankExchange, block: _Block, result: npt.NDArray[Any], flat: FlatArray) -> Flight:
    size = block.slices[exchange.rank][1] * block.unit
    outgoing = [(target, result.ctypes.data, size) for target in range(exchange.world_size)]
    return exchange.start("all_to_all", 0, flat.dtype, -1, outgoing, block.parts(), (flat.keeper, result))
