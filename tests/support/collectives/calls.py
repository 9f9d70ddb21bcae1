"""Calls of collective operations, and what NumPy says that each must leave behind on every rank.

A `Call` is plain data, the same on all ranks. `begin` makes this rank's arrays and the call, `Begun.check` waits for it
and compares. The numbers of all ranks follow from the call, so nobody has to ask another rank what it contributed. The
references know nothing of our kernels: small floats are decoded here, by their definition.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fireflyer.collectives import Communicator, Work

__all__ = [
    "BITWISE",
    "COPYING",
    "DTYPES",
    "INTEGERS",
    "KINDS",
    "MEMORIES",
    "OPS",
    "PLACES",
    "SUMMING",
    "Begun",
    "Call",
    "agrees",
    "all_calls",
    "begin",
    "data_of",
    "perform",
]

Array = npt.NDArray[Any]
STORAGE: Final = {
    "f64": "f8",
    "f32": "f4",
    "f16": "f2",
    "bf16": "u2",
    "f8e4m3": "u1",
    "f8e5m2": "u1",
    "i8": "i1",
    "i32": "i4",
    "i64": "i8",
    "u8": "u1",
}
DTYPES: Final = tuple(STORAGE)
BITWISE: Final = ("band", "bor", "bxor")
OPS: Final = ("sum", "mean", "min", "max", "product", *BITWISE)
SUMMING: Final = ("allreduce", "reduce", "reduce_scatter")
COPYING: Final = ("broadcast", "allgather", "all_to_all", "uneven", "gather", "scatter", "messages")
KINDS: Final = (*SUMMING, *COPYING, "barrier")
MEMORIES: Final = ("private", "unaligned", "arena", "tensor")
PLACES: Final = tuple(itertools.product((True, False), MEMORIES[:3]))
"""Whether a result comes where the contribution was, and the memory of both."""
INTEGERS: Final = ("i8", "i32", "i64", "u8")
_BETWEEN_RANKS: Final = 40_503
UNIT: Final = {"f64": -52, "f32": -23, "f16": -10, "bf16": -7, "f8e4m3": -3, "f8e5m2": -2}
TINY: Final = {"f16": -24, "f8e4m3": -9, "f8e5m2": -16}
"""Exponents of two: of the spacing at 1, and of the smallest numbers above 0 where that can matter."""


class Call(msgspec.Struct, frozen=True):
    kind: str
    dtype: str
    op: str = "sum"
    count: int = 0
    """Elements of one rank's part."""
    root: int = 0
    in_place: bool = False
    memory: str = "private"
    seed: int = 0


