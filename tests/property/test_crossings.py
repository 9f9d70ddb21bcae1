"""What the scheduler places and what collectives plan on it, together: how many pairs of nodes talk across zones.

The rule is the paper's: at most one task that lies in several zones at a time, by one pair of nodes; small tasks never.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from tests.support.scheduler.snapshots import NOW_NS, POLICY, after, nodes_of, of_kind, waiting

from fireflyer.cluster.core.scheduler.model import Snapshot, Task
from fireflyer.cluster.core.scheduler.schedule import schedule
from fireflyer.cluster.runner.job import job_of
from fireflyer.cluster.schema.runner import OpenedTicket, RunnerOrders
from fireflyer.cluster.schema.sync import LaunchOrder, RunNode
from fireflyer.cluster.schema.tasks import Program, TaskSpec
from fireflyer.collectives.planning.crossings import crossings
from fireflyer.collectives.planning.declaration import Declaration, RouteRow
from fireflyer.collectives.planning.plan import ALGORITHMS, SUITABLE, Plan
from fireflyer.collectives.planning.programs import CONTROL, LANES, links
from fireflyer.topology import count_crossings

CROSSES_FROM = 16
POLICY_OF_PAPER = msgspec.structs.replace(POLICY, cross_zone_nodes=CROSSES_FROM, cross_zone_tasks=1)


def declared_for(names: Sequence[str], zone_of: dict[str, str]) -> Declaration | None:
    """What the launcher of a task on these nodes tells the collectives of its ranks; None: nothing."""
    nodes = tuple(RunNode(name=name, address="10.0.0.1", port=1, zone=zone_of[name]) for name in names)
    spec = TaskSpec(name="t", program=Program(script="x.py"), least_nodes=len(names), most_nodes=len(names))
    order = LaunchOrder(task=1, run=0, user="ann", spec=spec, nodes=nodes)
    tickets = tuple(OpenedTicket(name, b"k" * 32) for name in names)
    job = job_of(RunnerOrders(run_token="0" * 16, order=order, directory="/run", tickets=tickets), {})
    assert job.hosts == tuple(names)
    assert job.remote.name_hosts == bool(job.topology), "ranks call their hosts as the declaration does"
    return msgspec.json.decode(job.topology, type=Declaration) if job.topology else None


def connected_across(plan: Plan, zones: Sequence[int]) -> dict[str, set[tuple[int, int]]]:
    """Algorithm → pairs of nodes of different zones with a connection for it."""
    found: dict[str, set[tuple[int, int]]] = {}
    for node in range(plan.nodes):
        for link in links(plan, node):
            if link.channel != CONTROL and zones[node] != zones[link.node]:
                pairs = found.setdefault(ALGORITHMS[link.channel // len(LANES)], set())
                pairs.add((min(node, link.node), max(node, link.node)))
    return found


def placed(seed: int) -> list[tuple[str, ...]]:
    """What a queue gets in a cluster of two or three zones, some of whose nodes are busy; until nothing more starts."""
    rng = random.Random(seed)
    nodes = nodes_of(*(rng.randint(6, 24) for _ in range(rng.choice([2, 2, 3]))), per_leaf=4)
    tasks: list[Task] = [waiting(number, rng.choice([1, 2, 8, 12, 15, 16, 20, 26])) for number in range(6)]
    snapshot = Snapshot(nodes=nodes, tasks=tuple(tasks), policy=POLICY_OF_PAPER)
    starts, _, _ = of_kind(schedule(snapshot, NOW_NS))
    again, _, _ = of_kind(schedule(after(snapshot, schedule(snapshot, NOW_NS)), NOW_NS + 1))
    return [start.nodes for start in (*starts.values(), *again.values())]


@pytest.mark.parametrize("block", range(2))
def test_one_task_crosses_by_one_pair_and_small_tasks_do_not(block: int) -> None:
    crossed = 0
    for seed in range(block * 25, block * 25 + 25):
        spread = []
        for names in placed(seed):
            zone_of = {name: name[0].upper() for name in names}
            apart = len(set(zone_of.values())) - 1
            declared = declared_for(names, zone_of)
            assert (declared is not None) == (apart > 0)
            if declared is None:
                continue
            spread.append(names)
            zones = declared.zones_of(names)
            plan = declared.plan(tuple(range(len(names))), zones=zones)
            assert len(names) >= CROSSES_FROM
            found = connected_across(plan, zones)
            assert set().union(*found.values()) == next(iter(found.values())), "all operations cross by the same pair"
            assert len(next(iter(found.values()))) == apart
            assert {name: tuple(sorted(pairs)) for name, pairs in found.items()} == crossings(plan, zones)
            assert {route.kind for route in plan.all_routes()} == set(SUITABLE)
        assert len(spread) <= 1
        crossed += len(spread)
    assert crossed > 5, "the clusters are too tame to mean anything"


def test_a_ring_that_is_declared_comes_back_by_another_pair() -> None:
    zones = [0] * 12 + [1] * 8
    rows = (RouteRow(kind="allgather", algorithm="ring", chunk_bytes=4096),)
    found = connected_across(Declaration(routes=rows).plan(tuple(range(20)), zones=zones), zones)
    assert {name: len(pairs) for name, pairs in found.items()} == {"double_binary_tree": 1, "ring": 2, "line": 1}


def test_no_order_of_ranks_alone_gives_one_pair() -> None:
    """Without the zones the same nodes, in the scheduler's order, cross by several pairs."""
    zones = [0] * 12 + [1] * 8
    plan = Declaration().plan(tuple(range(20)), zones=())
    assert len(count_crossings(plan.trees, zones).pairs) > 1
