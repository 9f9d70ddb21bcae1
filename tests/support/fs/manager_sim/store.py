"""The memory engine as a database that the managers of a seeded world share: slow at times, silent about some commits.

A transaction takes several steps, so others commit between its reads and its own commit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

from fireflyer.base.units import SECOND
from fireflyer.fs.core.rows import LEASE_KEY
from fireflyer.kvstore import CommitUnknown, Conflict, KeyRange, MemoryEngine, MemoryStore, SteppedTiming, steps
from fireflyer.kvstore.core.conflicts import Conflicts
from fireflyer.kvstore.core.fenced import Failed, Outcome, Transact
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.fenced_driver import transact_on
from fireflyer.sim import World

__all__ = ["SimStore", "StoreFaults", "rows_in", "store_of"]

OnCommit = Callable[[dict[bytes, bytes], dict[bytes, bytes | None]], None]
"""What was there before, and what is written; called at the instant of each commit."""
TIMEOUT_NS = 4 * SECOND


class StoreFaults(NamedTuple):
    """Chances of a transaction, while there are faults."""

    slow: float = 0.05
    slow_ns: int = 3 * SECOND
    failed: float = 0.03
    unknown: float = 0.06
    """Of which a third is committed, a third is not, and a third will be, later."""


class _Store(MemoryStore):
    """Tells of each commit at its instant; leaves some open."""

    def __init__(self, world: World, on_commit: OnCommit) -> None:
        super().__init__()
        self.rows: dict[bytes, bytes] = {}
        self.unknown = 0.0
        self._world = world
        self._random = world.fork_random("commits")
        self._on_commit = on_commit

    def commit(self, read_version: int, reads: Conflicts, mutations: Mutations) -> int:
        if mutations.empty or self._random.random() >= self.unknown:
            return self._commit(read_version, reads, mutations)
        way = self._random.randrange(3)
        if way == 0:
            self._commit(read_version, reads, mutations)
        elif way == 1:
            delay_ns = self._random.randrange(4 * SECOND)
            self._world.call_after(delay_ns, lambda: self._late(read_version, reads, mutations))
        raise CommitUnknown("the connection broke")

    def _late(self, read_version: int, reads: Conflicts, mutations: Mutations) -> None:
        try:
            self._commit(read_version, reads, mutations)
        except Conflict:
            self._world.record("too late")

    def _commit(self, read_version: int, reads: Conflicts, mutations: Mutations) -> int:
        version = super().commit(read_version, reads, mutations)
        if not mutations.empty:
            before = dict(self.rows)
            for key, value in mutations.writes:
                if value is None:
                    self.rows.pop(key, None)
                else:
                    self.rows[key] = value
            self._world.record("commit", version, *(key for key, _ in mutations.writes))
            written: dict[bytes, bytes | None] = dict(mutations.writes)
            self._on_commit(before, written)
        return version


class SimStore:
    """`perform` is a step of `MachineDriver`."""

    def __init__(self, world: World, on_commit: OnCommit) -> None:
        self.faults: StoreFaults | None = None
        self.cut: dict[str, bool] = {}
        """Who cannot reach it now."""
        self._random = world.fork_random("store")
        self._world, self._on_commit = world, on_commit
        self._open(_Store(world, on_commit))

    @property
    def contents(self) -> dict[bytes, bytes]:
        """What is committed."""
        return self._store.rows

    def replace(self, rows: dict[bytes, bytes]) -> None:
        """With another store; what is under way comes to the old one."""
        self._open(_Store(self._world, self._on_commit))
        self._store.commit(0, Conflicts(), Mutations(writes=tuple(sorted(rows.items()))))

    def _open(self, store: _Store) -> None:
        self._store = store
        self._engine = MemoryEngine(store, waits=SteppedTiming(lambda: self._world.now_ns, self._random.randrange))

    def perform(self, name: str, order: Transact) -> Generator[int | None, None, Outcome]:
        rng, faults = self._random, self.faults
        self._store.unknown = faults.unknown if faults is not None else 0.0
        if self.cut.get(name, False):
            yield rng.randrange(SECOND // 2, 2 * SECOND)
            return Failed(order.number, "the store cannot be reached")
        if faults is None:
            return (
                yield from steps(lambda: transact_on(self._engine, order, lease_key=LEASE_KEY, timeout_ns=TIMEOUT_NS))
            )
        if rng.random() < faults.slow:
            yield rng.randrange(faults.slow_ns)
        if rng.random() < faults.failed:
            return Failed(order.number, "too many conflicts")
        outcome = yield from steps(lambda: transact_on(self._engine, order, lease_key=LEASE_KEY, timeout_ns=TIMEOUT_NS))
        if rng.random() < faults.slow:
            yield rng.randrange(faults.slow_ns)
        return outcome


def store_of(rows: dict[bytes, bytes]) -> MemoryStore:
    store = MemoryStore()
    store.commit(0, Conflicts(), Mutations(writes=tuple(sorted(rows.items()))))
    return store


def rows_in(store: MemoryStore) -> dict[bytes, bytes]:
    return dict(store.scan(store.version, KeyRange(b"", None)).items)
