"""The tables of the history in a dictionary, and a copier that is slow, killed, and cut off from them."""

from __future__ import annotations

from typing import Any, Protocol

from tests.support.platform.store import SimStore

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.platform.machine import PlatformMachine
from fireflyer.cluster.core.platform.messages import Copied
from fireflyer.cluster.core.platform.store.history import HistoryRow, decode_history
from fireflyer.cluster.core.platform.store.rows import Account, outbox_key
from fireflyer.cluster.core.platform.store.tables import PARTS, KnownTask, Record, Stamp, fold
from fireflyer.sim import World

__all__ = ["MemoryTables", "SimCopier"]

BATCH = 40


class MemoryTables:
    """What `history.writing` does to the tables of a database."""

    def __init__(self) -> None:
        self.slow = True
        """The database answers late, or not at all."""
        self.tasks: dict[int, Record] = {}
        self.runs: dict[tuple[int, int], Record] = {}
        self.parts: dict[tuple[int, int, str], int] = {}
        self.node_states: dict[tuple[str, int], Record] = {}
        self.audit: dict[str, Record] = {}
        self.totals: dict[tuple[str, int], Record] = {}

    def copy(self, cluster: str, rows: list[tuple[int, HistoryRow]]) -> None:
        tasks = {
            task: KnownTask(_stamp(row), Account(**{part: row[part] for part in PARTS}))
            for task, row in self.tasks.items()
        }
        batch = fold(cluster, rows, tasks, {key: _stamp(row) for key, row in self.runs.items()})
        for task in batch.begun_again:
            for key in [key for key in self.parts if key[0] == task]:
                del self.parts[key]
        self.tasks.update(batch.tasks)
        self.runs.update(batch.runs)
        for key, ns in batch.parts.items():
            self.parts[key] = self.parts.get(key, 0) + ns
        self.node_states.update({(row["cluster"], row["change"]): row for row in batch.node_states})
        self.audit.update({row["entry"]: row for row in batch.audit})
        self.totals.update({(row["cluster"], row["change"]): row for row in batch.totals})

    def parts_of(self, task: int) -> int:
        return sum(ns for (of, _, _), ns in self.parts.items() if of == task)

    def contents(self) -> dict[str, Any]:
        return {name: rows for name, rows in vars(self).items() if isinstance(rows, dict)}


def _stamp(row: Record) -> Stamp:
    return Stamp(row["cluster"], row["change"])


class Host(Protocol):
    """Of a manager."""

    machine: PlatformMachine
    name: str

    @property
    def now_ns(self) -> int: ...

    def acts(self) -> bool: ...

    def copied(self, event: Copied) -> None: ...


class SimCopier:
    """Of one process of a manager, as `history.copier` does it. What the database got is carried out, also when the
    manager was killed meanwhile, up to seconds later."""

    def __init__(self, world: World, store: SimStore, tables: MemoryTables, host: Host) -> None:
        self._world, self._store, self._tables, self._host = world, store, tables, host
        self._random = world.fork_random(f"copier of {host.name}")
        self._busy = False
        self._done: tuple[str, int] = ("", 0)

    def look(self) -> None:
        if self._busy or not self._host.acts() or self._store.cut.get(self._host.name, False):
            return
        cluster, first, last = self._host.machine.outbox(self._host.now_ns)
        begin = max(first, self._done[1] if self._done[0] == cluster else 0)
        rows: list[tuple[int, HistoryRow]] = []
        for number in range(begin, min(last, begin + BATCH)):
            value = self._store.rows.get(outbox_key(number))
            if value is None:
                return  # another one leads, and has cleared it
            rows.append((number, decode_history(outbox_key(number), value)))
        if not rows:
            if first < begin:
                self._host.copied(Copied(begin))
            return
        self._busy = True
        machine = self._host.machine

        def answered() -> None:
            self._busy = False
            if self._host.machine is machine and lost:
                return
            if self._host.machine is machine and self._host.acts():
                self._done = cluster, rows[-1][0] + 1
                self._host.copied(Copied(rows[-1][0] + 1))

        def arrived() -> None:
            if not lost:
                self._tables.copy(cluster, rows)
            self._world.call_after(self._delay_ns(), answered)

        lost = self._random.random() < (0.2 if self._tables.slow else 0.0)
        """The database is away."""
        self._world.call_after(self._delay_ns(), arrived)

    def _delay_ns(self) -> int:
        longest_ns = self._random.choice([20 * MS, 500 * MS, 8 * SECOND]) if self._tables.slow else 20 * MS
        return self._random.randrange(longest_ns)
