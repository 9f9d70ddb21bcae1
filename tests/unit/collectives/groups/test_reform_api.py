"""A group that others leave and join, as its ranks see it; ranks are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fireflyer.base.errors import FireflyerError, StaleVersion, Timeout, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives import Communicator, Plan, Route, make_plan
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

SECRET = new_secret()


def run(*bodies: Callable[[LocalStore], Any], store: LocalStore | None = None) -> list[Any]:
    """What each body returns or raises, all at the same time, over one store."""
    shared = store or LocalStore()
    results: list[Any] = [None] * len(bodies)

    def one(number: int) -> None:
        try:
            results[number] = bodies[number](shared)
        except FireflyerError as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def made(store: LocalStore, rank: int, nodes: list[int], **options: Any) -> Communicator:
    return Communicator.create(
        rank=rank, world_size=len(nodes), node=nodes[rank], store=store, secret=SECRET, arena_bytes=1 << 20, **options
    )


def summed(comm: Communicator, array: Any) -> float:
    array[:] = comm.rank + 1
    comm.allreduce(array)
    return float(array[-1])


def wait_for_newcomer(comm: Communicator, store: LocalStore) -> None:
    store.wait([f"{comm._lineage.of(comm._lineage.generation + 1)}/waiting/00000001"], 20 * SECOND)
    assert comm.newcomers(store) == 1


def test_ranks_leave_and_others_come_and_arrays_stay_where_they_are() -> None:
    nodes = [0, 0, 1, 1]
    grown = threading.Barrier(3)

    def member(rank: int) -> Callable[[LocalStore], Any]:
        def body(store: LocalStore) -> Any:
            old = made(store, rank, nodes)
            array = old.empty(1000)
            assert summed(old, array) == 10
            if rank == 1:
                old.leave(store)
                assert array[0] == 10  # still memory
                grown.wait()
                return "left"
            comm = old.reform(store)
            old.close()  # takes nothing from the new one
            assert comm.registered(array)
            assert summed(comm, array) == 6
            if comm.rank == 0:
                grown.wait()
                wait_for_newcomer(comm, store)
            comm.barrier()
            with comm.reform(store, max_world_size=4) as last:
                assert last.registered(array)
                assert last.empty(10).size == 10
                assert summed(last, array) == 10
                assert last.newcomers(store) == 0
                return last.rank, last.node, last.plan.node_of_rank

        return body

    def newcomer(store: LocalStore) -> Any:
        grown.wait()
        with Communicator.join(store=store, secret=SECRET, node=7) as comm:
            array = comm.empty(1000)
            assert summed(comm, array) == 10
            return comm.rank, comm.node, comm.plan.node_of_rank

    plan = (0, 1, 1, 2)
    ends = run(*(member(rank) for rank in range(4)), newcomer)
    assert ends == [(0, 0, plan), "left", (1, 1, plan), (2, 1, plan), (3, 2, plan)]


def test_the_plan_is_carried_over_or_made_by_the_caller() -> None:
    nodes = [0, 1, 2]
    first = make_plan(
        nodes, chunk_bytes=8192, window=8, routes=[Route("allreduce", None, "ring", 16384)], sums="canonical"
    )

    def own(nodes: tuple[int, ...]) -> Plan:
        return make_plan(nodes, window=16)

    def body(rank: int) -> Callable[[LocalStore], Any]:
        def go_on(store: LocalStore) -> Any:
            comm = made(store, rank, nodes, plan=first)
            if rank == 2:
                return comm.leave(store)
            comm = comm.reform(store)
            carried = comm.plan
            with comm.reform(store, plan=own) as other:
                return carried, other.plan

        return go_on

    one, other, _ = run(*(body(rank) for rank in range(3)))
    assert one == other
    carried, chosen = one
    assert (carried.chunk_bytes, carried.window, carried.sums, carried.node_of_rank) == (8192, 8, "canonical", (0, 1))
    assert carried.route("allreduce", 1).algorithm == "ring"
    assert chosen == make_plan([0, 1], window=16)


def test_a_late_rank_is_told_that_the_others_have_gone_on_and_may_join() -> None:
    gone_on = threading.Event()

    def early(store: LocalStore) -> Any:
        comm = made(store, 0, [0, 0]).reform(store, grace_ns=100 * MS)
        size = comm.world_size
        gone_on.set()
        wait_for_newcomer(comm, store)
        with comm.reform(store) as last:
            last.barrier()
            return size, last.world_size

    def late(store: LocalStore) -> Any:
        comm = made(store, 1, [0, 0])
        gone_on.wait()
        with pytest.raises(StaleVersion, match="generation 1 was formed without this process, which was rank 1"):
            comm.reform(store)
        with Communicator.join(store=store, secret=SECRET, node=0) as again:
            again.barrier()
            return again.rank

    assert run(early, late) == [(1, 2), 1]


def test_too_few_is_a_timeout_that_names_the_missing() -> None:
    def body(store: LocalStore) -> Any:
        return made(store, 0, [0, 0]).reform(store, min_world_size=2, grace_ns=10 * MS, join_timeout_ns=SECOND // 2)

    def gone(store: LocalStore) -> Any:
        made(store, 1, [0, 0]).close()

    error, _ = run(body, gone)
    assert isinstance(error, Timeout)
    assert "rank 1 did not call reform; 1 ranks have, at least 2 are needed" in str(error)


def test_nobody_lets_a_newcomer_in_for_ever() -> None:
    store = LocalStore()
    with made(store, 0, [0]), pytest.raises(Timeout, match="did not admit this process within 200 ms"):
        Communicator.join(store=store, secret=SECRET, node=0, join_timeout_ns=200 * MS)
    with pytest.raises(Timeout):
        Communicator.join(store=LocalStore(), secret=SECRET, node=0, join_timeout_ns=50 * MS)


def test_what_makes_no_sense_is_told() -> None:
    store = LocalStore()
    comm = made(store, 0, [0])
    for options in ({"min_world_size": 0}, {"min_world_size": 3, "max_world_size": 2}, {"grace_ns": 1}):
        with pytest.raises(UsageError):
            comm.reform(store, **options)  # type: ignore[arg-type]
    comm.barrier()  # nothing was closed for that
    new = comm.reform(store)
    with pytest.raises(UsageError, match="closed or re-formed"):
        comm.reform(store)
    with pytest.raises(UsageError, match="for other nodes"):
        new.reform(store, plan=lambda nodes: make_plan([0, 1]))
    other = made(store, 0, [0])
    array = other.empty(10)
    other.close()
    with pytest.raises(UsageError, match="closed or re-formed"):
        other.reform(store)
    assert np.all(array == 0)
