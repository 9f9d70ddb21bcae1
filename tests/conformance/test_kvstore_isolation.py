"""What every key-value engine must do with transactions that run side by side.

PostgreSQL may refuse more than it must, since its locks are coarse, so where a refusal is not required its outcome is
not asserted. It also refuses less: only reads and writes that cross make it refuse one, so they cross here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from pathlib import Path

import pytest
from tests.support.kvstore.engines import KINDS, Opened, Place, place_of, put, values
from tests.support.kvstore.histories import explained, random_plans, run_interleaved
from tests.support.loops import on_loop
from tests.support.patience import allowed_s

from fireflyer.base.units import SECOND
from fireflyer.kvstore import CommitUnknown, Conflict, Engine, Reader, Transaction
from fireflyer.kvstore.core.keys import ATTEMPT_LIMIT_NS

ALLOWED_NS = int(allowed_s(ATTEMPT_LIMIT_NS / SECOND) * SECOND)


@pytest.fixture(autouse=True)
def _attempts_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection to PostgreSQL is a new process there, which takes its time on a busy machine."""
    monkeypatch.setattr("fireflyer.kvstore.engine.ATTEMPT_LIMIT_NS", ALLOWED_NS)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, tmp_path, lambda: request.getfixturevalue("postgres_url"))


async def _outcomes(*sides: Opened) -> list[bool]:
    """Commits one after the other; which of them succeeded."""
    committed = []
    for side in sides:
        try:
            await side.commit()
            committed.append(True)
        except Conflict:
            committed.append(False)
    return committed


async def _pair(kv: Engine) -> tuple[Opened, Transaction, Opened, Transaction]:
    one, other = (Opened(kv, timeout_ns=ALLOWED_NS) for _ in range(2))
    return one, await one.begin(), other, await other.begin()


@on_loop
async def test_no_update_is_lost(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, counter=b"0")
        one, a, other, b = await _pair(kv)
        for tx in (a, b):
            tx.set(b"counter", b"%d" % (int(await tx.get(b"counter") or b"") + 1))
        assert await _outcomes(one, other) == [True, False]
        assert await values(kv) == {b"counter": b"1"}


@on_loop
async def test_write_skew_is_impossible(place: Place) -> None:
    """Each of two doctors may leave while the other is on call."""
    async with await place.open() as kv:
        await put(kv, alice=b"on call", bob=b"on call")
        one, a, other, b = await _pair(kv)
        assert await b.get(b"alice") == await a.get(b"bob") == b"on call"
        a.clear(b"alice")
        b.clear(b"bob")
        assert await _outcomes(one, other) == [True, False]
        assert await values(kv) == {b"bob": b"on call"}


@on_loop
async def test_phantoms_are_impossible(place: Place) -> None:
    """Each of two adds a booking to a room that it found free."""
    async with await place.open() as kv:
        one, a, other, b = await _pair(kv)
        for tx, name in ((a, b"a"), (b, b"b")):
            assert (await tx.get_range(b"room/", b"room0")).items == []
            tx.set(b"room/" + name, name)
        assert await _outcomes(one, other) == [True, False]
        assert list(await values(kv)) == [b"room/a"]


@on_loop
async def test_a_missing_key_is_read_as_well_as_a_present_one(place: Place) -> None:
    async with await place.open() as kv:
        one, a, other, b = await _pair(kv)
        for tx, name in ((a, b"a"), (b, b"b")):
            assert await tx.get(b"leader") is None
            tx.set(b"leader", name)
        assert await _outcomes(one, other) == [True, False]
        assert await values(kv) == {b"leader": b"a"}


@on_loop
async def test_a_cleared_range_conflicts_with_who_read_in_it(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, a1=b"x", a2=b"x")
        one, a, other, b = await _pair(kv)
        assert await b.get(b"a2") == b"x"
        b.set(b"seen", b"a2 is there")
        a.clear_range(b"a", b"b")
        assert await a.get(b"seen") is None
        assert await _outcomes(one, other) == [True, False]
        assert await values(kv) == {}


@on_loop
async def test_a_range_cut_by_its_limit_conflicts_only_as_far_as_it_was_read(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, k1=b"x", k2=b"x", k3=b"x")
        for written, expected in ((b"k1", False), (b"k2", False), (b"k3", True), (b"k15", False)):
            one, a, other, b = await _pair(kv)
            assert len((await b.get_range(b"", None, limit=2)).items) == 2
            b.set(b"result", b"")
            a.set(written, b"y")
            committed = await _outcomes(one, other)
            assert committed[0]
            assert committed[1] == expected or place.kind == "postgres"
            async with kv.transaction() as tx:
                tx.clear(b"k15")


@on_loop
async def test_snapshot_reads_do_not_conflict_but_declared_ones_do(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, a=b"0", b=b"0")
        one, a, other, b = await _pair(kv)
        assert await b.snapshot.get(b"a") == await a.get(b"b") == b"0"
        assert len((await b.snapshot.get_range(b"", None)).items) == 2
        b.set(b"b", b"1")
        a.set(b"a", b"1")
        assert await _outcomes(one, other) == [True, place.kind != "postgres"]

        for end in (None, b"b"):
            one, a, other, b = await _pair(kv)
            await b.snapshot.get(b"c")
            await a.get(b"b")
            b.add_read_conflict(b"a", end)
            b.set(b"b", b"2")
            a.set(b"a", b"2")
            assert await _outcomes(one, other) == [True, False]


