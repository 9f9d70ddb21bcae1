"""The engine in memory: for tests, and as the database of the simulated world. Nothing of it survives the process.

Several engines may share one `MemoryStore`, as several managers share a database. `faults` is asked before each commit
that writes, and can make it end like a commit over a network that breaks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from fireflyer.kvstore.core.conflicts import Conflicts
from fireflyer.kvstore.core.keys import KeyRange, Page
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.core.store import MemoryStore
from fireflyer.kvstore.core.timing import Timing
from fireflyer.kvstore.engine import AttemptingEngine
from fireflyer.kvstore.errors import CommitUnknown, Conflict, Disconnected
from fireflyer.kvstore.timing import LoopTiming
from fireflyer.kvstore.transaction import Source

__all__ = ["CommitFault", "MemoryEngine"]


class CommitFault(enum.Enum):
    """Fault that the commit of a transaction has."""

    NONE = enum.auto()
    CONFLICT = enum.auto()
    DISCONNECTED = enum.auto()
    UNKNOWN_DONE = enum.auto()
    """Commit takes effect, and the caller gets `CommitUnknown`."""
    UNKNOWN_LOST = enum.auto()
    """Commit does not take effect, and the caller gets `CommitUnknown`."""


class MemoryEngine(AttemptingEngine):
    """Engine that keeps everything in the memory of this process, for tests and simulations."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        waits: Timing | None = None,
        faults: Callable[[], CommitFault] = lambda: CommitFault.NONE,
    ) -> None:
        super().__init__(waits or LoopTiming())
        self.store = store or MemoryStore()
        self._faults = faults

    async def close(self) -> None:
        self._closed = True

    async def _begin(self, *, read_only: bool) -> Source:  # noqa: ARG002
        await self._waits.pause()
        return _MemorySource(self.store, self._waits, self._faults)


class _MemorySource(Source):
    def __init__(self, store: MemoryStore, waits: Timing, faults: Callable[[], CommitFault]) -> None:
        self._store = store
        self._waits = waits
        self._faults = faults
        self._version = store.version

    @property
    def commit_sent(self) -> bool:
        return False

    async def get(self, key: bytes) -> bytes | None:
        await self._waits.pause()
        return self._store.get(self._version, key)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        await self._waits.pause()
        return [self._store.get(self._version, key) for key in keys]

    async def scan(self, wanted: KeyRange, limit: int, *, reverse: bool) -> Page:
        await self._waits.pause()
        return self._store.scan(self._version, wanted, limit, reverse=reverse)

    async def conflict_with(self, conflicts: Conflicts) -> None:
        """They are among the reads of `commit`."""

    async def commit(self, reads: Conflicts, mutations: Mutations) -> None:
        await self._waits.pause()
        fault = CommitFault.NONE if mutations.empty else self._faults()
        if fault is CommitFault.CONFLICT:
            raise Conflict("transaction not committed: a conflict was injected", retry_ns=0)
        if fault is CommitFault.DISCONNECTED:
            raise Disconnected("a broken connection was injected")
        if fault is not CommitFault.UNKNOWN_LOST:
            self._store.commit(self._version, reads, mutations)
        if fault is not CommitFault.NONE:
            raise CommitUnknown("an unknown outcome of the commit was injected")

    async def end(self, error: BaseException | None) -> None:
        """Nothing is held."""
