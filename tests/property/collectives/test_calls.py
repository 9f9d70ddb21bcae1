"""Any sequence of operations, in any layout and memory, leaves what NumPy says; ranks are threads of this process."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.collectives.calls import (
    BITWISE,
    DTYPES,
    INTEGERS,
    KINDS,
    MEMORIES,
    OPS,
    SUMMING,
    Call,
    begin,
    perform,
)
from tests.support.collectives.thread_ranks import together

from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator, make_plan

CHUNK_BYTES = 4096
LAYOUTS = [[0], [0, 0], [0, 0, 0], [0, 1], [0, 1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 1, 2], [2, 0, 1, 0, 1]]
BORDERS = [0, 1, 2, 63, 64, 65, 511, 513, 1023, 1024, 1025, 4095, 4097, 8192, 9973, 16_385]
"""Parts, whole ones and several of a chunk; on one node also what no longer fits into a mailbox."""


@st.composite
def calls(draw: st.DrawFn) -> Call:
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES))
    ways = [op for op in OPS if dtype in INTEGERS or op not in BITWISE] if kind in SUMMING else ["sum"]
    return Call(
        kind,
        dtype,
        draw(st.sampled_from(ways)),
        draw(st.sampled_from(BORDERS) | st.integers(0, 20_000)),
        draw(st.integers(0, 4)),
        draw(st.booleans()),
        draw(st.sampled_from(MEMORIES)),
        draw(st.integers(0, 2**16)),
    )


def run(nodes: list[int], program: list[tuple[Call, bool]], window: int, peer_memory: bool) -> None:
    """Each call, and whether the next one is made before it is done."""
    plan = make_plan(nodes, chunk_bytes=CHUNK_BYTES, window=window)

    def body(comm: Communicator) -> str:
        bits = hashlib.sha256()
        pending = []
        for call, ahead in program:
            call = Call(
                **{**{f: getattr(call, f) for f in call.__struct_fields__}, "root": call.root % comm.world_size}
            )
            if ahead:
                pending.append(begin(comm, call, async_op=True))
                continue
            for result in perform(comm, call).results:
                bits.update(result.tobytes())
        for begun in reversed(pending):
            begun.check()
        return bits.hexdigest()

    options: dict[str, Any] = {"plan": plan, "peer_memory": peer_memory, "timeout_ns": 20 * SECOND}
    digests = together(nodes, body, **options)
    assert all(isinstance(digest, str) for digest in digests), digests
    assert len(set(digests)) == 1


programs = st.lists(st.tuples(calls(), st.booleans()), min_size=1, max_size=8)
relaxed = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=25, **relaxed)  # type: ignore[arg-type]
@given(st.sampled_from(LAYOUTS), programs, st.sampled_from([2, 4, 8]), st.booleans())
def test_any_program_leaves_what_numpy_says(
    nodes: list[int], program: list[tuple[Call, bool]], window: int, peer_memory: bool
) -> None:
    run(nodes, program, window, peer_memory)


@pytest.mark.slow
@settings(max_examples=300, **relaxed)  # type: ignore[arg-type]
@given(st.sampled_from(LAYOUTS), programs, st.sampled_from([2, 4, 8, 32]), st.booleans())
def test_many_programs_leave_what_numpy_says(
    nodes: list[int], program: list[tuple[Call, bool]], window: int, peer_memory: bool
) -> None:
    run(nodes, program, window, peer_memory)


@pytest.mark.slow
@pytest.mark.campaign(expected_s=45)
@settings(max_examples=1500, **relaxed)  # type: ignore[arg-type]
@given(st.sampled_from(LAYOUTS), programs, st.sampled_from([2, 4, 8, 32]), st.booleans())
def test_very_many_programs_do(
    nodes: list[int], program: list[tuple[Call, bool]], window: int, peer_memory: bool
) -> None:
    run(nodes, program, window, peer_memory)
