"""Many requests in one transaction: in order, each for itself, none lost whatever the store does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.kvstores import values
from tests.support.loops import on_loop

from fireflyer.base.errors import Busy, DataCorruption, NotFound, UsageError
from fireflyer.fs.service.meta_ids import BATCH, Ids
from fireflyer.fs.service.meta_lanes import MAX_WAITING, Lanes, Reads, Work
from fireflyer.kvstore import Attempted, CommitFault, MemoryEngine, MemoryStore, Part


class _Count(Work):
    """Adds one to `key`, and may raise afterwards."""

    def __init__(self, key: bytes, error: Exception | None = None, size: int = 0) -> None:
        self.key = key
        self.error = error
        self.size = size
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def carry_out(self, rows: Part) -> int:
        number = int(await rows.get(self.key) or b"0") + 1
        rows.set(self.key, b"%d" % number)
        for at in range(self.size):
            rows.set(b"big %d" % at, bytes(1 << 20))
        if self.error is not None:
            raise self.error
        return number

    def done(self, outcome: Any) -> None:
        assert not self.outcome.done()
        if isinstance(outcome, BaseException):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


async def _ready(_: int) -> None: ...


def _lanes(kv: MemoryEngine, width: int = 1) -> Lanes:
    return Lanes(kv, width=width, prepare=_ready)


@on_loop
async def test_what_waits_is_one_transaction_in_its_order() -> None:
    attempts: list[Attempted] = []
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        lanes = _lanes(kv)
        works = [_Count(b"a") for _ in range(100)]
        for work in works:
            lanes.put("directory", work)
        assert await asyncio.gather(*(work.outcome for work in works)) == list(range(1, 101))
        assert len(attempts) == 1
        assert await values(kv) == {b"a": b"100"}
        assert lanes.waiting == 0


@on_loop
async def test_who_is_refused_leaves_nothing_and_disturbs_nobody() -> None:
    async with MemoryEngine() as kv:
        lanes = _lanes(kv)
        works = [_Count(b"a"), _Count(b"a", NotFound("no")), _Count(b"a", DataCorruption("a row")), _Count(b"a")]
        works.append(_Count(b"a", RuntimeError("a bug")))
        for work in works:
            lanes.put(1, work)
        found = await asyncio.gather(*(work.outcome for work in works), return_exceptions=True)
        assert found[0] == 1
        assert found[3] == 2
        assert [type(found[at]) for at in (1, 2, 4)] == [NotFound, DataCorruption, RuntimeError]
        assert await values(kv) == {b"a": b"2"}


@on_loop
async def test_conflicts_and_lost_connections_are_repeated_and_nothing_counts_twice() -> None:
    faults = iter([CommitFault.CONFLICT, CommitFault.DISCONNECTED, CommitFault.CONFLICT])
    async with MemoryEngine(faults=lambda: next(faults, CommitFault.NONE)) as kv:
        lanes = _lanes(kv)
        works = [_Count(b"a") for _ in range(5)]
        for work in works:
            lanes.put(1, work)
        assert await asyncio.gather(*(work.outcome for work in works)) == [1, 2, 3, 4, 5]


@on_loop
async def test_one_that_is_too_large_fails_alone() -> None:
    async with MemoryEngine() as kv:
        lanes = _lanes(kv)
        works = [_Count(b"a"), _Count(b"a", size=20), _Count(b"a")]
        for work in works:
            lanes.put(1, work)
        found = await asyncio.gather(*(work.outcome for work in works), return_exceptions=True)
        assert isinstance(found[1], UsageError)
        assert [found[0], found[2]] == [1, 2]


@on_loop
async def test_many_large_ones_are_divided_over_transactions() -> None:
    attempts: list[Attempted] = []
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        lanes = _lanes(kv)
        works = [_Count(b"a", size=5) for _ in range(6)]
        for work in works:
            lanes.put(1, work)
        assert await asyncio.gather(*(work.outcome for work in works)) == [1, 2, 3, 4, 5, 6]
        assert len(attempts) == 3


@on_loop
async def test_lanes_run_side_by_side_and_conflicts_between_them_are_solved() -> None:
    async with MemoryEngine() as kv:
        lanes = _lanes(kv, width=8)
        works = [_Count(b"a") for _ in range(64)]
        for at, work in enumerate(works):
            lanes.put(at, work)
        assert sorted(await asyncio.gather(*(work.outcome for work in works))) == list(range(1, 65))


@on_loop
async def test_too_many_are_refused_and_at_the_end_those_that_wait() -> None:
    async with MemoryEngine() as kv:
        lanes = _lanes(kv)
        works = [_Count(b"a") for _ in range(MAX_WAITING)]
        for work in works:
            lanes.put(1, work)
        with pytest.raises(Busy):
            lanes.put(1, _Count(b"a"))
        await lanes.close()
        with pytest.raises(Busy, match="ends"):
            lanes.put(1, _Count(b"a"))
        found = await asyncio.gather(*(work.outcome for work in works), return_exceptions=True)
        done = [one for one in found if isinstance(one, int)]
        assert all(isinstance(one, int | Busy) for one in found)
        assert done == list(range(1, len(done) + 1))
        assert await values(kv) == ({b"a": b"%d" % len(done)} if done else {})


class _Look(Work):
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
        lanes, reads = _lanes(kv), Reads(kv)
        first = _Count(b"a")
        lanes.put(1, first)
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
        with pytest.raises(Busy, match="ask again"):
            all_ids[0].take()
