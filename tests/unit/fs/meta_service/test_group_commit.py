"""Many requests in one transaction: in order, each for itself, none lost whatever the store does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.kvstore.engines import values
from tests.support.later import FakeTimers
from tests.support.loops import on_loop

from fireflyer.base.errors import Busy, DataCorruption, NotFound, UsageError
from fireflyer.base.units import SECOND
from fireflyer.fs.service.meta.group_commit import (
    LAZY_NS,
    MAX_BATCH,
    MAX_LAZY,
    MAX_WAITING,
    CommitItem,
    CommitQueues,
    Reads,
)
from fireflyer.fs.service.meta.inode_ids import BATCH, Ids
from fireflyer.kvstore import Attempted, CommitFault, MemoryEngine, MemoryStore, Savepoint, TransactionTimeout
from fireflyer.kvstore.timing import LoopTiming


class _Count(CommitItem):
    """Adds one to `key`, and may raise afterwards."""

    def __init__(self, key: bytes, error: Exception | None = None, size: int = 0, *, lazy: bool = False) -> None:
        self.key = key
        self.error = error
        self.size = size
        self._lazy = lazy
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def carry_out(self, rows: Savepoint) -> int:
        number = int(await rows.get(self.key) or b"0") + 1
        rows.set(self.key, b"%d" % number)
        for at in range(self.size):
            rows.set(b"big %d" % at, bytes(1 << 20))
        if self.error is not None:
            raise self.error
        return number

    @property
    def lazy(self) -> bool:
        return self._lazy

    def done(self, outcome: Any) -> None:
        assert not self.outcome.done()
        if isinstance(outcome, BaseException):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


async def _ready(_: int) -> None: ...


def _queues(kv: MemoryEngine, width: int = 1) -> CommitQueues:
    return CommitQueues(kv, width=width, prepare=_ready)


@on_loop
async def test_what_waits_is_one_transaction_in_its_order() -> None:
    attempts: list[Attempted] = []
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        queues = _queues(kv)
        works = [_Count(b"a") for _ in range(100)]
        for work in works:
            queues.put("directory", work)
        assert await asyncio.gather(*(work.outcome for work in works)) == list(range(1, 101))
        assert len(attempts) == 1
        assert await values(kv) == {b"a": b"100"}
        assert queues.waiting == 0


@on_loop
async def test_who_is_refused_leaves_nothing_and_disturbs_nobody() -> None:
    async with MemoryEngine() as kv:
        queues = _queues(kv)
        works = [_Count(b"a"), _Count(b"a", NotFound("no")), _Count(b"a", DataCorruption("a row")), _Count(b"a")]
        works.append(_Count(b"a", RuntimeError("a bug")))
        for work in works:
            queues.put(1, work)
        found = await asyncio.gather(*(work.outcome for work in works), return_exceptions=True)
        assert found[0] == 1
        assert found[3] == 2
        assert [type(found[at]) for at in (1, 2, 4)] == [NotFound, DataCorruption, RuntimeError]
        assert await values(kv) == {b"a": b"2"}


@on_loop
async def test_conflicts_and_lost_connections_are_repeated_and_nothing_counts_twice() -> None:
    faults = iter([CommitFault.CONFLICT, CommitFault.DISCONNECTED, CommitFault.CONFLICT])
    async with MemoryEngine(faults=lambda: next(faults, CommitFault.NONE)) as kv:
        queues = _queues(kv)
        works = [_Count(b"a") for _ in range(5)]
        for work in works:
            queues.put(1, work)
        assert await asyncio.gather(*(work.outcome for work in works)) == [1, 2, 3, 4, 5]


@on_loop
async def test_one_that_is_too_large_fails_alone() -> None:
    async with MemoryEngine() as kv:
        queues = _queues(kv)
        works = [_Count(b"a"), _Count(b"a", size=20), _Count(b"a")]
        for work in works:
            queues.put(1, work)
        found = await asyncio.gather(*(work.outcome for work in works), return_exceptions=True)
        assert isinstance(found[1], UsageError)
        assert [found[0], found[2]] == [1, 2]


@on_loop
async def test_many_large_ones_are_divided_over_transactions() -> None:
    attempts: list[Attempted] = []
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        queues = _queues(kv)
        works = [_Count(b"a", size=5) for _ in range(6)]
        for work in works:
            queues.put(1, work)
        assert await asyncio.gather(*(work.outcome for work in works)) == [1, 2, 3, 4, 5, 6]
        assert len(attempts) == 3


@on_loop
async def test_lanes_run_side_by_side_and_conflicts_between_them_are_solved() -> None:
    async with MemoryEngine() as kv:
        queues = _queues(kv, width=8)
        works = [_Count(b"a") for _ in range(64)]
        for at, work in enumerate(works):
            queues.put(at, work)
        assert sorted(await asyncio.gather(*(work.outcome for work in works))) == list(range(1, 65))


@on_loop
async def test_too_many_are_refused_and_at_the_end_those_that_wait() -> None:
    async with MemoryEngine() as kv:
        queues = _queues(kv)
        works = [_Count(b"a") for _ in range(MAX_WAITING)]
        for work in works:
            queues.put(1, work)
        with pytest.raises(Busy):
            queues.put(1, _Count(b"a"))
        await queues.close()
        with pytest.raises(Busy, match="is stopping"):
            queues.put(1, _Count(b"a"))
        found = await asyncio.gather(*(work.outcome for work in works), return_exceptions=True)
        done = [one for one in found if isinstance(one, int)]
        assert all(isinstance(one, int | Busy) for one in found)
        assert done == list(range(1, len(done) + 1))
        assert await values(kv) == ({b"a": b"%d" % len(done)} if done else {})


async def turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@on_loop
async def test_lazy_works_go_in_their_order_with_the_next_transaction() -> None:
    attempts: list[Attempted] = []
    timers = FakeTimers()
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        queues = CommitQueues(kv, width=1, prepare=_ready, later=timers.later)
        lazy = [_Count(b"a", lazy=True) for _ in range(5)]
        for work in lazy:
            queues.put("file", work)
        await turns()
        assert attempts == []
        assert timers.delays_ns == [LAZY_NS]
        eager = _Count(b"a")
        queues.put("directory", eager)
        assert await eager.outcome == 6
        assert [work.outcome.result() for work in lazy] == [1, 2, 3, 4, 5]
        assert len(attempts) == 1
        assert timers.delays_ns == []
        await queues.close()


@on_loop
async def test_lazy_works_that_nothing_follows_have_their_own_transaction_when_the_time_has_come() -> None:
    attempts: list[Attempted] = []
    timers = FakeTimers()
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        queues = CommitQueues(kv, width=1, prepare=_ready, later=timers.later)
        for turn in range(2):
            first, second = _Count(b"a", lazy=True), _Count(b"a", lazy=True)
            queues.put(1, first)
            queues.put(1, second)
            timers.fire()
            assert await asyncio.gather(*(one.outcome for one in (first, second))) == [2 * turn + 1, 2 * turn + 2]
            assert len(attempts) == turn + 1
        assert timers.delays_ns == []


@on_loop
async def test_lazy_works_that_come_during_a_transaction_wait_for_the_next_one() -> None:
    attempts: list[Attempted] = []
    timers = FakeTimers()
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        queues = CommitQueues(kv, width=1, prepare=_ready, later=timers.later)
        lazy = _Count(b"a", lazy=True)

        class Putting(_Count):
            async def carry_out(self, rows: Savepoint) -> int:
                queues.put(1, lazy)
                return await super().carry_out(rows)

        first = Putting(b"a")
        queues.put(1, first)
        assert await first.outcome == 1
        await turns()
        assert len(attempts) == 1
        assert not lazy.outcome.done()
        second = _Count(b"a")
        queues.put(1, second)
        assert await asyncio.gather(*(one.outcome for one in (lazy, second))) == [2, 3]
        assert len(attempts) == 2


@on_loop
async def test_many_lazy_works_do_not_wait_and_none_is_left_at_the_end() -> None:
    attempts: list[Attempted] = []
    timers = FakeTimers()
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        queues = CommitQueues(kv, width=1, prepare=_ready, later=timers.later)
        works = [_Count(b"a", lazy=True) for _ in range(MAX_LAZY)]
        for work in works:
            queues.put(1, work)
        assert await asyncio.gather(*(work.outcome for work in works)) == list(range(1, MAX_LAZY + 1))
        assert len(attempts) == 1
        last = _Count(b"a", lazy=True)
        queues.put(1, last)
        await queues.close()
        with pytest.raises(Busy, match="is stopping"):
            await last.outcome
        assert timers.delays_ns == []


@on_loop
async def test_a_batch_that_is_too_long_takes_the_lazy_ones_behind_it_along() -> None:
    timers = FakeTimers()
    async with MemoryEngine() as kv:
        queues = CommitQueues(kv, width=1, prepare=_ready, later=timers.later)
        works = [_Count(b"a") for _ in range(MAX_BATCH)]
        works += [_Count(b"a", lazy=True) for _ in range(3)]
        for work in works:
            queues.put(1, work)
        assert await asyncio.gather(*(work.outcome for work in works)) == list(range(1, MAX_BATCH + 4))
        assert timers.delays_ns == []


class _Look(CommitItem):
    def __init__(self, look: Callable[[Any], Any]) -> None:
        self._look = look
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def carry_out(self, rows: Any) -> Any:
        return await self._look(rows)

    def done(self, outcome: Any) -> None:
        self.outcome.set_result(outcome)


@on_loop
async def test_reads_of_one_turn_share_a_snapshot_and_errors_are_each_ones_own() -> None:
    async with MemoryEngine() as kv:
        queues, reads = _queues(kv), Reads(kv)
        first = _Count(b"a")
        queues.put(1, first)
        await first.outcome

        async def fail(rows: Any) -> None:
            raise NotFound("no")

        works = [_Look(lambda rows: rows.get(b"a")), _Look(fail), _Look(lambda rows: rows.get(b"b"))]
        for work in works:
            reads.put(work)
        found = await asyncio.gather(*(work.outcome for work in works))
        assert found[0] == b"1"
        assert isinstance(found[1], NotFound)
        assert found[2] is None
        await reads.close()


class _Slow(_Count):
    """Takes longer than a transaction may."""

    async def carry_out(self, rows: Savepoint) -> int:
        await super().carry_out(rows)
        await asyncio.Event().wait()
        return 0


@on_loop
async def test_whoever_takes_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.kvstore.engine.ATTEMPT_LIMIT_NS", 500_000_000)
    async with MemoryEngine() as kv:
        queues = _queues(kv)
        works = [_Count(b"a"), _Slow(b"a"), _Count(b"a"), _Count(b"a")]
        for work in works:
            queues.put(1, work)
        found = await asyncio.gather(*(work.outcome for work in works), return_exceptions=True)
        assert isinstance(found[1], TransactionTimeout)
        assert [found[at] for at in (0, 2, 3)] == [1, 2, 3]
        reads = Reads(kv)

        async def forever(rows: Any) -> None:
            await asyncio.Event().wait()

        looks = [_Look(lambda rows: rows.get(b"a")), _Look(forever), _Look(lambda rows: rows.get(b"a"))]
        for look in looks:
            reads.put(look)
        told = await asyncio.gather(*(look.outcome for look in looks))
        assert isinstance(told[1], TransactionTimeout)
        assert [told[0], told[2]] == [b"3", b"3"]
        await reads.close()


class _Clock:
    now = 0

    def now_ns(self) -> int:
        return self.now


class _Busy(_Count):
    """Its time is over while it never waits: it reads what is in memory."""

    def __init__(self, key: bytes, clock: _Clock) -> None:
        super().__init__(key)
        self.clock = clock

    async def carry_out(self, rows: Savepoint) -> int:
        self.clock.now += 100 * SECOND
        return await super().carry_out(rows)


@on_loop
async def test_whoever_takes_too_long_without_waiting_fails_alone() -> None:
    clock = _Clock()
    async with MemoryEngine(waits=LoopTiming(clock=clock)) as kv:
        queues, reads = _queues(kv), Reads(kv)
        works = [_Count(b"a"), _Busy(b"b", clock), _Count(b"c"), _Count(b"d")]
        for work in works:
            queues.put(1, work)
        found = await asyncio.gather(*(work.outcome for work in works), return_exceptions=True)
        assert isinstance(found[1], TransactionTimeout)
        assert [found[at] for at in (0, 2, 3)] == [1, 1, 1]

        async def late(rows: Any) -> Any:
            clock.now += 100 * SECOND
            return await rows.get(b"c")

        looks = [_Look(lambda rows: rows.get(b"a")), _Look(late), _Look(lambda rows: rows.get(b"d"))]
        for look in looks:
            reads.put(look)
        told = await asyncio.gather(*(look.outcome for look in looks))
        assert isinstance(told[1], TransactionTimeout)
        assert [told[0], told[2]] == [b"1", b"1"]
        await reads.close()


@on_loop
async def test_reading_much_lets_the_rest_of_the_process_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.fs.service.meta.group_commit.MAX_HELD_NS", -1)
    monkeypatch.setattr("fireflyer.fs.service.meta.group_commit.MAX_ATTEMPT_NS", -1)
    turns: list[int] = []
    async with MemoryEngine() as kv:
        reads = Reads(kv)

        async def turn(rows: Any) -> int:
            return len(turns)

        looks = [_Look(turn) for _ in range(8)]
        for look in looks:
            reads.put(look)
        while not looks[-1].outcome.done():
            turns.append(0)
            await asyncio.sleep(0)
        found = [look.outcome.result() for look in looks]
        assert found == sorted(set(found))
        await reads.close()


@on_loop
async def test_ids_are_given_once_whoever_gives_them() -> None:
    store = MemoryStore()
    async with MemoryEngine(store) as one, MemoryEngine(store) as other:
        all_ids = [Ids(one), Ids(other), Ids(one)]
        given: list[int] = []
        for turn in range(3 * BATCH // 100):
            ids = all_ids[turn % 3]
            await asyncio.gather(ids.prepare(100), ids.prepare(3))
            given += [ids.take() for _ in range(100)]
        assert len(set(given)) == len(given)
        assert min(given) > 1
        for _ in range(all_ids[0].left):
            all_ids[0].take()
        with pytest.raises(Busy, match="try again"):
            all_ids[0].take()
