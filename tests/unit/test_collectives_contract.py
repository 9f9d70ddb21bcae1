"""The bits of a sum are those that docs/design/0002-collectives.md promises, computed here from the plan alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator, Plan, kernels, make_plan, orient
from fireflyer.collectives.plan import chunk_tree
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

Array = npt.NDArray[Any]
CHUNK_BYTES = 4096
STORAGE = {"f64": "f8", "f32": "f4", "f16": "f2", "bf16": "u2", "f8e4m3": "u1", "f8e5m2": "u1"}


def promised(plan: Plan, inputs: list[Array], dtype: str) -> Array:
    """The sum of `inputs` (one for each rank), chunk by chunk, in the order of the contract."""
    wide = "f8" if dtype == "f64" else "f4"
    elements = plan.chunk_bytes // np.dtype(wide).itemsize
    result = np.empty_like(inputs[0])
    for chunk, first in enumerate(range(0, result.size, elements)):
        part = slice(first, min(first + elements, result.size))
        tree = plan.trees[chunk_tree(chunk)]
        views = orient(tree, tree.index(-1))

        def sum_below(node: int, part: slice = part, views: Any = views) -> Array:
            own = np.empty(part.stop - part.start, wide)
            kernels.reduce_to_accum(own, [inputs[rank][part] for rank in plan.ranks_of(node)], dtype)
            below = [sum_below(child) for child in views[node].children]
            total = below[0] + own if below else own
            for other in below[1:]:
                total = total + other
            return total

        kernels.round_from_accum(result[part], sum_below(tree.index(-1)), dtype)
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


def test_another_order_would_give_other_bits() -> None:
    """Otherwise the test above would show nothing."""
    inputs = random_inputs(7, 5000, "f32")
    forwards = promised(make_plan([0, 1, 2, 3, 4, 5, 6], chunk_bytes=CHUNK_BYTES), inputs, "f32")
    flat = promised(make_plan([0] * 7, chunk_bytes=CHUNK_BYTES), inputs, "f32")
    other_chunks = promised(make_plan([0, 1, 2, 3, 4, 5, 6], chunk_bytes=2 * CHUNK_BYTES), inputs, "f32")
    assert forwards.tobytes() != flat.tobytes()
    assert forwards.tobytes() != other_chunks.tobytes()
