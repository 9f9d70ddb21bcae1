"""Parts of one transaction: seen by those behind them when kept, gone when dropped, in the conflict sets as read."""

from __future__ import annotations

import random

import pytest
from tests.support.kvstore.engines import Opened, Side, put, values
from tests.support.loops import on_loop

from fireflyer.base.errors import UsageError
from fireflyer.kvstore import (
    MAX_KEY_BYTES,
    Attempted,
    Conflict,
    MemoryEngine,
    MemoryStore,
    Transaction,
    TransactionBatch,
)


@on_loop
async def test_a_part_sees_what_was_kept_before_it_and_nothing_of_what_was_dropped() -> None:
    async with MemoryEngine() as kv:
        await put(kv, a=b"0", b=b"0", c=b"0")

        async def body(tx: Transaction) -> None:
            transaction_batch = TransactionBatch(tx, tx)
            first = transaction_batch.savepoint()
            assert await first.get(b"a") == b"0"
            first.set(b"a", b"1")
            first.clear_range(b"b", b"c")
            assert await first.get(b"a") == b"1"
            assert await first.get(b"b") is None
            assert (await first.get_range(b"a", None)).items == [(b"a", b"1"), (b"c", b"0")]
            first.release()
            second = transaction_batch.savepoint()
            assert await second.get(b"a") == b"1"
            assert await second.get(b"b") is None
            second.set(b"b", b"2")
            second.clear(b"a")
            second.clear_range(b"c", None)
            assert (await second.get_range(b"a", None)).items == [(b"b", b"2")]
            second.rollback()
            assert await second.get(b"a") == b"1"
            second.set(b"d", b"3")
            second.release()
            assert (await transaction_batch.savepoint().get_range(b"a", None, limit=2, reverse=True)).items == [
                (b"d", b"3"),
                (b"c", b"0"),
            ]

        await kv.transact(body)
        assert await values(kv) == {b"a": b"1", b"c": b"0", b"d": b"3"}


@on_loop
async def test_savepoints_are_like_transactions_one_after_the_other() -> None:
    """Random work in savepoints of few transactions, and the same in transactions of its own."""
    rng = random.Random(7)
    keys = [bytes([letter]) for letter in b"abcdefgh"]
    async with MemoryEngine() as together, MemoryEngine() as apart:
        for _ in range(60):
            plans = [(rng.random() < 0.3, [_step(rng, keys) for _ in range(6)]) for _ in range(5)]

            async def body(tx: Transaction, plans: list[tuple[bool, list[_Step]]] = plans) -> list[object]:
                transaction_batch = TransactionBatch(tx, tx)
                seen: list[object] = []
                for dropped, steps in plans:
                    savepoint = transaction_batch.savepoint()
                    seen.append([await _do(savepoint, step) for step in steps])
                    savepoint.rollback() if dropped else savepoint.release()
                return seen

            one_by_one = []
            for dropped, steps in plans:

                async def alone(tx: Transaction, steps: list[_Step] = steps, dropped: bool = dropped) -> list[object]:
                    seen = [await _do(tx, step) for step in steps]
                    if dropped:
                        raise Side(seen)
                    return seen

                try:
                    one_by_one.append(await apart.transact(alone))
                except Side as dropped_with:
                    one_by_one.append(dropped_with.args[0])
            assert await together.transact(body) == one_by_one
            assert await values(together) == await values(apart)


_Step = tuple[str, bytes, bytes]


def _step(rng: random.Random, keys: list[bytes]) -> _Step:
    verb = rng.choice(["get", "get", "set", "set", "clear", "range", "back", "clear_range"])
    return verb, rng.choice(keys), rng.choice(keys)


async def _do(rows: object, step: _Step) -> object:
    verb, one, other = step
    match verb:
        case "get":
            return await rows.get(one)  # type: ignore[attr-defined]
        case "set":
            rows.set(one, other)  # type: ignore[attr-defined]
        case "clear":
            rows.clear(one)  # type: ignore[attr-defined]
        case "clear_range":
            rows.clear_range(min(one, other), max(one, other))  # type: ignore[attr-defined]
        case _:
            page = await rows.get_range(min(one, other), None, limit=3, reverse=verb == "back")  # type: ignore[attr-defined]
            return page.items, page.more
    return None


