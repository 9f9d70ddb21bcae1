"""With `sums="canonical"` the bits are those of one sum in the order of ranks, wherever the ranks sit."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tests.support.collectives.calls import BITWISE, INTEGERS, STORAGE
from tests.support.collectives.thread_ranks import together

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator, Plan, kernels, make_plan
from fireflyer.collectives.p2p import canonical

LAYOUTS = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 1, 1]]
COUNTS = (0, 1, 9973)
OPS = ("sum", "mean", "min", "max", "product", *BITWISE)
Array = npt.NDArray[Any]


def contribution(rank: int, number: int, count: int, dtype: str) -> Array:
    """Of very different sizes, so that every change of order changes bits."""
    rng = np.random.default_rng([rank, number, count])
    if dtype in INTEGERS:
        return rng.integers(0, 256, count * np.dtype(STORAGE[dtype]).itemsize, dtype="u1").view(STORAGE[dtype])
    values = rng.standard_normal(count)
    if dtype in ("f64", "f32"):
        return values.astype(STORAGE[dtype])
    rounded = np.empty(count, STORAGE[dtype])
    kernels.round_from_accum(rounded, values.astype("f4"), dtype)
    return rounded


def promised(parts: list[Array], dtype: str, op: str) -> Array:
    """((r0 op r1) op r2) op ... in the accumulation type, rounded once: written down with NumPy alone."""
    small = dtype in ("f16", "bf16", "f8e4m3", "f8e5m2")
    wide = []
    for part in parts:
        own = np.empty(part.size, "f4") if small else part
        if small:
            kernels.reduce_to_accum(own, [part], dtype)
        wide.append(own)
    combine: dict[str, Callable[[Any, Any], Any]] = {
        "sum": np.add,
        "mean": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "product": np.multiply,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    total = wide[0].copy()
    with np.errstate(over="ignore"):
        for one in wide[1:]:
            total = combine[op](total, one)
    if op == "mean":
        total = _towards_zero(total, len(parts)) if dtype in INTEGERS else total / total.dtype.type(len(parts))
    if not small:
        return total
    result = np.empty(total.size, STORAGE[dtype])
    kernels.round_from_accum(result, total.astype("f4"), dtype)
    return result


def _towards_zero(total: Array, divisor: int) -> Array:
    whole = total.astype("i8")
    quotients: Array = (np.sign(whole) * (np.abs(whole) // divisor)).astype(total.dtype)
    return quotients


def everything(comm: Communicator, dtype: str, ops: tuple[str, ...], counts: tuple[int, ...]) -> list[bytes]:
    """All kinds of sums, in place and not, at once and later; each is held against `promised`."""
    rank, world = comm.rank, comm.world_size
    results = []
    for number, (op, count) in enumerate((op, count) for op in ops for count in counts):
        parts = [contribution(r, number, count * world, dtype) for r in range(world)]
        expected = promised(parts, dtype, op)
        whole = parts[rank].copy()
        comm.allreduce(whole, op=op, dtype=dtype)
        kept, other = parts[rank].copy(), np.empty_like(whole)
        later = [comm.allreduce(kept, op=op, dtype=dtype, out=other, async_op=True)]
        root = number % world
        rooted = parts[rank].copy()
        later.append(comm.reduce(rooted, root=root, op=op, dtype=dtype, async_op=True))
        mine = np.empty(count, whole.dtype)
        later.append(comm.reduce_scatter(mine, parts[rank], op=op, dtype=dtype, async_op=True))
        for work in reversed(later):
            work.wait()
        what = f"{op} of {count} {dtype}"
        assert whole.tobytes() == other.tobytes() == expected.tobytes(), what
        assert kept.tobytes() == parts[rank].tobytes(), what
        assert rooted.tobytes() == (expected if rank == root else parts[rank]).tobytes(), what
        assert mine.tobytes() == expected[rank * count : (rank + 1) * count].tobytes(), what
        results.append(expected.tobytes())
    return results


@pytest.mark.parametrize(
    "dtype",
    ["f32", *(pytest.param(one, marks=pytest.mark.slow) for one in STORAGE if one != "f32")],
)
def test_the_bits_are_those_of_a_sum_in_the_order_of_ranks_on_any_layout(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canonical, "SCRATCH_BYTES", 4096)  # many blocks
    ops = tuple(op for op in OPS if dtype in INTEGERS or op not in BITWISE)

    def body(comm: Communicator) -> list[bytes]:
        return everything(comm, dtype, ops, COUNTS)

    answers = [answer for nodes in LAYOUTS for answer in together(nodes, body, sums="canonical")]
    assert all(answer == answers[0] for answer in answers), answers


def test_without_it_the_bits_depend_on_the_layout() -> None:
    def body(comm: Communicator) -> bytes:
        array = contribution(comm.rank, 1, 9973, "f32")
        comm.allreduce(array)
        return array.tobytes()

    assert len({answer for nodes in LAYOUTS for answer in together(nodes, body)}) > 1


def test_memory_does_not_grow_with_the_array_nor_with_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "SCRATCH_BYTES", 65536)

    def body(comm: Communicator) -> None:
        array = arrays[comm.rank]
        works = [comm.allreduce(array, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        assert array[0] == array[-1] == 8

    arrays = [np.ones(1_000_000, "f4") for _ in range(2)]
    tracemalloc.start()
    assert together([0, 1], body, sums="canonical") == [None, None]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_500_000  # of arrays of 4 MB


def test_an_operation_of_more_parts_than_may_be_pending_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "SCRATCH_BYTES", 64)
    monkeypatch.setattr(canonical, "MAX_BLOCKS", 1 << 20)

    def body(comm: Communicator) -> float:
        array = np.ones(32 * 2 * 2100, "f4")
        comm.allreduce(array)
        return float(array.sum())

    assert together([0, 1], body, sums="canonical") == [2.0 * 32 * 2 * 2100] * 2


@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 1]])
def test_unlike_calls_and_bits_of_floats_are_told(nodes: list[int]) -> None:
    def sizes(comm: Communicator) -> None:
        comm.allreduce(np.ones(1000 + comm.rank, "f4"))

    def operations(comm: Communicator) -> None:
        comm.allreduce(np.ones(1000, "f4"), op="sum" if comm.rank == 0 else "max")

    for body in (sizes, operations):
        for error in together(nodes, body, timeout_ns=4 * SECOND, sums="canonical"):
            assert isinstance(error, UsageError), error
            assert "all_to_all #0" in str(error)

    def bits(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="bxor combines the bits of integers, not of f32"):
            comm.allreduce(np.ones(10, "f4"), op="bxor")
        comm.barrier()

    assert together(nodes, bits, sums="canonical") == [None] * len(nodes)


def test_clipped_numbers_are_counted() -> None:
    def body(comm: Communicator) -> int:
        array = np.full(1000, 0x7E, "u1")  # the largest of its type
        comm.allreduce(array, dtype="f8e4m3")
        return comm.stats().saturated

    assert sum(together([0, 1], body, sums="canonical")) == 1000  # each rank adds up a part


def test_the_plan_says_so_and_a_restart_sums_alike() -> None:
    def body(comm: Communicator) -> tuple[bytes, Plan]:
        array = contribution(comm.rank, 1, 9973, "f32")
        comm.allreduce(array)
        return array.tobytes(), comm.plan

    answers = together([0, 1, 1], body, sums="canonical")
    stored = msgspec.json.decode(msgspec.json.encode(answers[0][1]), type=Plan)
    assert stored.sums == "canonical"
    assert together([0, 1, 1], body, plan=stored) == answers
    assert together([0, 1, 1], body, plan=stored, sums="canonical") == answers


def test_what_is_asked_for_must_agree() -> None:
    def body(comm: Communicator) -> None: ...

    for error in together([0, 1], body, sums="canonical", plan=make_plan([0, 1])):
        assert isinstance(error, UsageError)
        assert "the plan has sums='by_node'" in str(error)
    for error in together([0], body, sums="sorted"):
        assert "use one of by_node, canonical" in str(error)
    with pytest.raises(UsageError, match="sums 'sorted' is not known"):
        make_plan([0, 1], sums="sorted")
    with pytest.raises(UsageError, match="version 1 has no"):
        Plan(version=1, node_of_rank=(0,), trees=((-1,), (-1,)), sums="canonical")
