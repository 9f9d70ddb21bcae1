"""fp8 results that do not fit: clipped or infinite as documented, and each counted once over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.collectives.calls import SUMMING
from tests.support.collectives.fp8_overflow import FP8, OPS, Overflow, count_clipped, expected_clipped
from tests.support.collectives.thread_ranks import together

from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator, make_plan
from fireflyer.collectives.planning.plan import BY_NODE, CANONICAL

LAYOUTS = [[0], [0, 0], [0, 0, 0], [0, 1], [0, 0, 1], [1, 0, 0], [0, 1, 0, 1], [0, 1, 2], [2, 0, 1, 0, 1]]
CHUNK_BYTES = 4096
relaxed = {"deadline": None, "suppress_health_check": list(HealthCheck)}
calls = st.builds(
    Overflow,
    kind=st.sampled_from(SUMMING),
    dtype=st.sampled_from(FP8),
    op=st.sampled_from(OPS),
    count=st.sampled_from([0, 1, 63, 64, 65, 1023, 1025, 9973, 65_537]),
    arena=st.booleans(),
    root=st.integers(0, 4),
    seed=st.integers(0, 2**16),
)


def run(nodes: list[int], program: list[Overflow], peer_memory: bool, sums: Any) -> None:
    world = len(nodes)
    fitting = [Overflow(**{f: getattr(c, f) for f in c.__struct_fields__} | {"root": c.root % world}) for c in program]
    plan = make_plan(nodes, chunk_bytes=CHUNK_BYTES, window=4, sums=sums)

    def body(comm: Communicator) -> list[int]:
        return [count_clipped(comm, call) for call in fitting]

    counts = together(nodes, body, plan=plan, peer_memory=peer_memory, timeout_ns=20 * SECOND)
    assert all(isinstance(each, list) for each in counts), counts
    for number, call in enumerate(fitting):
        assert sum(each[number] for each in counts) == expected_clipped(call, world), call


programs = st.lists(calls, min_size=1, max_size=8)
ways = st.sampled_from([BY_NODE, BY_NODE, CANONICAL])


@settings(max_examples=25, **relaxed)  # type: ignore[arg-type]
@given(st.sampled_from(LAYOUTS), programs, st.booleans(), ways)
def test_each_element_that_does_not_fit_is_counted_once(
    nodes: list[int], program: list[Overflow], peer_memory: bool, sums: str
) -> None:
    run(nodes, program, peer_memory, sums)


@pytest.mark.slow
@settings(max_examples=150, **relaxed)  # type: ignore[arg-type]
@given(st.sampled_from(LAYOUTS), programs, st.booleans(), ways)
def test_each_element_that_does_not_fit_is_counted_once_in_many_programs(
    nodes: list[int], program: list[Overflow], peer_memory: bool, sums: str
) -> None:
    run(nodes, program, peer_memory, sums)
