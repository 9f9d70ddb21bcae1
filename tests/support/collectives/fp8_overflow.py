"""Sums, products and means of fp8 numbers that often leave the range, and what NumPy says of results and counts.

All inputs are small multiples of powers of two, so that every order of additions or multiplications is exact: what does
not fit does not depend on how ranks share the work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from tests.support.collectives.calls import SUMMING, decoded

from fireflyer.collectives import Communicator

__all__ = ["FP8", "OPS", "Overflow", "count_clipped", "expected_clipped", "overflows"]

Array = npt.NDArray[Any]
FP8: Final = ("f8e4m3", "f8e5m2")
OPS: Final = ("sum", "product", "mean")
LARGEST: Final = {"f8e4m3": 448.0, "f8e5m2": 57344.0}
_VALUES: Final = {
    "f8e4m3": (0.5, 1.0, -1.0, 16.0, 256.0, -256.0, 448.0, -448.0, np.nan),
    "f8e5m2": (0.5, 1.0, -1.0, 16.0, 4096.0, 32768.0, -32768.0, 57344.0, -57344.0, np.inf, np.nan),
}
"""448 + 16 and 57344 + 4096 are half-way to what would be the next number: the former goes down, the latter up."""


class Overflow(msgspec.Struct, frozen=True):
    kind: str
    """`allreduce`, `reduce` or `reduce_scatter`."""
    dtype: str
    op: str
    count: int
    """Elements of the result, of a `reduce_scatter` of each rank's."""
    arena: bool = False
    root: int = 0
    seed: int = 0

    def elements(self, world: int) -> int:
        return self.count * (world if self.kind == "reduce_scatter" else 1)


def overflows(counts: Sequence[int], world: int) -> list[Overflow]:
    """Every operation, type and way to reduce with every count, in either memory by turns."""
    ways = itertools.product(SUMMING, FP8, OPS, counts)
    return [
        Overflow(kind, dtype, op, count, arena=number % 2 == 0, root=number % world, seed=number)
        for number, (kind, dtype, op, count) in enumerate(ways)
    ]


def _codes(call: Overflow, rank: int, world: int) -> Array:
    table = decoded(call.dtype)
    codes = [int(np.flatnonzero((table == v) | (np.isnan(table) & np.isnan(v)))[0]) for v in _VALUES[call.dtype]]
    rng = np.random.default_rng([rank, call.seed])
    picked: Array = rng.choice(np.array(codes, "u1"), call.elements(world))
    return picked


def _exact(call: Overflow, world: int) -> Array:
    parts = np.stack([decoded(call.dtype)[_codes(call, rank, world)] for rank in range(world)])
    with np.errstate(invalid="ignore"):
        values: Array = np.prod(parts, axis=0) if call.op == "product" else np.sum(parts, axis=0)
    return values / world if call.op == "mean" else values


def _leaves(values: Array, dtype: str) -> Array:
    """Which are rounded to what is not in the range, by the definition of `fireflyer.collectives.kernels`."""
    if dtype == "f8e4m3":
        return np.abs(values) > 464
    return (np.abs(values) >= 61440) & np.isfinite(values)


def expected_clipped(call: Overflow, world: int) -> int:
    return int(np.count_nonzero(_leaves(_exact(call, world), call.dtype)))


def count_clipped(comm: Communicator, call: Overflow) -> int:
    """Makes the call, compares this rank's result with NumPy, and returns how many elements this rank has counted."""
    world, elements = comm.world_size, call.elements(comm.world_size)
    source, result = (
        comm.empty(n, call.dtype) if call.arena else np.empty(n, "u1")
        for n in (elements, call.count if call.kind == "reduce_scatter" else elements)
    )
    source[:] = _codes(call, comm.rank, world)
    before = comm.stats().saturated
    exact = _exact(call, world)
    if call.kind == "allreduce":
        comm.allreduce(source, op=call.op, dtype=call.dtype, out=result)
    elif call.kind == "reduce":
        comm.reduce(source, root=call.root, op=call.op, dtype=call.dtype, out=result)
    else:
        comm.reduce_scatter(result, source, op=call.op, dtype=call.dtype)
        exact = exact[comm.rank * call.count : (comm.rank + 1) * call.count]
    comm.barrier()  # a leader that is not the root may be done before its network thread is
    if call.kind != "reduce" or comm.rank == call.root:
        _check(result, exact, call.dtype)
    return comm.stats().saturated - before


def _check(result: Array, exact: Array, dtype: str) -> None:
    got, leaves = decoded(dtype)[result], _leaves(exact, dtype)
    limit = LARGEST[dtype] if dtype == "f8e4m3" else np.inf
    assert np.array_equal(got[leaves], np.copysign(limit, exact[leaves]))
    kept, rounded = exact[~leaves], got[~leaves]
    assert np.array_equal(np.isnan(rounded), np.isnan(kept))
    finite = np.isfinite(kept)
    assert np.array_equal(rounded[~finite], kept[~finite], equal_nan=True)
    spacing = 2.0 ** (-3 if dtype == "f8e4m3" else -2)
    tiny = 2.0 ** (-10 if dtype == "f8e4m3" else -17)
    assert np.all(np.abs(rounded[finite] - kept[finite]) <= np.abs(kept[finite]) * spacing / 2 + tiny)
