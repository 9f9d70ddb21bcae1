"""Tuning measures once, on all ranks at the same time, and all end with the same plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from tests.support.patience import allowed_s

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB, SECOND
from fireflyer.collectives import Communicator, Plan, make_plan
from fireflyer.collectives.planning.cost import Speeds
from fireflyer.collectives.planning.plan import SUITABLE
from fireflyer.collectives.planning.routing import plan_for
from fireflyer.collectives.tuning import Tuning, measure, tune
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore
from fireflyer.topology import count_crossings

T = TypeVar("T")


def on_all(plan: Plan, work: Callable[[Communicator], T]) -> list[T]:
    """What `work` returns on every rank; ranks are threads."""
    store, secret = LocalStore(), new_secret()
    results: list[Any] = [None] * plan.world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with Communicator.create(
                rank=rank,
                world_size=plan.world_size,
                node=plan.node_of_rank[rank],
                store=store,
                secret=secret,
                plan=plan,
                timeout_ns=30 * SECOND,
            ) as comm:
                results[rank] = work(comm)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(plan.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.processes
@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1], [1, 0, 0, 1], [0, 1, 2]])
def test_all_ranks_end_with_the_same_plan(nodes: list[int]) -> None:
    found = on_all(make_plan(nodes), tune)
    assert all(tuning == found[0] for tuning in found)
    tuning = found[0]
    assert tuning.plan.node_of_rank == tuple(nodes)
    assert {route.kind for route in tuning.plan.routes} == set(SUITABLE)
    assert 0 < tuning.took_ns < 20 * SECOND
    # Alone on its processors a rank reaches these rates. Else one that loses its processor waits for all others' turns,
    # and ranks wait for each other, so that rates fall faster than the share of a processor does.
    share = allowed_s(1) ** 2
    assert tuning.speeds.add_bytes_per_s > 1e8 / share
    assert tuning.speeds.memory_bytes_per_s > 1e8 / share
    assert tuning.speeds.add_bytes_per_s != Speeds().add_bytes_per_s
    if len(set(nodes)) > 1:
        assert 1e7 / share < tuning.speeds.bytes_per_s < 1e12
        assert tuning.speeds.latency_ns != Speeds().latency_ns


@pytest.mark.processes
def test_a_tuned_plan_sums_and_a_restart_does_not_measure_again() -> None:
    tuning = on_all(make_plan([0, 1]), tune)[0]
    stored = msgspec.json.decode(msgspec.json.encode(tuning), type=Tuning)

    def work(comm: Communicator) -> tuple[Tuning, int]:
        array = np.full(1 * MIB, comm.rank + 1.0, np.float32)
        before = comm.stats().operations["allreduce"]
        again = tune(comm, kept=stored)
        assert comm.stats().operations["allreduce"] == before, "nothing was measured"
        comm.allreduce(array)
        assert np.all(array == 3.0)
        return again, 0

    assert all(again == tuning for again, _ in on_all(stored.plan, work))


@pytest.mark.processes
def test_another_group_measures_again() -> None:
    old = on_all(make_plan([0]), tune)[0]
    new = on_all(make_plan([0, 0]), lambda comm: tune(comm, kept=old))[0]
    assert new.plan.world_size == 2


@pytest.mark.processes
def test_zones_are_measured_across_and_cross_once() -> None:
    zones = (0, 1, 0, 1)
    tuning = on_all(make_plan([0, 1, 2, 3]), lambda comm: tune(comm, zones=zones))[0]
    assert tuning.speeds.cross_bytes_per_s > 0
    assert count_crossings(tuning.plan.trees, zones).pairs == ((0, 1),)


def test_zones_must_be_those_of_the_nodes() -> None:
    with pytest.raises(UsageError, match="zones names 2 nodes of 1"):
        on_all(make_plan([0, 0]), lambda comm: tune(comm, zones=(0, 1)))


@pytest.mark.processes
def test_declared_speeds_stand_in_for_what_is_not_measured() -> None:
    declared = Speeds(message_ns=1234.0, local_latency_ns=777.0)
    speeds = on_all(make_plan([0, 1]), lambda comm: measure(comm, declared=declared))[1]
    assert speeds.message_ns == 1234.0
    assert speeds.local_latency_ns == 777.0


@pytest.mark.processes
@pytest.mark.parametrize("zones", [(0, 0, 1, 1, 1), (0, 1, 0, 1, 2)])
@pytest.mark.parametrize("kind", ["allreduce", "reduce", "broadcast"])
def test_trees_between_zones_work(zones: tuple[int, ...], kind: str) -> None:
    """Real sums over the trees that cross by one pair, from and to any node."""
    plan = plan_for(range(5), Speeds(), zones=zones, only=["double_binary_tree"])

    def work(comm: Communicator) -> None:
        for root in range(5):
            array = np.full(100_003, comm.rank + 1.0, np.float32)
            if kind == "allreduce":
                comm.allreduce(array)
                expected = 15.0
            elif kind == "reduce":
                comm.reduce(array, root=root)
                expected = 15.0 if comm.rank == root else comm.rank + 1.0
            else:
                comm.broadcast(array, root=root)
                expected = root + 1.0
            assert np.all(array == expected)

    on_all(plan, work)
