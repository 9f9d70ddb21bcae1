"""What a plan costs does not grow faster than the group, and native code refuses programs that make no sense."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from fireflyer.collectives import make_plan
from fireflyer.collectives.planning.programs import links, native_programs, native_routes
from fireflyer.native import Executor, create_window


def executor(nodes: list[int], **changes: Any) -> Executor:
    """An executor of rank 0; where there are other nodes, without connections to them."""
    plan = make_plan(nodes, window=2, chunk_bytes=4096)
    arguments: dict[str, Any] = {
        "rank": 0,
        "node_of_rank": nodes,
        "labels": [f"rank {rank}" for rank in range(len(nodes))],
        "trees": [list(tree) for tree in plan.trees],
        "timeout_ns": 10**9,
        "window_fd": create_window(nodes.count(0), 2, 4096),
        "doorbell_fd": os.eventfd(0),
        "leader_fd": -1,
        "local_fds": [],
        "connections": [],
        "routes": native_routes(plan),
        "programs": native_programs(plan, 0),
        "arena": None,
        "local_peers": [],
    }
    return Executor(**arguments | changes)


def test_the_largest_group_is_planned_in_seconds() -> None:
    begun = time.process_time()
    plan = make_plan([rank // 64 for rank in range(1 << 16)])
    made = native_programs(plan, 5)
    assert len(links(plan, 5)) < 20
    assert time.process_time() - begun < 5
    assert max(len(steps) for *_, steps in made) < 4 * plan.nodes


Program = tuple[str, int, int, int, int, list[tuple[int, int, int, int, int, list[int]]]]
GOOD: Program = ("allgather", 0, 2, 2, 1, [(3, 1, 0, 1, 0, []), (4, 1, 1, 1, 0, [])])
BAD: dict[str, tuple[Program, str]] = {
    "an unknown lane": (("allgather", 2, 2, 2, 1, GOOD[5]), "no lane or channel"),
    "a channel of the other lane": (("allgather", 0, 3, 2, 1, GOOD[5]), "no lane or channel"),
    "an unknown channel": (("allgather", 0, 99, 2, 1, GOOD[5]), "no lane or channel"),
    "too few blocks": (("allgather", 0, 2, 1, 1, GOOD[5]), "wrong number of blocks"),
    "too many blocks": (("allreduce", 0, 2, 3, 1, GOOD[5]), "wrong number of blocks"),
    "an unknown action": (("allgather", 0, 2, 2, 1, [(5, 1, 0, 1, 0, [])]), "nothing known"),
    "a negative action": (("allgather", 0, 2, 2, 1, [(-1, 1, 0, 1, 0, [])]), "nothing known"),
    "itself as a peer": (("allgather", 0, 2, 2, 1, [(3, 0, 0, 1, 0, [])]), "peer that cannot be"),
    "an unknown peer": (("allgather", 0, 2, 2, 1, [(3, 2, 0, 1, 0, [])]), "peer that cannot be"),
    "a finish with a peer": (("allgather", 0, 2, 2, 1, [(2, 1, 0, 1, 0, [])]), "peer that cannot be"),
    "an unknown block": (("allgather", 0, 2, 2, 1, [(3, 1, 2, 1, 0, [])]), "blocks that do not exist"),
    "too wide a span": (("allgather", 0, 2, 2, 1, [(3, 1, 1, 2, 0, [])]), "blocks that do not exist"),
    "an empty span": (("allgather", 0, 2, 2, 1, [(3, 1, 1, 0, 0, [])]), "blocks that do not exist"),
    "a round too late": (("allgather", 0, 2, 2, 1, [(3, 1, 0, 1, 1, [])]), "round that does not exist"),
    "waiting for itself": (("allgather", 0, 2, 2, 1, [(3, 1, 0, 1, 0, [0])]), "waits for a later one"),
    "waiting for nothing there": (("allgather", 0, 2, 2, 1, [(3, 1, 0, 1, 0, [7])]), "waits for a later one"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_program_that_makes_no_sense_is_refused(what: str) -> None:
    program, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        executor([0, 1], routes=[], programs=[program])


def test_a_route_without_its_program_is_refused() -> None:
    with pytest.raises(ValueError, match="a route has no program"):
        executor([0, 1], programs=[])


def test_chunks_that_do_not_fit_into_the_window_are_refused() -> None:
    with pytest.raises(ValueError, match="larger than the slots"):
        executor([0, 1], routes=[("allreduce", -1, 0, 8192)])


def test_missing_and_misdirected_connections_are_refused() -> None:
    with pytest.raises(ValueError, match="connection to node 1 is missing"):
        executor([0, 1])
    for channel, node, socket in [(0, 0, 0), (0, 2, 0), (8, 1, 0), (-2, 1, 0), (0, 1, 8), (0, 1, -1)]:
        read, write = os.pipe()
        os.close(write)
        with pytest.raises(ValueError, match="leads to no neighbour"):
            executor([0, 1], connections=[(channel, node, socket, read)])
