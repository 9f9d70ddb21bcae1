"""The bits of a sum are those that docs/design/0002-collectives.md promises, computed here from the plan alone."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator, Plan, Route, kernels, make_plan
from fireflyer.collectives.planning.plan import ALGORITHMS, HALVING_DOUBLING, RING, TREE, chunk_lane
from fireflyer.collectives.planning.programs import build
from fireflyer.collectives.planning.simulator import Value, expected_sum
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

Array = npt.NDArray[Any]
CHUNK_BYTES = 4096
STORAGE = {"f64": "f8", "f32": "f4", "f16": "f2", "bf16": "u2", "f8e4m3": "u1", "f8e5m2": "u1"}


def promised(plan: Plan, inputs: list[Array], dtype: str) -> Array:
    """The sum of `inputs` (one for each rank), chunk by chunk and block by block, in the order of the contract."""
    wide = "f8" if dtype == "f64" else "f4"
    route = plan.route("allreduce", inputs[0].nbytes)
    elements = route.chunk_bytes // np.dtype(wide).itemsize
    result = np.empty_like(inputs[0])
    for chunk, first in enumerate(range(0, result.size, elements)):
        size = min(elements, result.size - first)
        programs = build(plan, "allreduce", route.algorithm, chunk_lane(chunk))
        blocks = programs[0].blocks
        each = size if blocks == 1 else math.ceil(math.ceil(size / blocks) / 64) * 64
        for block in range(blocks):
            part = slice(first + min(size, block * each), first + min(size, (block + 1) * each))

            def value_of(value: Value, part: slice = part) -> Array:
                if not isinstance(value, int):
                    return value_of(value[0], part) + value_of(value[1], part)
                own = np.empty(part.stop - part.start, wide)
                kernels.reduce_to_accum(own, [inputs[rank][part] for rank in plan.ranks_of(value)], dtype)
                return own

            kernels.round_from_accum(result[part], value_of(expected_sum(programs, block)), dtype)
    return result


def summed(plan: Plan, inputs: list[Array], dtype: str) -> list[Array]:
    store, secret = LocalStore(), new_secret()
    results = [array.copy() for array in inputs]

    def run(rank: int) -> None:
        with Communicator.create(
            rank=rank,
            world_size=plan.world_size,
            node=plan.node_of_rank[rank],
            store=store,
            secret=secret,
            plan=plan,
            timeout_ns=30 * SECOND,
        ) as comm:
            comm.allreduce(results[rank], dtype=dtype)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(plan.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def random_inputs(ranks: int, count: int, dtype: str) -> list[Array]:
    """Values of very different sizes, so that every change of order changes bits."""
    rng = np.random.default_rng(11)
    inputs = []
    for _ in range(ranks):
        values = rng.standard_normal(count) * 2.0 ** rng.integers(-6, 6, count)
        stored = np.empty(count, STORAGE[dtype])
        kernels.round_from_accum(stored, values.astype("f8" if dtype == "f64" else "f4"), dtype)
        inputs.append(stored)
    return inputs


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5, 6], [1, 0, 1, 0]])
def test_every_rank_gets_the_promised_bits(nodes: list[int], dtype: str) -> None:
    plan = make_plan(nodes, chunk_bytes=CHUNK_BYTES)
    inputs = random_inputs(len(nodes), 5 * CHUNK_BYTES // 4 + 77, dtype)
    expected = promised(plan, inputs, dtype)
    for result in summed(plan, inputs, dtype):
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("nodes", "sockets", "window"),
    [([0, 1], 1, 2), ([0, 1, 2], 2, 4), ([0, 0, 1, 2, 2, 3], 1, 8), ([0, 1, 2, 3, 4, 5, 6], 3, 4)],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_algorithm_gives_its_promised_bits(
    algorithm: str, nodes: list[int], sockets: int, window: int, dtype: str
) -> None:
    order = np.random.default_rng(3).permutation(max(nodes) + 1).tolist()
    routes = [Route("allreduce", None, algorithm, 2 * CHUNK_BYTES)]
    plan = make_plan(nodes, chunk_bytes=CHUNK_BYTES, routes=routes, node_order=order, sockets=sockets, window=window)
    inputs = random_inputs(len(nodes), 9 * CHUNK_BYTES // 2 + 77, dtype)
    expected = promised(plan, inputs, dtype)
    for result in summed(plan, inputs, dtype):
        assert result.tobytes() == expected.tobytes()


def test_the_size_of_an_array_chooses_the_algorithm() -> None:
    routes = [
        Route("allreduce", 4000, HALVING_DOUBLING, CHUNK_BYTES),
        Route("allreduce", 40_000, TREE, CHUNK_BYTES),
        Route("allreduce", None, RING, CHUNK_BYTES),
    ]
    plan = make_plan(range(5), chunk_bytes=CHUNK_BYTES, routes=routes)
    for count in (1000, 1001, 10_000, 10_001):
        inputs = random_inputs(5, count, "f32")
        expected = promised(plan, inputs, "f32")
        for result in summed(plan, inputs, "f32"):
            assert result.tobytes() == expected.tobytes()


def test_between_two_nodes_chunks_do_not_change_bits() -> None:
    """So the default plan may choose them by the size of the array."""
    inputs = random_inputs(4, 5000, "f32")
    plans = [make_plan([0, 0, 1, 1], chunk_bytes=chunk_bytes) for chunk_bytes in (CHUNK_BYTES, 2 * CHUNK_BYTES)]
    one, other = (promised(plan, inputs, "f32") for plan in plans)
    assert one.tobytes() == other.tobytes()


def test_another_order_would_give_other_bits() -> None:
    """Otherwise the test above would show nothing."""
    inputs = random_inputs(7, 5000, "f32")
    forwards = promised(make_plan([0, 1, 2, 3, 4, 5, 6], chunk_bytes=CHUNK_BYTES), inputs, "f32")
    flat = promised(make_plan([0] * 7, chunk_bytes=CHUNK_BYTES), inputs, "f32")
    other_chunks = promised(make_plan([0, 1, 2, 3, 4, 5, 6], chunk_bytes=2 * CHUNK_BYTES), inputs, "f32")
    assert forwards.tobytes() != flat.tobytes()
    assert forwards.tobytes() != other_chunks.tobytes()
