"""What every key-value engine must do, on one connection after the other: reads, writes, ranges, limits, errors.

What happens between transactions that run side by side is in `test_kvstore_isolation`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.kvstore.engines import KINDS, Opened, Place, Side, place_of, put, values
from tests.support.loops import on_loop

from fireflyer.base.errors import Aborted, StaleVersion, Timeout, UsageError
from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.kvstore import (
    MAX_KEY_BYTES,
    MAX_PAGE_BYTES,
    MAX_PAGE_ITEMS,
    MAX_VALUE_BYTES,
    Conflict,
    Reader,
    Transaction,
    TransactionBatch,
    key_after,
    prefix_range,
    transact_once,
)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, tmp_path, lambda: request.getfixturevalue("postgres_url"))


@on_loop
async def test_what_was_committed_is_seen_by_the_next_transaction(place: Place) -> None:
    async with await place.open() as kv:

        async def write(tx: Transaction) -> str:
            tx.set(b"a", b"1")
            tx.set(b"b", b"")
            return "done"

        assert await kv.transact(write) == "done"
        assert await values(kv) == {b"a": b"1", b"b": b""}
        assert await kv.read(lambda tx: tx.get(b"nothing")) is None


@on_loop
async def test_what_was_committed_is_there_after_opening_again(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, a=b"1", b=b"2")
    async with await place.open() as kv:
        assert await values(kv) == {b"a": b"1", b"b": b"2"}


@on_loop
async def test_a_transaction_reads_its_own_writes(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, a=b"old", b=b"old", c=b"old", e=b"old")
        async with kv.transaction() as tx:
            tx.set(b"a", b"new")
            tx.clear(b"b")
            tx.set(b"d", b"new")
            assert await tx.get(b"a") == b"new"
            assert await tx.get(b"b") is None
            expected = [(b"a", b"new"), (b"c", b"old"), (b"d", b"new"), (b"e", b"old")]
            assert (await tx.get_range(b"", None)).items == expected
            assert (await tx.get_range(b"", None, reverse=True)).items == expected[::-1]
            assert (await tx.get_range(b"b", b"e", limit=1)).items == [(b"c", b"old")]
            tx.clear_range(b"c", b"e")
            tx.set(b"cc", b"again")
            assert await tx.get(b"c") is None
            assert await tx.snapshot.get(b"cc") == b"again"
            assert (await tx.snapshot.get_range(b"b", None)).items == [(b"cc", b"again"), (b"e", b"old")]
        assert await values(kv) == {b"a": b"new", b"cc": b"again", b"e": b"old"}


@on_loop
async def test_an_error_out_of_a_body_leaves_nothing_and_is_not_repeated(place: Place) -> None:
    async with await place.open() as kv:
        for raised in (Side("mine"), StaleVersion("transient, but the body's own"), Timeout("also the body's")):
            runs = 0

            async def body(tx: Transaction, raised: Exception = raised) -> None:
                nonlocal runs
                runs += 1
                tx.set(b"a", b"1")
                raise raised

            with pytest.raises(type(raised)) as caught:
                await kv.transact(body)
            assert caught.value is raised
            assert runs == 1
        side = Opened(kv)
        tx = await side.begin()
        await tx.get(b"x")
        tx.set(b"a", b"1")
        await side.abandon()
        assert await values(kv) == {}


@on_loop
async def test_keys_are_ordered_bytewise_and_ranges_are_half_open(place: Place) -> None:
    keys = [b"\0", b"\0\0", b"a", b"a\0", b"a\xff", b"b", b"\x80", b"\xfe\xff", b"\xff", b"\xff\0", b"\xff\xff\xff"]
    async with await place.open() as kv:
        async with kv.transaction() as tx:
            for key in reversed(keys):
                tx.set(key, key)

        async def ranges(tx: Reader) -> None:
            async def found(begin: bytes, end: bytes | None, **more: bool) -> list[bytes]:
                return [key for key, _ in (await tx.get_range(begin, end, **more)).items]

            assert await found(b"", None) == keys
            assert await found(b"", None, reverse=True) == keys[::-1]
            assert await found(b"a", b"b") == [b"a", b"a\0", b"a\xff"]
            assert await found(b"a", key_after(b"a")) == [b"a"]
            assert await found(b"b", b"a") == []
            assert await found(b"a", b"a") == []
            assert await found(b"zzz", b"\x80") == []
            for prefix in (b"a", b"\xff", b"\xfe\xff", b"\xff\xff", b"\0", b""):
                wanted = prefix_range(prefix)
                assert await found(wanted.begin, wanted.end) == [key for key in keys if key.startswith(prefix)]
                backwards = [key for key in keys[::-1] if key.startswith(prefix)]
                assert await found(wanted.begin, wanted.end, reverse=True) == backwards

        await kv.read(ranges)
        wanted = prefix_range(b"\xff")
        async with kv.transaction() as tx:
            tx.clear_range(wanted.begin, wanted.end)
            tx.clear_range(b"a", b"a\xff")
        assert list(await values(kv)) == [b"\0", b"\0\0", b"a\xff", b"b", b"\x80", b"\xfe\xff"]


@on_loop
async def test_a_limit_stops_a_range_and_says_that_there_is_more(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, **{f"k{i}": b"v" for i in range(5)})

        async def pages(tx: Reader) -> None:
            page = await tx.get_range(b"", None, limit=2)
            assert ([key for key, _ in page.items], page.more) == ([b"k0", b"k1"], True)
            page = await tx.get_range(key_after(b"k1"), None, limit=4)
            assert ([key for key, _ in page.items], page.more) == ([b"k2", b"k3", b"k4"], False)
            page = await tx.get_range(b"", b"k4", limit=3, reverse=True)
            assert ([key for key, _ in page.items], page.more) == ([b"k3", b"k2", b"k1"], True)
            for limit in (0, -1, MAX_PAGE_ITEMS + 1):
                with pytest.raises(UsageError, match="limit"):
                    await tx.get_range(b"", None, limit=limit)

        await kv.read(pages)


@on_loop
async def test_own_writes_do_not_make_a_page_lose_or_invent_items(place: Place) -> None:
    async with await place.open() as kv:
        stored = {b"%03d" % i: b"old" for i in range(0, 200, 2)}
        async with kv.transaction() as tx:
            for key, value in stored.items():
                tx.set(key, value)
        async with kv.transaction() as tx:
            tx.clear_range(b"020", b"150")
            seen = {key: value for key, value in stored.items() if not b"020" <= key < b"150"}
            for i in (1, 21, 90, 151):
                tx.set(b"%03d" % i, b"new")
                seen[b"%03d" % i] = b"new"
            for reverse in (False, True):
                expected = sorted(seen.items(), reverse=reverse)
                for limit in (1, 7, 11, len(seen), 200):
                    page = await tx.get_range(b"", None, limit=limit, reverse=reverse)
                    assert page.items == expected[:limit]
                    assert page.more or limit >= len(seen)


@on_loop
async def test_big_values_come_whole_and_pages_are_bounded_by_bytes(place: Place) -> None:
    big = bytes(range(256)) * (MAX_VALUE_BYTES // 256)
    count = MAX_PAGE_BYTES // MAX_VALUE_BYTES + 4
    async with await place.open() as kv:
        for first in range(0, count, 10):
            async with kv.transaction(timeout_ns=30 * SECOND) as tx:
                for i in range(first, min(first + 10, count)):
                    tx.set(b"%03d" % i, big)

        async def one_page(tx: Reader) -> tuple[int, bool, int, bool]:
            page, back = await tx.get_range(b"", None), await tx.get_range(b"", None, reverse=True)
            assert back.items[0][0] == b"%03d" % (count - 1)
            return len(page.items), page.more, len(back.items), back.more

        at_once = MAX_PAGE_BYTES // MAX_VALUE_BYTES
        assert await kv.read(one_page) == (at_once, True, at_once, True)
        found = await values(kv)
        assert len(found) == count
        assert set(found.values()) == {big}


@on_loop
async def test_limits_are_refused_in_one_line(place: Place) -> None:
    async with await place.open() as kv:
        longest = b"\xff" * MAX_KEY_BYTES
        async with kv.transaction() as tx:
            tx.set(longest, b"x")
            for key in (b"", longest + b"\xff"):
                with pytest.raises(UsageError, match="bytes"):
                    tx.set(key, b"")
                with pytest.raises(UsageError, match="bytes"):
                    await tx.get(key)
            with pytest.raises(UsageError, match="value"):
                tx.set(b"k", b"v" * (MAX_VALUE_BYTES + 1))
            with pytest.raises(UsageError, match="bound"):
                await tx.get_range(longest + b"\xff\xff", None)
            with pytest.raises(UsageError, match="keys must be bytes"):
                tx.set("text", b"")  # type: ignore[arg-type]
        assert await values(kv, longest, key_after(longest)) == {longest: b"x"}
        assert list(await values(kv)) == [longest]


@on_loop
async def test_a_transaction_over_its_limits_does_not_commit_even_if_the_error_is_swallowed(place: Place) -> None:
    async with await place.open() as kv:

        async def body(tx: Transaction) -> None:
            try:
                for i in range(17):
                    tx.set(b"%d" % i, b"v" * MIB)
            except UsageError:
                pass

        with pytest.raises(UsageError, match="split it"):
            await kv.transact(body)
        assert await values(kv) == {}


@on_loop
async def test_a_cancelled_body_leaves_nothing_and_the_engine_goes_on(place: Place) -> None:
    async with await place.open() as kv:
        reached = asyncio.Event()

        async def body(tx: Transaction) -> None:
            await tx.get(b"a")
            tx.set(b"a", b"1")
            reached.set()
            await asyncio.Event().wait()

        for _ in range(20):  # more often than there are connections
            reached.clear()
            task = asyncio.create_task(kv.transact(body))
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await values(kv) == {}
        await put(kv, a=b"2")
        assert await values(kv) == {b"a": b"2"}


@on_loop
async def test_a_body_that_hangs_ends_at_its_deadline(place: Place) -> None:
    async with await place.open() as kv:

        async def body(tx: Transaction) -> None:
            await tx.get(b"a")
            tx.set(b"a", b"1")
            await asyncio.Event().wait()

        with pytest.raises(Timeout, match="it was not committed"):
            await kv.transact(body, timeout_ns=50 * MS)
        with pytest.raises(Timeout, match="it was not committed"):
            async with kv.transaction(timeout_ns=50 * MS) as tx:
                await body(tx)
        with pytest.raises(UsageError, match="positive"):
            await kv.transact(body, timeout_ns=0)
        assert await values(kv) == {}


@on_loop
async def test_a_body_whose_read_was_cancelled_cannot_commit(place: Place) -> None:
    async with await place.open() as kv:
        if place.kind != "postgres":
            return  # their reads do not wait, so they cannot be cancelled

        async def body(tx: Transaction) -> None:
            await tx.get(b"a")
            read = asyncio.ensure_future(tx.get(b"b"))
            await asyncio.sleep(0)
            read.cancel()
            with pytest.raises(asyncio.CancelledError):
                await read
            tx.set(b"a", b"1")

        with pytest.raises(Aborted, match="cancelled"):
            await kv.transact(body)
        assert await values(kv) == {}


@on_loop
async def test_reads_of_one_body_may_run_side_by_side(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, **{f"k{i}": b"%d" % i for i in range(20)})

        async def body(tx: Reader) -> list[bytes | None]:
            return await asyncio.gather(*(tx.get(b"k%d" % i) for i in range(20)))

        assert await kv.read(body) == [b"%d" % i for i in range(20)]


@on_loop
async def test_a_reader_cannot_write_and_an_ended_transaction_does_nothing(place: Place) -> None:
    async with await place.open() as kv:
        kept: list[Transaction] = []

        async def body(tx: Reader) -> None:
            with pytest.raises(UsageError, match="only reads"):
                tx.set(b"a", b"1")  # type: ignore[attr-defined]

        await kv.read(body)

        async def keep(tx: Transaction) -> None:
            kept.append(tx)

        await kv.transact(keep)
        with pytest.raises(UsageError, match="has ended"):
            await kept[0].get(b"a")
        with pytest.raises(UsageError, match="has ended"):
            kept[0].set(b"a", b"1")
        assert await values(kv) == {}


@on_loop
async def test_a_marker_makes_any_body_happen_once(place: Place) -> None:
    async with await place.open() as kv:

        async def take(tx: Transaction) -> bytes:
            number = b"%d" % (int(await tx.get(b"counter") or b"0") + 1)
            tx.set(b"counter", number)
            return number

        assert await transact_once(kv, take, marker=b"request 1") == b"1"
        assert await transact_once(kv, take, marker=b"request 1") == b"1"
        assert await transact_once(kv, take, marker=b"request 2") == b"2"
        both = [transact_once(kv, take, marker=b"request 3") for _ in range(4)]
        assert await asyncio.gather(*both) == [b"3"] * 4
        assert (await values(kv))[b"counter"] == b"3"


@on_loop
async def test_a_closed_engine_refuses_and_closing_twice_is_harmless(place: Place) -> None:
    kv = await place.open()
    await put(kv, a=b"1")
    await kv.close()
    await kv.close()
    with pytest.raises(UsageError, match="closed"):
        await put(kv, a=b"2")


@on_loop
async def test_many_keys_are_read_as_one_by_one(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, a=b"1", b=b"2", d=b"4")
        keys = [b"d", b"a", b"c", b"a", b"b"]
        assert await kv.read(lambda tx: tx.get_many(keys)) == [b"4", b"1", None, b"1", b"2"]
        assert await kv.read(lambda tx: tx.get_many([])) == []

        async def body(tx: Transaction) -> None:
            tx.set(b"c", b"3")
            tx.clear(b"a")
            tx.clear_range(b"d", None)
            assert await tx.get_many(keys) == [None, None, b"3", None, b"2"]
            assert await tx.snapshot.get_many(keys) == [None, None, b"3", None, b"2"]
            with pytest.raises(UsageError, match="at most"):
                await tx.get_many([b"a"] * (MAX_PAGE_ITEMS + 1))
            savepoint = TransactionBatch(tx, tx).savepoint()
            savepoint.set(b"b", b"5")
            savepoint.clear(b"c")
            assert await savepoint.get_many(keys) == [None, None, None, None, b"5"]

        await kv.transact(body)


@on_loop
async def test_keys_that_were_read_together_conflict_each(place: Place) -> None:
    async with await place.open() as kv:
        await put(kv, a=b"1", b=b"2")
        reading = Opened(kv)
        tx = await reading.begin()
        assert await tx.get_many([b"a", b"b", b"missing"]) == [b"1", b"2", None]
        other = Opened(kv)
        changing = await other.begin()
        assert await changing.get(b"written") is None
        changing.set(b"missing", b"3")
        await other.commit()
        tx.set(b"written", b"1")
        with pytest.raises(Conflict):
            await reading.commit()
