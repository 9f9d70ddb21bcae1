"""all_to_all with any splits puts every element where the definition says, on any layout."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.collectives.thread_ranks import together

from fireflyer.collectives import Communicator

SIZES = st.one_of(st.integers(0, 9), st.sampled_from([16_383, 16_384, 40_000]))


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[int], list[list[list[int]]]]:
    """Nodes of the ranks, and for each of a few calls how many elements each rank has for each other one."""
    world = draw(st.integers(1, 4))
    nodes = [0, *(draw(st.integers(0, 1)) for _ in range(world - 1))]
    calls = st.lists(st.lists(SIZES, min_size=world, max_size=world), min_size=world, max_size=world)
    return nodes, draw(st.lists(calls, min_size=1, max_size=4))


@settings(max_examples=60)
@given(exchanges())
def test_every_element_goes_where_it_belongs(case: tuple[list[int], list[list[list[int]]]]) -> None:
    nodes, calls = case

    def part(call: int, source: int, target: int) -> Any:
        return np.arange(calls[call][source][target], dtype="i4") * 100 + 10 * source + target

    def body(comm: Communicator) -> None:
        me, ranks = comm.rank, range(comm.world_size)
        works = []
        for call, sizes in enumerate(calls):
            outgoing = np.concatenate([part(call, me, target) for target in ranks])
            out_splits = [sizes[source][me] for source in ranks]
            out = np.empty(sum(out_splits), "i4")
            work = comm.all_to_all(out, outgoing, in_splits=sizes[me], out_splits=out_splits, async_op=True)
            works.append((work, call, out, list(accumulate(out_splits, initial=0))))
        for work, call, out, borders in works:
            work.wait()
            for source in ranks:
                assert np.array_equal(out[borders[source] : borders[source + 1]], part(call, source, me))

    assert together(nodes, body) == [None] * len(nodes)