def all_calls(world: int, counts: Sequence[int], *, rounds: Sequence[int] = (0,)) -> Iterator[Call]:
    """In each round every operation with every type and, where it reduces, every way to reduce; counts, memory, roots,
    in place or not take turns: from round 0 on each call meets every count once in `len(counts)` rounds, every place
    once in `len(PLACES)` rounds, and every count with every place once in the product of both."""
    calls = [
        (kind, dtype, op)
        for kind, dtype in itertools.product(KINDS, DTYPES)
        for op in (OPS if kind in SUMMING else OPS[:1])
        if op not in BITWISE or dtype in INTEGERS
    ]
    for turn, (place, (kind, dtype, op)) in itertools.product(rounds, enumerate(calls)):
        number, size = turn * len(calls) + place, len(counts)
        in_place, memory = PLACES[(place // size + turn + turn // math.lcm(size, len(PLACES))) % len(PLACES)]
        yield Call(kind, dtype, op, counts[(place + turn) % size], number % world, in_place, memory, number)


# --- numbers ---


@cache
def decoded(dtype: str) -> Array:
    """The value of every bit pattern of a small float, as float64."""
    exponent_bits, mantissa_bits = {"bf16": (8, 7), "f8e4m3": (4, 3), "f8e5m2": (5, 2)}[dtype]
    bits = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    sign = np.where(bits >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    exponent = (bits >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = bits & (2**mantissa_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    power = np.maximum(exponent, 1) - bias
    values = sign * np.ldexp(mantissa / 2.0**mantissa_bits + (exponent > 0), power)
    top = exponent == 2**exponent_bits - 1
    if dtype == "f8e4m3":
        return np.where(top & (mantissa == 7), np.nan, values)
    return np.where(top, np.where(mantissa > 0, np.nan, sign * np.inf), values)


@cache
def _stock(dtype: str) -> Array:
    """The bit patterns that tests use: of magnitude 1/16 to 2, and 0."""
    values = np.abs(decoded(dtype))
    usable: Array = np.flatnonzero(((values >= 1 / 16) & (values <= 2)) | (values == 0)).astype(STORAGE[dtype])
    return usable


@cache
def _pool(dtype: str, elements: int) -> Array:
    """Random numbers of which contributions are slices: to draw those of all ranks anew for each call, on each rank,
    took most of the processor time of the tests."""
    rng, storage = np.random.default_rng([DTYPES.index(dtype), elements]), STORAGE[dtype]
    if dtype in INTEGERS:
        return np.frombuffer(rng.bytes(elements * np.dtype(storage).itemsize), storage)
    if dtype in ("f64", "f32", "f16"):
        values = rng.uniform(1 / 16, 2, elements)
        array: Array = np.copysign(values, rng.random(elements, dtype="f4") - np.float32(0.5)).astype(storage)
        return array
    stock = _stock(dtype)
    picked: Array = stock[rng.integers(stock.size, size=elements, dtype="u2")]
    return picked


def data_of(call: Call, rank: int, count: int) -> Array:
    """What `rank` contributes: another slice for each rank, and most often for each seed and count."""
    elements = 2 ** max(18, (2 * count).bit_length())
    hashed = zlib.crc32(f"{call.seed} {count}".encode()) + rank * _BETWEEN_RANKS
    first = hashed % (elements - count)
    array: Array = _pool(call.dtype, elements)[first : first + count].copy()
    if call.op in ("min", "max") and count > 3 and call.dtype not in INTEGERS:
        array[hashed // 7 % count] = _nan(call.dtype)  # of any rank, it is to be found in the result
    return array


def _nan(dtype: str) -> Any:
    return np.nan if dtype in ("f64", "f32", "f16") else np.flatnonzero(np.isnan(decoded(dtype)))[0]


def wide(array: Array, dtype: str) -> Array:
    """The exact values."""
    values: Array = array.astype("f8") if dtype in ("f64", "f32", "f16") else decoded(dtype)[array]
    return values


_OF_INTEGERS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def agrees(got: Array, parts: list[Array], dtype: str, op: str) -> bool:
    """Exact for integers, minimum and maximum; other results within one rounding of the type, and those of the
    accumulation in any order."""
    if dtype in INTEGERS:
        with np.errstate(over="ignore"):
            combined: Array = _OF_INTEGERS[op].reduce(np.stack(parts), axis=0, dtype=got.dtype)
        if op == "mean":  # towards zero, where NumPy's division goes towards minus infinity
            rounded_down = (combined < 0) & (combined % len(parts) != 0)
            combined = (combined // len(parts) + rounded_down).astype(got.dtype)
        return bool(np.array_equal(got, combined))
    values, result = np.stack([wide(part, dtype) for part in parts]), wide(got, dtype)
    if op in ("min", "max"):
        exact = values.min(axis=0) if op == "min" else values.max(axis=0)
        return bool(np.array_equal(result, exact, equal_nan=True))
    exact = np.prod(values, axis=0) if op == "product" else np.sum(values, axis=0)
    size = np.abs(exact) if op == "product" else np.sum(np.abs(values), axis=0)
    if op == "mean":
        exact, size = exact / len(parts), size / len(parts)
    slack = 2.0 ** (-52 if dtype == "f64" else -23) * (len(parts) + 1) * size
    tiny = 2.0 ** TINY[dtype] if dtype in TINY else 0.0
    return bool(np.all(np.abs(result - exact) <= np.abs(exact) * 2.0 ** UNIT[dtype] + tiny + slack))


# --- arrays ---


def _array(comm: Communicator, call: Call, count: int) -> Array:
    if call.memory == "arena":
        return comm.empty(count, call.dtype)
    storage = np.dtype(STORAGE[call.dtype])
    offset = 1 if call.memory == "unaligned" else 0
    return np.frombuffer(bytearray(count * storage.itemsize + offset), storage, count, offset)


def _handed(array: Array, call: Call) -> tuple[Any, str | None]:
    """What the operation is given for `array`, and its `dtype=`."""
    if call.memory != "tensor":
        return array, call.dtype if call.dtype in ("bf16", "f8e4m3", "f8e5m2") else None
    import torch

    types = {"bf16": torch.bfloat16, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
    if call.dtype not in types:
        return torch.from_numpy(array), None
    return torch.from_numpy(array.view(STORAGE[call.dtype].replace("u2", "i2"))).view(types[call.dtype]), None


# --- operations ---


@dataclass(frozen=True)
class Begun:
    call: Call
    works: list[Work]
    verdict: Callable[[], bool]
    results: list[Array]
    """Whose bits must be the same on all ranks that have any."""

    def check(self) -> None:
        for work in self.works:
            work.wait()
        assert self.verdict(), f"{self.call} left something else than NumPy"


def perform(comm: Communicator, call: Call) -> Begun:
    begun = begin(comm, call, async_op=False)
    begun.check()
    return begun


def begin(comm: Communicator, call: Call, *, async_op: bool) -> Begun:
    """Makes the call on this rank."""
    if call.kind == "barrier":
        return Begun(call, [comm.barrier(async_op=async_op)], lambda: True, [])
    return _BEGIN[call.kind](comm, call, async_op)


def _allreduce(comm: Communicator, call: Call, async_op: bool) -> Begun:
    parts = [data_of(call, rank, call.count) for rank in range(comm.world_size)]
    source, out = _array(comm, call, call.count), _array(comm, call, call.count)
    source[:] = parts[comm.rank]
    (given, dtype), target = _handed(source, call), None if call.in_place else _handed(out, call)[0]
    work = comm.allreduce(given, op=call.op, dtype=dtype, out=target, async_op=async_op)
    got = source if call.in_place else out

    def right() -> bool:
        return agrees(got, parts, call.dtype, call.op) and (call.in_place or _same(source, parts[comm.rank]))

    return Begun(call, [work], right, [got])


def _reduce(comm: Communicator, call: Call, async_op: bool) -> Begun:
    parts = [data_of(call, rank, call.count) for rank in range(comm.world_size)]
    source, out = _array(comm, call, call.count), _array(comm, call, call.count)
    source[:] = parts[comm.rank]
    before = out.copy()
    (given, dtype), target = _handed(source, call), None if call.in_place else _handed(out, call)[0]
    work = comm.reduce(given, root=call.root, op=call.op, dtype=dtype, out=target, async_op=async_op)

    def right() -> bool:
        if comm.rank != call.root:
            return _same(source, parts[comm.rank]) and _same(out, before)
        got = source if call.in_place else out
        return agrees(got, parts, call.dtype, call.op) and (call.in_place or _same(source, parts[comm.rank]))

    return Begun(call, [work], right, [])


def _reduce_scatter(comm: Communicator, call: Call, async_op: bool) -> Begun:
    world, n = comm.world_size, call.count
    mine = slice(comm.rank * n, (comm.rank + 1) * n)
    parts = [data_of(call, rank, n * world) for rank in range(world)]
    source = _array(comm, call, n * world)
    source[:] = parts[comm.rank]
    out = source[mine] if call.in_place else _array(comm, call, n)
    given, dtype = _handed(source, call)
    target = _handed(out, call)[0] if not call.in_place or call.memory != "tensor" else given[mine]
    work = comm.reduce_scatter(target, given, op=call.op, dtype=dtype, async_op=async_op)

    def right() -> bool:
        kept = _same(source[: mine.start], parts[comm.rank][: mine.start])
        kept = kept and _same(source[mine.stop :], parts[comm.rank][mine.stop :])
        kept = kept and (call.in_place or _same(source, parts[comm.rank]))
        return kept and agrees(out, [part[mine] for part in parts], call.dtype, call.op)

    return Begun(call, [work], right, [])


def _broadcast(comm: Communicator, call: Call, async_op: bool) -> Begun:
    array = _array(comm, call, call.count)
    if comm.rank == call.root:
        array[:] = data_of(call, call.root, call.count)
    work = comm.broadcast(_handed(array, call)[0], root=call.root, async_op=async_op)
    return Begun(call, [work], lambda: _same(array, data_of(call, call.root, call.count)), [array])


def _allgather(comm: Communicator, call: Call, async_op: bool) -> Begun:
    n = call.count
    mine = slice(comm.rank * n, (comm.rank + 1) * n)
    out = _array(comm, call, n * comm.world_size)
    source = out[mine] if call.in_place else _array(comm, call, n)
    source[:] = data_of(call, comm.rank, n)
    target = _handed(out, call)[0]
    given = _handed(source, call)[0] if not call.in_place or call.memory != "tensor" else target[mine]
    work = comm.allgather(target, given, async_op=async_op)
    whole = np.concatenate([data_of(call, rank, n) for rank in range(comm.world_size)])
    return Begun(call, [work], lambda: _same(out, whole), [out])


def _splits(call: Call, source: int, target: int) -> int:
    return call.count if call.kind != "uneven" else (call.count * ((3 * source + target + call.seed) % 4)) // 2


def _all_to_all(comm: Communicator, call: Call, async_op: bool) -> Begun:
    ranks, me = range(comm.world_size), comm.rank

    def part(source: int, target: int) -> Array:
        return data_of(call, source, _splits(call, source, target) + target)[target:]

    outgoing = np.concatenate([part(me, b) for b in ranks])
    expected = np.concatenate([part(a, me) for a in ranks])
    source = _array(comm, call, outgoing.size)
    source[:] = outgoing
    out = _array(comm, call, expected.size)
    splits: dict[str, Any] = {}
    if call.kind == "uneven":
        splits = {
            "in_splits": [_splits(call, me, b) for b in ranks],
            "out_splits": [_splits(call, a, me) for a in ranks],
        }
    work = comm.all_to_all(_handed(out, call)[0], _handed(source, call)[0], async_op=async_op, **splits)
    return Begun(call, [work], lambda: _same(out, expected) and _same(source, outgoing), [])


def _gather(comm: Communicator, call: Call, async_op: bool) -> Begun:
    source = _array(comm, call, call.count)
    source[:] = data_of(call, comm.rank, call.count)
    whole = np.concatenate([data_of(call, rank, call.count) for rank in range(comm.world_size)])
    out = _array(comm, call, whole.size) if comm.rank == call.root else None
    target = None if out is None else _handed(out, call)[0]
    work = comm.gather(_handed(source, call)[0], root=call.root, out=target, async_op=async_op)
    return Begun(call, [work], lambda: out is None or _same(out, whole), [])


def _scatter(comm: Communicator, call: Call, async_op: bool) -> Begun:
    n = call.count
    whole = data_of(call, call.root, n * comm.world_size)
    source = _array(comm, call, whole.size) if comm.rank == call.root else None
    if source is not None:
        source[:] = whole
    out = _array(comm, call, n)
    given = None if source is None else _handed(source, call)[0]
    work = comm.scatter(_handed(out, call)[0], root=call.root, array=given, async_op=async_op)
    return Begun(call, [work], lambda: _same(out, whole[comm.rank * n : (comm.rank + 1) * n]), [])


def _messages(comm: Communicator, call: Call, async_op: bool) -> Begun:
    """Every rank sends to the next and receives from the one before, twice, the second one first where that may be."""
    world, me = comm.world_size, comm.rank
    following, previous = (me + 1) % world, (me - 1) % world
    outgoing = [data_of(call, me, call.count + extra) for extra in (0, 1)]
    incoming = [data_of(call, previous, call.count + extra) for extra in (0, 1)]
    if world == 1:
        return Begun(call, [], lambda: True, [])
    sources = [_array(comm, call, array.size) for array in outgoing]
    outs = [_array(comm, call, array.size) for array in incoming]
    works = []
    for number, (source, array) in enumerate(zip(sources, outgoing, strict=True)):
        source[:] = array
        works.append(comm.send(_handed(source, call)[0], to=following, tag=number, async_op=True))
    for number, out in enumerate(outs):
        works.append(comm.recv(_handed(out, call)[0], source=previous, tag=number, async_op=async_op))
    return Begun(call, works[::-1], lambda: all(_same(*pair) for pair in zip(outs, incoming, strict=True)), [])


def _same(one: Array, other: Array) -> bool:
    return one.tobytes() == other.tobytes()


_BEGIN: Final[dict[str, Callable[[Communicator, Call, bool], Begun]]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "all_to_all": _all_to_all,
    "uneven": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "messages": _messages,
}