@on_loop
async def test_transactions_that_touch_different_keys_both_commit(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, a=b"0", b=b"0")
        one, a, other, b = await _pair(kv)
        for tx, key in ((a, b"a"), (b, b"b")):
            tx.set(key, b"%d" % (int(await tx.get(key) or b"") + 1))
        committed = await _outcomes(one, other)
        assert committed[0]
        assert committed[1] or place.kind == "postgres"


@on_loop
async def test_a_snapshot_stays_as_it_was_while_others_commit(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, a=b"old", b=b"old")
        side = Opened(kv)
        tx = await side.begin()
        assert await tx.get(b"a") == b"old"
        async with kv.transaction() as other:
            other.clear_range(b"", None)
            other.set(b"b", b"new")
            other.set(b"c", b"new")
        assert await tx.get(b"a") == b"old"
        assert (await tx.get_range(b"", None)).items == [(b"a", b"old"), (b"b", b"old")]
        await side.commit()  # it wrote nothing, so it comes before the other
        assert await values(kv) == {b"b": b"new", b"c": b"new"}


@on_loop
async def test_what_an_abandoned_transaction_wrote_was_never_there(place: Place) -> None:
    async with await place.open() as kv:
        one, a, other, b = await _pair(kv)
        a.set(b"a", b"1")
        assert await b.get(b"a") is None
        b.set(b"b", b"1")
        await one.abandon()
        await other.commit()
        assert await values(kv) == {b"b": b"1"}


@on_loop
async def test_every_increment_of_many_tasks_counts(place: Place) -> None:
    tasks, each = (16, 20) if place.kind == "memory" else (8, 5)
    async with await place.open() as kv:

        async def increment(tx: Transaction) -> None:
            tx.set(b"counter", b"%d" % (int(await tx.get(b"counter") or b"0") + 1))

        async def work() -> None:
            for _ in range(each):
                await kv.transact(increment, timeout_ns=30 * SECOND)

        await asyncio.gather(*(work() for _ in range(tasks)))
        assert await values(kv) == {b"counter": b"%d" % (tasks * each)}


@on_loop
async def test_money_is_neither_made_nor_lost(place: Place) -> None:
    """Transfers between accounts, some of them opened and closed, while others add them all up."""
    accounts, total, transfers = 6, 600, 60 if place.kind == "memory" else 12
    async with await place.open() as kv:
        await put(kv, **{f"account/{i}": b"100" for i in range(accounts)})
        seen: list[int] = []

        async def move(source: bytes, target: bytes, amount: int, tx: Transaction) -> None:
            left = int(await tx.get(source) or b"0") - amount
            if left < 0 or source == target:
                return
            tx.set(target, b"%d" % (int(await tx.get(target) or b"0") + amount))
            if left:
                tx.set(source, b"%d" % left)
            else:
                tx.clear(source)

        async def add_up(tx: Reader) -> int:
            return sum(int(value) for _, value in (await tx.get_range(b"account/", b"account0")).items)

        async def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(transfers):
                source, target = (b"account/%d" % rng.randrange(accounts + 2) for _ in range(2))
                amount = rng.choice([1, 50, 100])
                await kv.transact(functools.partial(move, source, target, amount), timeout_ns=30 * SECOND)
                seen.append(await kv.read(add_up, timeout_ns=30 * SECOND))

        await asyncio.gather(*(work(seed) for seed in range(4)))
        assert set(seen) == {total}
        assert await kv.read(add_up) == total


@on_loop
async def test_a_conflict_is_raised_when_attempts_run_out_and_says_how_many(place: Place) -> None:
    limit_ns = SECOND // 5 if place.kind == "memory" else SECOND  # for an attempt also where the disk is slow to sync
    async with await place.open() as kv:

        async def never(tx: Transaction) -> None:
            tx.set(b"counter", await tx.get(b"counter") or b"")
            await put(kv, counter=b"written by another")

        async def until_known() -> None:
            while True:
                with contextlib.suppress(CommitUnknown):  # the time was over while an attempt was being committed
                    await kv.transact(never, timeout_ns=limit_ns)

        with pytest.raises(Conflict, match=r"given up after \d+ attempt"):
            await until_known()


async def _histories(place: Place, seeds: range, transactions: int) -> None:
    refused = 0
    async with await place.open() as kv:
        for seed in seeds:
            rng = random.Random(seed)
            before = await values(kv)
            ran = await run_interleaved(kv, random_plans(rng, transactions=transactions), rng)
            assert explained(ran, before, await values(kv)), f"seed {seed}: {ran}"
            refused += sum(not record.committed for record in ran)
    assert refused > len(seeds) // 10, "too few conflicts to mean anything"


@on_loop
async def test_random_histories_have_a_serial_order(place: Place) -> None:
    await _histories(place, range({"memory": 300, "embedded": 30, "postgres": 40}[place.kind]), 4)


@pytest.mark.slow
@on_loop
async def test_many_random_histories_have_a_serial_order(place: Place) -> None:
    count = {"memory": 3000, "embedded": 150, "postgres": 800}[place.kind]
    await _histories(place, range(10_000, 10_000 + count), 5)
