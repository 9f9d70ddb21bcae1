"""A transactional store in the seeded world: serializable, slow at times, and silent about some of its commits."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core import transact
from fireflyer.fs.core.transact import Committed, Failed, Outcome, Refused, Transact, Unknown
from fireflyer.sim import World

__all__ = ["SimStore", "StoreFaults", "finished", "rows_of"]

T = TypeVar("T")


class StoreFaults(NamedTuple):
    """Chances of a transaction, while there are faults."""

    slow: float = 0.05
    slow_ns: int = 3 * SECOND
    failed: float = 0.03
    unknown: float = 0.06
    """Of which a third was committed, a third was not, and a third will be, later."""


class _Page(NamedTuple):
    items: Sequence[tuple[bytes, bytes]]
    more: bool


class _Rows:
    """One transaction: reads see the writes before them, which are applied at the end."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows = rows
        self.writes: dict[bytes, bytes | None] = {}

    async def get(self, key: bytes) -> bytes | None:
        return self.writes[key] if key in self.writes else self._rows.get(key)

    async def get_range(self, begin: bytes, end: bytes | None, *, limit: int) -> _Page:
        keys = sorted(self._rows)
        last = len(keys) if end is None else bisect.bisect_left(keys, end)
        found = keys[bisect.bisect_left(keys, begin) : last]
        page = min(limit, 2)  # so that whoever reads a range must turn pages
        return _Page([(key, self._rows[key]) for key in found[:page]], len(found) > page)

    def set(self, key: bytes, value: bytes) -> None:
        self.writes[key] = value

    def clear(self, key: bytes) -> None:
        self.writes[key] = None

    def apply(self) -> None:
        for key, value in self.writes.items():
            if value is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = value


def rows_of(rows: dict[bytes, bytes]) -> _Rows:
    """A transaction on these rows; `apply` commits it."""
    return _Rows(rows)


class SimStore:
    """`perform` is a step of `MachineDriver`; `on_commit(order, before)` is called at the instant of each commit."""

    def __init__(self, world: World, on_commit: Callable[[Transact, dict[bytes, bytes]], None]) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.faults: StoreFaults | None = None
        self.cut: dict[str, bool] = {}
        """Who cannot reach it now."""
        self.commits = 0
        self._world = world
        self._random = world.fork_random("store")
        self._on_commit = on_commit

    def perform(self, name: str, order: Transact) -> Generator[int | None, None, Outcome]:
        chance, faults = self._random, self.faults
        yield chance.randrange(MS, 10 * MS)
        if self.cut.get(name, False):
            yield chance.randrange(SECOND // 2, 2 * SECOND)
            return Failed(order.number, "the store cannot be reached")
        if faults is None:
            return self._run(order)
        if chance.random() < faults.slow:
            yield chance.randrange(faults.slow_ns)
        fate = chance.random()
        if fate < faults.failed:
            return Failed(order.number, "too many conflicts")
        if fate < faults.failed + faults.unknown:
            way = chance.randrange(3)
            if way == 0:
                self._run(order)
            elif way == 1:
                self._world.call_after(chance.randrange(4 * SECOND), lambda: self._late(order))
            return Unknown(order.number, "the connection broke")
        outcome = self._run(order)
        if chance.random() < faults.slow:
            yield chance.randrange(faults.slow_ns)
        return outcome

    def _late(self, order: Transact) -> None:
        self._world.record("late", order.number)
        self._run(order)

    def _run(self, order: Transact) -> Committed | Refused:
        rows = _Rows(self.rows)
        outcome = finished(transact.carry_out(order, rows))
        if rows.writes and isinstance(outcome, Committed):
            before = dict(self.rows)
            rows.apply()
            self.commits += 1
            self._world.record("commit", order.number, *self.rows)
            self._on_commit(order, before)
        return outcome


def finished(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the transaction waits for something")
