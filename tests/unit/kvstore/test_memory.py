"""What only the engine in memory shows: exact conflict sets, injected faults, and running in the simulated world."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence

import pytest
from tests.support.kvstore.engines import Opened, put, values
from tests.support.loops import on_loop

from fireflyer import kvstore
from fireflyer.base.errors import PermanentError, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.kvstore import (
    Attempted,
    CommitFault,
    CommitUnknown,
    Conflict,
    Disconnected,
    KeyRange,
    LoopTiming,
    MemoryEngine,
    MemoryStore,
    Page,
    SteppedTiming,
    Transaction,
    TransactionTimeout,
    steps,
    transact_once,
)
from fireflyer.kvstore.core.conflicts import Conflicts
from fireflyer.kvstore.core.keys import EVERYTHING, MAX_ENTRIES
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.core.resolver import Resolver
from fireflyer.kvstore.core.timing import MAX_BACKOFF_NS, MAX_CONFLICTS, backoff_ns
from fireflyer.kvstore.engine import AttemptingEngine
from fireflyer.kvstore.transaction import Attempt, Source
from fireflyer.sim.world import SimNode, World


@on_loop
async def test_the_exact_conflict_set_of_a_transaction_can_be_asserted() -> None:
    attempts: list[Attempted] = []
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        await put(kv, a=b"1", b=b"1", c=b"1", d=b"1")

        async def body(tx: Transaction) -> None:
            await tx.get(b"a")
            await tx.get(b"missing")
            await tx.snapshot.get(b"b")
            await tx.get_range(b"b", b"z", limit=2)
            await tx.get_range(b"x", b"z", reverse=True)
            tx.add_read_conflict(b"lock")
            tx.set(b"w", b"1")
            assert await tx.get(b"w") == b"1"
            tx.clear_range(b"t", b"v")
            tx.clear(b"u")

        await kv.transact(body)
    last = attempts[-1]
    assert last.reads == Conflicts((b"a", b"lock", b"missing"), (KeyRange(b"b", b"c\0"), KeyRange(b"x", b"z")))
    assert last.writes == Conflicts((b"w",), (KeyRange(b"t", b"v"),))
    assert (last.read_version, last.version, last.refusal) == (1, 2, None)


@on_loop
async def test_a_backward_range_cut_by_its_limit_conflicts_from_its_last_item_on() -> None:
    attempts: list[Attempted] = []
    async with MemoryEngine(MemoryStore(attempts=attempts.append)) as kv:
        await put(kv, a=b"1", b=b"1", c=b"1")
        async with kv.transaction() as tx:
            assert (await tx.get_range(b"", b"x", limit=2, reverse=True)).more
            tx.set(b"w", b"")
    assert attempts[-1].reads.ranges == (KeyRange(b"b", b"x"),)


@on_loop
async def test_a_refusal_says_which_key() -> None:
    async with MemoryEngine() as kv:
        side = Opened(kv)
        tx = await side.begin()
        tx.set(b"w", await tx.get(b"a") or b"")
        await put(kv, a=b"1")
        with pytest.raises(Conflict, match=r"b'a' was written since; run it again"):
            await side.commit()


@on_loop
async def test_a_transaction_older_than_the_window_is_refused_as_transient() -> None:
    async with MemoryEngine(MemoryStore(window_entries=3)) as kv:
        side, reading = Opened(kv), Opened(kv)
        tx, reader = await side.begin(), await reading.begin()
        await tx.get(b"a")
        tx.set(b"w", b"")
        for i in range(5):
            await put(kv, **{f"k{i}": b""})
        with pytest.raises(Conflict, match="conflicts are known from"):
            await side.commit()
        with pytest.raises(Conflict, match="no longer kept"):
            await reader.get(b"a")
        await reading.abandon()


def test_history_outside_the_window_is_forgotten() -> None:
    store = MemoryStore(window_entries=10)
    for i in range(1000):
        store.commit(store.version, Conflicts(), Mutations(writes=((b"%d" % (i % 3), b"v" if i % 2 else None),)))
    for i in range(20):
        store.commit(store.version, Conflicts(), Mutations(writes=((b"x", None), (b"%d" % (i % 3), None))))
    kept = sum(len(history) for history in store._histories.values())
    assert kept <= 14
    assert store.scan(store.version, EVERYTHING).items == []


class _Faults:
    def __init__(self, *faults: CommitFault) -> None:
        self._left = list(faults)

    def __call__(self) -> CommitFault:
        return self._left.pop(0) if self._left else CommitFault.NONE


async def _take(tx: Transaction) -> bytes:
    number = b"%d" % (int(await tx.get(b"counter") or b"0") + 1)
    tx.set(b"counter", number)
    return number


@pytest.mark.parametrize("fault", [CommitFault.UNKNOWN_DONE, CommitFault.UNKNOWN_LOST])
@on_loop
async def test_an_unknown_outcome_is_raised_unless_repeating_is_harmless(fault: CommitFault) -> None:
    async with MemoryEngine(faults=_Faults(fault)) as kv:
        with pytest.raises(CommitUnknown):
            await kv.transact(_take)
        assert await values(kv) == ({b"counter": b"1"} if fault is CommitFault.UNKNOWN_DONE else {})
    async with MemoryEngine(faults=_Faults(fault)) as kv:
        await put(kv, a=b"1")
        assert await values(kv) == {b"a": b"1"}


@pytest.mark.parametrize("fault", [CommitFault.UNKNOWN_DONE, CommitFault.UNKNOWN_LOST])
@on_loop
async def test_a_marker_makes_it_once_whatever_became_of_unknown_commits(fault: CommitFault) -> None:
    async with MemoryEngine(faults=_Faults(fault, CommitFault.DISCONNECTED, fault)) as kv:
        for expected in (b"1", b"2"):
            assert await transact_once(kv, _take, marker=b"marker " + expected) == expected
        assert (await values(kv))[b"counter"] == b"2"


@on_loop
async def test_doubt_is_not_forgotten_when_later_attempts_fail_for_sure() -> None:
    faults = _Faults(CommitFault.UNKNOWN_LOST, *[CommitFault.CONFLICT] * MAX_CONFLICTS)
    async with MemoryEngine(faults=faults) as kv:
        with pytest.raises(CommitUnknown, match="one of the attempts may be committed"):
            await kv.transact(_take, idempotent=True, timeout_ns=SECOND // 5)


@pytest.mark.parametrize("fault", [CommitFault.CONFLICT, CommitFault.DISCONNECTED])
@on_loop
async def test_conflicts_and_broken_connections_are_retried(fault: CommitFault) -> None:
    async with MemoryEngine(faults=_Faults(fault, fault, fault)) as kv:
        assert await kv.transact(_take) == b"1"


@pytest.mark.parametrize(
    ("fault", "error"), [(CommitFault.CONFLICT, Conflict), (CommitFault.DISCONNECTED, Disconnected)]
)
def test_who_always_collides_gives_up_and_who_finds_no_server_tries_until_the_deadline(
    fault: CommitFault, error: type[Exception]
) -> None:
    world = World(1)
    waits = SteppedTiming(lambda: world.now_ns, world.random.randrange)
    kv = MemoryEngine(faults=lambda: fault, waits=waits)

    def run() -> None:
        for delay_ns in steps(lambda: kv.transact(_take, timeout_ns=100 * SECOND)):
            world.now_ns += delay_ns or 0

    with pytest.raises(error, match=r"given up after \d+ attempts") as raised:
        run()
    collides = fault is CommitFault.CONFLICT
    assert (f"after {MAX_CONFLICTS} attempts" in str(raised.value)) == collides
    assert (world.now_ns > 99 * SECOND) == (not collides)


def test_backoff_is_random_and_bounded() -> None:
    delays = [[backoff_ns(attempt, random.Random(seed).randrange) for seed in range(50)] for attempt in (1, 5, 1000)]
    for each in delays:
        assert len(set(each)) > 25
    assert max(delays[0]) <= 2 * MS
    assert max(delays[1]) <= 32 * MS
    assert 0 < min(delays[2]) < max(delays[2]) <= MAX_BACKOFF_NS


def test_the_same_bodies_run_in_the_simulated_world_and_a_seed_replays_them() -> None:
    """Several nodes count in one store, crash, begin anew, and their commits fail in every way: each request counts
    exactly once."""

    def history(seed: int) -> tuple[bytes, dict[bytes, bytes]]:
        world = World(seed)
        store = MemoryStore()

        def boot(node: SimNode) -> None:
            rng = world.fork_random(f"{node.name} {node.incarnation}")
            faults = list(CommitFault)
            waits = SteppedTiming(node.clock.now_ns, rng.randrange)
            kv = MemoryEngine(store, waits=waits, faults=lambda: rng.choice(faults))

            async def work() -> None:
                for request in range(10):
                    marker = f"done/{node.name}/{request}".encode()
                    number = await transact_once(kv, _take, marker=marker, timeout_ns=3600 * SECOND)
                    world.record("took", node.name, number)

            node.spawn(steps(work))
            if node.incarnation < 5:
                node.after(rng.randrange(30 * MS), node.restart)

        for name in ("a", "b", "c"):
            world.node(name, boot)
        world.run()
        return world.trace.to_bytes(), dict(store.scan(store.version, EVERYTHING).items)

    for seed in range(10):
        trace, state = history(seed)
        assert trace.count(b" crash ") == 12
        assert state.pop(b"counter") == b"30"
        assert sorted(map(int, state.values())) == list(range(1, 31))
        assert history(seed)[0] == trace


def test_a_deadline_in_the_simulated_world_is_found_at_the_next_operation() -> None:
    world = World(1)
    kv = MemoryEngine(waits=SteppedTiming(lambda: world.now_ns, world.random.randrange))

    async def body(tx: Transaction) -> None:
        tx.set(b"a", b"1")
        world.now_ns += SECOND
        await tx.get(b"b")

    with pytest.raises(TransactionTimeout, match="was not committed"):
        list(steps(lambda: kv.transact(body, timeout_ns=MS)))


@on_loop
async def test_the_number_of_entries_of_a_transaction_is_bounded() -> None:
    async with MemoryEngine() as kv:
        source = await kv._begin(read_only=False)
        attempt = Attempt(source, lambda: 0, 1, read_only=False)
        for i in range(MAX_ENTRIES):
            attempt.clear(b"%d" % i)
        with pytest.raises(UsageError, match=f"more than {MAX_ENTRIES} entries; split it"):
            attempt.clear(b"one more")
        with pytest.raises(UsageError, match="split it"):
            await attempt.commit()


@pytest.mark.parametrize(
    "url", ["", "memory", "memory:x", "embedded:relative", "embedded:", "mysql://root:hunter2@host/x", "postgresql:x"]
)
@on_loop
async def test_a_url_that_is_not_understood_is_named_without_its_password(url: str) -> None:
    with pytest.raises(UsageError, match=r"write memory:, embedded:/absolute/path or postgresql://") as caught:
        await kvstore.open(url)
    assert "hunter2" not in str(caught.value)


@on_loop
async def test_a_missing_driver_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    monkeypatch.delitem(sys.modules, "fireflyer.kvstore.postgres", raising=False)
    with pytest.raises(PermanentError, match=r"pip install 'fireflyer\[postgres\]'"):
        await kvstore.open("postgresql://nobody@nowhere/x")


def test_a_key_written_again_is_known_although_its_first_write_is_forgotten() -> None:
    resolver = Resolver(0, max_entries=2)
    for version, key in enumerate((b"a", b"a", b"b"), 1):
        resolver.add(version, Conflicts((key,)))
    assert resolver.oldest_version == 1
    assert resolver.refusal(1, Conflicts((b"a",))) == "b'a' was written since"
    assert resolver.refusal(2, Conflicts((b"a",))) is None


class _SlowToEnd(Source):
    """Commits at once and takes its time to give back what it used."""

    commit_sent = False

    async def get(self, key: bytes) -> bytes | None:
        return None

    async def scan(self, wanted: KeyRange, limit: int, *, reverse: bool) -> Page:
        return Page([], False)

    async def conflict_with(self, conflicts: Conflicts) -> None: ...

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [None] * len(keys)

    async def commit(self, reads: Conflicts, mutations: Mutations) -> None: ...

    async def end(self, error: BaseException | None) -> None:
        if error is None:
            await asyncio.Event().wait()


class _SlowEngine(AttemptingEngine):
    async def close(self) -> None: ...

    async def _begin(self, *, read_only: bool) -> Source:
        return _SlowToEnd()


@on_loop
async def test_a_deadline_after_the_commit_was_answered_takes_nothing_back() -> None:
    kv = _SlowEngine(LoopTiming())
    assert await kv.transact(_take, timeout_ns=200 * MS) == b"1"
    async with kv.transaction(timeout_ns=200 * MS) as tx:
        tx.set(b"a", b"1")
