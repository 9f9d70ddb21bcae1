"""Sums whose bits are those of one node of all ranks, wherever the ranks sit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from tests.support.collective_calls import Call, data_of
from tests.support.thread_ranks import together

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator, canonical
from fireflyer.collectives.arrays import flatten
from fireflyer.collectives.canonical import canonical_allreduce
from fireflyer.native import reduce

LAYOUTS = [[0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 1, 0], [0, 0, 0, 1]]


def summed(comm: Communicator, array: object, dtype: str, op: str = "sum") -> None:
    flat = flatten(array, dtype, sums=True)
    canonical_allreduce(comm._exchange, flat, op, lambda flight: comm._fly(flight, False))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3", "f64", "i32"])
def test_the_bits_are_those_of_a_sum_in_the_order_of_ranks_on_any_layout(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canonical, "SCRATCH_BYTES", 4096)  # many blocks

    def body(comm: Communicator) -> list[bytes]:
        results = []
        for number, count in enumerate((0, 1, 3, 4096, 9973)):
            parts = [data_of(Call("allreduce", dtype, seed=number), rank, count) for rank in range(comm.world_size)]
            mine, expected = parts[comm.rank].copy(), parts[0].copy()
            if count > 0:
                reduce(expected, parts, dtype)
            summed(comm, mine, dtype)
            assert mine.tobytes() == expected.tobytes(), f"{count} {dtype}"
            results.append(mine.tobytes())
        return results

    answers = [answer for nodes in LAYOUTS for answer in together(nodes, body)]
    assert all(answer == answers[0] for answer in answers), answers


def test_the_bits_are_those_of_the_groups_own_sum_on_one_node() -> None:
    def body(comm: Communicator) -> bool:
        one, other = (data_of(Call("allreduce", "f32"), comm.rank, 100_000) for _ in range(2))
        comm.allreduce(one)
        summed(comm, other, "f32")
        return one.tobytes() == other.tobytes()

    assert together([0, 0, 0], body) == [True] * 3


@pytest.mark.parametrize(("op", "expected"), [("sum", 6), ("mean", 2), ("min", 1), ("max", 3), ("product", 6)])
def test_every_operation(op: str, expected: float) -> None:
    def body(comm: Communicator) -> list[float]:
        array = np.full(1000, comm.rank + 1, "f4")
        summed(comm, array, "f32", op)
        return sorted(set(array.tolist()))

    assert together([0, 1, 1], body) == [[expected]] * 3


def test_memory_does_not_grow_with_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "SCRATCH_BYTES", 65536)

    def body(comm: Communicator) -> None:
        array = arrays[comm.rank]
        summed(comm, array, "f32")
        assert array[0] == array[-1] == 2

    arrays = [np.ones(1_000_000, "f4") for _ in range(2)]
    tracemalloc.start()
    assert together([0, 1], body) == [None, None]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000  # of arrays of 4 MB: two ranks, each with two buffers of 64 KiB and their results


def test_unlike_sizes_are_told() -> None:
    def body(comm: Communicator) -> None:
        summed(comm, np.ones(1000 + comm.rank, "f4"), "f32")

    for error in together([0, 1], body, timeout_ns=4 * SECOND):
        assert isinstance(error, UsageError)
        assert "in all_to_all #0" in str(error)
