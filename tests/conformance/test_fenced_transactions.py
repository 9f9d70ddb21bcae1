"""Transactions under a lease on every engine: conditions, pages, races, and errors as outcomes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.kvstore.engines import KINDS, Place, place_of, values
from tests.support.loops import on_loop

from fireflyer.base.units import SECOND
from fireflyer.kvstore import CommitFault, Engine, MemoryEngine
from fireflyer.kvstore.core.fenced import (
    PAGE_ROWS,
    Committed,
    Failed,
    LeaseCondition,
    LeaseRow,
    Outcome,
    OutcomeUnknown,
    PreconditionFailed,
    Transact,
)
from fireflyer.kvstore.core.rows import encode_row
from fireflyer.kvstore.fenced_driver import transact_on

LEASE_KEY = b"PMle"
LEASE = encode_row(LeaseRow("a", "a:1", 3, 1, SECOND))


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, tmp_path, lambda: request.getfixturevalue("postgres_url"))


async def run(engine: Engine, order: Transact) -> Outcome:
    return await transact_on(engine, order, lease_key=LEASE_KEY, timeout_ns=10 * SECOND)


@on_loop
async def test_nothing_is_written_unless_the_lease_is_held_and_all_is_as_expected(place: Place) -> None:
    async with await place.open() as kv:
        write = ((b"a", b"1"),)
        assert await run(kv, Transact(1, held=LeaseCondition("a", 3), write=write)) == PreconditionFailed(1, None)
        assert await run(kv, Transact(2, write=((LEASE_KEY, LEASE),))) == Committed(2, None)
        for held in (LeaseCondition("a", 2), LeaseCondition("b", 3)):
            assert await run(kv, Transact(3, held=held, write=write)) == PreconditionFailed(3, LEASE)
        expect = ((b"a", None), (b"b", b"0"))
        found = ((b"a", None), (b"b", None))
        assert await run(kv, Transact(4, LeaseCondition("a", 3), expect, write=write)) == PreconditionFailed(
            4, LEASE, found
        )
        assert await values(kv) == {LEASE_KEY: LEASE}
        assert await run(kv, Transact(5, LeaseCondition("a", 3), found, write=write)) == Committed(5, LEASE)
        assert await run(kv, Transact(6, expect=write, write=((b"a", None),))) == Committed(6, LEASE)
        assert await values(kv) == {LEASE_KEY: LEASE}


@on_loop
async def test_ranges_are_read_whole_and_in_order(place: Place) -> None:
    async with await place.open() as kv:
        rows = tuple((b"k%05d" % number, b"v%d" % number) for number in range(2 * PAGE_ROWS + 3))
        await run(kv, Transact(1, write=(*rows, (b"l", b"no"), (b"m1", b"yes"))))
        read = await run(kv, Transact(2, read=((b"k", b"l"), (b"m", b"n"), (b"x", b"y"))))
        assert read == Committed(2, None, (*rows, (b"m1", b"yes")))


@on_loop
async def test_of_many_that_take_the_lease_at_once_one_gets_it(place: Place) -> None:
    async with await place.open() as kv:
        rows = [encode_row(LeaseRow(name, name, 1, 1, SECOND)) for name in "abcdef"]
        orders = [Transact(n, expect=((LEASE_KEY, None),), write=((LEASE_KEY, row),)) for n, row in enumerate(rows)]
        outcomes = await asyncio.gather(*(run(kv, order) for order in orders))
        (winner,) = [outcome.number for outcome in outcomes if isinstance(outcome, Committed)]
        assert await values(kv) == {LEASE_KEY: rows[winner]}


@on_loop
async def test_errors_of_the_store_are_outcomes() -> None:
    faults = [CommitFault.UNKNOWN_LOST, CommitFault.CONFLICT, CommitFault.NONE]
    kv = MemoryEngine(faults=lambda: faults.pop(0))
    order = Transact(7, write=((b"a", b"1"),))
    unknown = await run(kv, order)
    assert isinstance(unknown, OutcomeUnknown)
    assert await values(kv) == {}, "it is not repeated here"
    assert isinstance(await run(kv, order), Committed)
    faults.extend([CommitFault.DISCONNECTED] * 100)
    failed = await transact_on(kv, order, lease_key=LEASE_KEY, timeout_ns=SECOND // 20)
    assert isinstance(failed, Failed)
    assert failed.number == 7
