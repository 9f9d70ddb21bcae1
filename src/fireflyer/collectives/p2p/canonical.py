"""Sums whose bits do not depend on which ranks sit on which node: what a plan with `sums="canonical"` asks for.

The group's other sums add inside nodes first. Here every rank receives its slice of the array from all ranks, adds the
slices in ascending order of ranks, `((r0 + r1) + r2) + ...`, in the accumulation type, rounds once, and hands the
result to whoever is to have it: the bits that one node of all ranks gives, for any layout. A group on one node adds in
that order anyway, and needs none of this.

An array is taken in blocks, each an `all_to_all` that ends with an addition and another that spreads its result. All of
them are put into the group's order of operations at once, so nothing has to wait for them in Python. Since operations
run one after the other, they share one buffer, which does not grow with the array.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import Busy
from fireflyer.base.units import MIB, MS
from fireflyer.collectives.arrays import DTYPES, FlatArray
from fireflyer.collectives.codes import OP_CODES
from fireflyer.collectives.p2p.exchange import InFlightMessage, Part, RankExchange, RowSum

__all__ = ["MAX_BLOCKS", "SCRATCH_BYTES", "CanonicalSums"]

SCRATCH_BYTES: Final = 8 * MIB
"""Of the buffer that a communicator keeps once it has summed, whatever the arrays' sizes, while they have at most
`MAX_BLOCKS` times as many bytes; at least a cache line for every rank."""
MAX_BLOCKS: Final = 1024
_LINE_BYTES: Final = 64
_PATIENCE_NS: Final = 100 * MS


class CanonicalSums:
    """Of one rank and one communicator. Calls must come one at a time, in the same order on all ranks."""

    def __init__(self, exchange: RankExchange) -> None:
        self._exchange = exchange
        self._rows: npt.NDArray[Any] = np.empty((exchange.world_size, 0), "u1")
        self._result: npt.NDArray[Any] = np.empty(0, "u1")

    def start(self, kind: str, source: FlatArray, target: FlatArray, root: int, op: str) -> InFlightMessage:
        """The whole operation; done when its last part is. `target` is of no use where this rank receives nothing.

        Raises `Busy` where too many operations are pending, `UsageError`."""
        ranks, rank = self._exchange.world_size, self._exchange.rank
        unit = DTYPES[source.dtype]
        flights: list[InFlightMessage] = []
        if kind == "reduce_scatter":
            part = source.elements // ranks
            step = self._slice_elements(part, unit)
            for first in range(0, max(1, part), step):
                slices = [(row * part + first, min(step, part - first)) for row in range(ranks)]
                self._collect(flights, source, slices, target.address + first * unit, root, op)
            return flights[-1]
        step = self._slice_elements(-(-source.elements // ranks), unit)
        self._result = _at_least(self._result, step * unit)
        for first in range(0, max(1, source.elements), step * ranks):
            slices = _slices(first, min(step * ranks, source.elements - first), ranks, step)
            low, size = slices[rank]
            receives = root in (-1, rank)
            here = target.address + low * unit if receives else self._result.ctypes.data
            self._collect(flights, source, slices, here, root, op)
            outgoing = [(to, here, size * unit) for to in range(ranks) if to != rank and root in (-1, to)]
            incoming = [
                (other, target.address + start * unit, count * unit)
                for other, (start, count) in enumerate(slices)
                if other != rank and receives
            ]
            owner = (source.owner, target.owner, self._result)
            self._add(flights, source, root, outgoing, incoming, owner, None)
        return flights[-1]

    def _slice_elements(self, elements: int, unit: int) -> int:
        """How much of `elements` a rank adds up at a time; makes room for it."""
        ranks = self._exchange.world_size
        step = max(_LINE_BYTES, SCRATCH_BYTES // ranks) // unit
        step = max(1, min(elements, max(step, -(-elements // MAX_BLOCKS))))
        if self._rows.shape[1] < step * unit:
            self._rows = np.empty((ranks, step * unit), "u1")
        return step

    def _collect(
        self,
        flights: list[InFlightMessage],
        source: FlatArray,
        slices: list[tuple[int, int]],
        out: int,
        root: int,
        op: str,
    ) -> None:
        """Every rank gets its slice from all, and adds it up."""
        rank, unit = self._exchange.rank, DTYPES[source.dtype]
        outgoing: list[Part] = []
        incoming: list[Part] = []
        rows: list[int] = []
        low, size = slices[rank]
        for other, (start, count) in enumerate(slices):
            if other == rank:
                rows.append(source.address + low * unit)  # read where it lies
                continue
            rows.append(self._rows[other].ctypes.data)
            outgoing.append((other, source.address + start * unit, count * unit))
            incoming.append((other, rows[-1], size * unit))
        owner = (source.owner, self._rows, self._result)
        self._add(flights, source, root, outgoing, incoming, owner, (OP_CODES[op], out, size, rows))

    def _add(
        self,
        flights: list[InFlightMessage],
        source: FlatArray,
        root: int,
        outgoing: list[Part],
        incoming: list[Part],
        owner: object,
        summed: RowSum | None,
    ) -> None:
        """The next part of the operation. One that has begun must go on: it waits for room, and raises no `Busy`."""
        what = ("all_to_all", source.elements, source.dtype, root, outgoing, incoming, owner, summed)
        while True:
            try:
                flights.append(self._exchange.start(*what))
                return
            except Busy:
                if not flights:
                    raise
                flights[-1].native.wait(_PATIENCE_NS)


def _slices(first: int, elements: int, ranks: int, step: int) -> list[tuple[int, int]]:
    """(first, count) of each rank's slice of a block of `elements`."""
    borders = [min(elements, rank * step) for rank in range(ranks + 1)]
    return [(first + low, high - low) for low, high in pairwise(borders)]


def _at_least(buffer: npt.NDArray[Any], size_bytes: int) -> npt.NDArray[Any]:
    return buffer if buffer.nbytes >= size_bytes else np.empty(size_bytes, "u1")
