"""A key-value store of one instant per transaction, for the platform's managers: `carry_out` on a dictionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.messages import LEASE_KEY
from fireflyer.kvstore.core.fenced import (
    Committed,
    Failed,
    Outcome,
    OutcomeUnknown,
    PreconditionFailed,
    Transact,
    carry_out,
)
from fireflyer.sim import World

__all__ = ["SimStore", "StoreFaults", "carried_out"]

Item = tuple[bytes, bytes]


class _Page(NamedTuple):
    items: list[Item]
    more: bool


class _Rows:
    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows = rows

    async def get(self, key: bytes) -> bytes | None:
        return self._rows.get(key)

    async def get_range(self, begin: bytes, end: bytes | None, *, limit: int) -> _Page:
        keys = sorted(key for key in self._rows if begin <= key and (end is None or key < end))
        return _Page([(key, self._rows[key]) for key in keys[:limit]], len(keys) > limit)

    def set(self, key: bytes, value: bytes) -> None:
        self._rows[key] = value

    def clear(self, key: bytes) -> None:
        self._rows.pop(key, None)


def carried_out(rows: dict[bytes, bytes], order: Transact) -> Committed | PreconditionFailed:
    work = carry_out(order, _Rows(rows), LEASE_KEY)
    try:
        work.send(None)
    except StopIteration as end:
        result: Committed | PreconditionFailed = end.value
        return result
    raise AssertionError("a transaction on a dictionary waits for something")


class StoreFaults(NamedTuple):
    """Chances of a transaction."""

    slow: float = 0.05
    slow_ns: int = 3 * SECOND
    failed: float = 0.03
    unknown: float = 0.06
    """Of which a third is committed, a third is not, and a third will be, later."""


class SimStore:
    """Shared by the managers of a world. `told` gets one outcome for each order."""

    def __init__(self, world: World, on_commit: Callable[[Transact], None]) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.faults: StoreFaults | None = None
        self.cut: dict[str, bool] = {}
        """Who cannot reach it now."""
        self._world, self._random = world, world.fork_random("store")
        self._on_commit = on_commit

    def perform(self, name: str, order: Transact, told: Callable[[Outcome], None]) -> None:
        rng, faults = self._random, self.faults or StoreFaults(0.0, 1, 0.0, 0.0)
        before_ns = rng.randrange(SECOND // 500) + (rng.randrange(faults.slow_ns) if rng.random() < faults.slow else 0)
        after_ns = rng.randrange(SECOND // 500) + (rng.randrange(faults.slow_ns) if rng.random() < faults.slow else 0)

        def begin() -> None:
            if self.cut.get(name, False) or rng.random() < faults.failed:
                outcome: Outcome = Failed(order.number, "the store cannot be reached")
            elif order.write and rng.random() < faults.unknown:
                outcome = self._unknown(order)
            else:
                outcome = self._commit(order)
            self._world.call_after(after_ns, lambda: told(outcome))

        self._world.call_after(before_ns, begin)

    def _unknown(self, order: Transact) -> Outcome:
        def late() -> None:
            self._commit(order)

        way = self._random.randrange(3)
        if way == 0:
            self._commit(order)
        elif way == 1:
            self._world.call_after(self._random.randrange(4 * SECOND), late)
        return OutcomeUnknown(order.number, "the connection broke")

    def _commit(self, order: Transact) -> Committed | PreconditionFailed:
        outcome = carried_out(self.rows, order)
        if isinstance(outcome, Committed) and order.write:
            self._on_commit(order)
        return outcome