@on_loop
async def test_what_a_dropped_part_read_counts_and_what_it_wrote_does_not() -> None:
    attempts: list[Attempted] = []
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:

        async def body(tx: Transaction) -> None:
            transaction_batch = TransactionBatch(tx, tx)
            dropped = transaction_batch.savepoint()
            await dropped.get(b"read by it")
            dropped.set(b"written by it", b"1")
            dropped.rollback()
            kept = transaction_batch.savepoint()
            kept.set(b"kept", b"1")
            kept.release()
            await transaction_batch.savepoint().get(b"kept")

        await kv.transact(body)
    assert attempts[-1].reads.points == (b"read by it",)
    assert attempts[-1].writes.points == (b"kept",)


@on_loop
async def test_a_failed_transaction_stays_failed_whatever_a_part_makes_of_it() -> None:
    async with MemoryEngine() as kv:

        async def body(tx: Transaction) -> None:
            transaction_batch = TransactionBatch(tx, tx)
            savepoint = transaction_batch.savepoint()
            for number in range(1 + 100_000 // 1000):
                savepoint.set(b"%d" % number, bytes(1 << 20))
            try:
                savepoint.release()
            except UsageError:
                pass
            transaction_batch.savepoint().release()

        with pytest.raises(UsageError, match="split it"):
            await kv.transact(body)
        assert await values(kv) == {}


@on_loop
async def test_a_bad_key_is_the_fault_of_one_part_only() -> None:
    async with MemoryEngine() as kv:

        async def body(tx: Transaction) -> None:
            transaction_batch = TransactionBatch(tx, tx)
            bad = transaction_batch.savepoint()
            with pytest.raises(UsageError, match="501 bytes"):
                await bad.get(bytes(MAX_KEY_BYTES + 1))
            with pytest.raises(UsageError, match="501 bytes"):
                bad.set(bytes(MAX_KEY_BYTES + 1), b"")
            good = transaction_batch.savepoint()
            good.set(b"a", b"1")
            good.release()

        await kv.transact(body)
        assert await values(kv) == {b"a": b"1"}


@on_loop
async def test_two_transactions_whose_parts_read_what_the_other_wrote_do_not_both_commit() -> None:
    async with MemoryEngine() as kv:
        await put(kv, a=b"0", b=b"0")
        first, second = Opened(kv), Opened(kv)
        for opened, read, write in ((first, b"a", b"b"), (second, b"b", b"a")):
            transaction = await opened.begin()
            savepoint = TransactionBatch(transaction, transaction).savepoint()
            await savepoint.get(read)
            savepoint.set(write, b"1")
            savepoint.release()
        await first.commit()
        with pytest.raises(Conflict):
            await second.commit()


class _Counting:
    """What a batch is made on, counting what is asked for singly."""

    def __init__(self, transaction: Transaction) -> None:
        self.asked: list[bytes] = []
        self._transaction = transaction
        self.get_many = transaction.get_many
        self.get_range = transaction.get_range

    async def get(self, key: bytes) -> bytes | None:
        self.asked.append(key)
        return await self._transaction.get(key)


@on_loop
async def test_what_a_part_clears_is_known_to_be_gone_and_the_rest_is_not_asked_for_again() -> None:
    keys = [bytes([letter]) for letter in b"abcdefgh"]
    async with MemoryEngine() as kv:
        await put(kv, **{key.decode(): key for key in keys})

        async def body(tx: Transaction) -> None:
            below = _Counting(tx)
            transaction_batch = TransactionBatch(below, tx)
            await transaction_batch.get_many([*keys, b"x"])
            first = transaction_batch.savepoint()
            first.clear_range(b"b", b"d")
            first.clear_range(b"g", None)
            first.set(b"c", b"new")
            first.release()
            second = transaction_batch.savepoint()
            seen = [await second.get(key) for key in [*keys, b"x"]]
            assert seen == [b"a", None, b"new", b"d", b"e", b"f", None, None, None]
            assert below.asked == []
            for key in keys:
                second.clear_range(key, key + b"\0")
            second.release()
            assert [await transaction_batch.savepoint().get(key) for key in keys] == [None] * len(keys)

        await kv.transact(body)
        assert await values(kv) == {}
