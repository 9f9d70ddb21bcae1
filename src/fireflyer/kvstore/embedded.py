"""The embedded engine: a directory of this machine, owned by this process (`lmdb_file`).

    loop thread     begin: a snapshot of what is committed, and its version; reads straight from the mapped file
                    commit: conflict sets and writes are queued, a future waits
    writer thread   takes all that has queued up, asks the resolver in order, writes those that may commit in one
                    LMDB transaction, syncs once, then answers all of them

So versions are assigned in the order of the queue, the file shows whole batches only, and nobody is told before
the sync. The resolver belongs to the writer thread alone. It begins anew with the process: so do all transactions.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from fireflyer.base.errors import Busy, FireflyerError, NoSpace, PermanentError
from fireflyer.base.units import MIB
from fireflyer.kvstore.core.conflicts import Conflicts
from fireflyer.kvstore.core.keys import KeyRange, Page
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.core.resolver import Resolver
from fireflyer.kvstore.core.timing import Timing
from fireflyer.kvstore.engine import AttemptingEngine
from fireflyer.kvstore.errors import Conflict
from fireflyer.kvstore.lmdb_file import MAP_BYTES, LmdbFile, LmdbSnapshot
from fireflyer.kvstore.timing import LoopTiming
from fireflyer.kvstore.transaction import Source

__all__ = ["EmbeddedEngine"]

MAX_BATCH_COMMITS: Final = 1024
MAX_BATCH_BYTES: Final = 2 * MIB
MAX_QUEUED_COMMITS: Final = 16384
MAX_QUEUED_BYTES: Final = 256 * MIB
PATIENCE_SHARE: Final = 0.1
"""Of the time of a write: how long the next one may wait for as many commits as the last one had."""


class _Commit(NamedTuple):
    read_version: int
    reads: Conflicts
    mutations: Mutations
    bytes_counted: int
    done: asyncio.Future[None]


class EmbeddedEngine(AttemptingEngine):
    """Made in the loop in which it lives; opening blocks for some milliseconds. Errors: see `LmdbFile`."""

    def __init__(self, path: str, *, waits: Timing | None = None, map_bytes: int = MAP_BYTES) -> None:
        super().__init__(waits or LoopTiming())
        self._loop = asyncio.get_running_loop()
        self._file = LmdbFile(path, map_bytes=map_bytes)
        self._writer = _Writer(self._file, self._answer)
        self._queued_commits = 0
        self._queued_bytes = 0
        self._writer.start()

    @property
    def path(self) -> str:
        return self._file.path

    async def backup(self, path: str) -> None:
        """Copies what is committed now into the new directory `path`, durably, which is a store again; commits go on
        meanwhile. Raises `Exists`, `NotFound` (no parent), `NoSpace`."""
        await asyncio.to_thread(self._file.copy, path)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._writer.stop()
        await asyncio.to_thread(self._writer.join)
        self._file.close()

    async def _begin(self, *, read_only: bool) -> Source:  # noqa: ARG002
        return _EmbeddedSource(self._file.snapshot(), self._submit)

    def _submit(self, read_version: int, reads: Conflicts, mutations: Mutations) -> asyncio.Future[None]:
        if self._closed:
            raise PermanentError(f"key-value store {self.path} was closed before the commit")
        counted = mutations.bytes_counted
        if self._queued_commits >= MAX_QUEUED_COMMITS or self._queued_bytes + counted > MAX_QUEUED_BYTES:
            raise Busy(
                f"key-value store {self.path} is overloaded: {self._queued_commits} commits wait for the disk; try "
                "again"
            )
        self._queued_commits += 1
        self._queued_bytes += counted
        commit = _Commit(read_version, reads, mutations, counted, self._loop.create_future())
        self._writer.put(commit)
        return commit.done

    def _answer(self, answers: list[tuple[_Commit, FireflyerError | None]]) -> None:
        """In the writer's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._answered, answers)

    def _answered(self, answers: list[tuple[_Commit, FireflyerError | None]]) -> None:
        for commit, error in answers:
            self._queued_commits -= 1
            self._queued_bytes -= commit.bytes_counted
            if commit.done.done():  # cancelled
                continue
            if error is None:
                commit.done.set_result(None)
            else:
                commit.done.set_exception(error)


class _EmbeddedSource(Source):
    def __init__(
        self,
        snapshot: LmdbSnapshot,
        submit: Callable[[int, Conflicts, Mutations], asyncio.Future[None]],
    ) -> None:
        self._snapshot = snapshot
        self._submit = submit
        self._sent = False

    @property
    def commit_sent(self) -> bool:
        return self._sent

    async def get(self, key: bytes) -> bytes | None:
        return self._snapshot.get(key)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._snapshot.get(key) for key in keys]

    async def scan(self, wanted: KeyRange, limit: int, *, reverse: bool) -> Page:
        return self._snapshot.scan(wanted, limit, reverse=reverse)

    async def conflict_with(self, conflicts: Conflicts) -> None:
        """They are among the reads of `commit`."""

    async def commit(self, reads: Conflicts, mutations: Mutations) -> None:
        version = self._snapshot.version
        self._snapshot.close()
        if mutations.empty:
            return
        done = self._submit(version, reads, mutations)
        self._sent = True
        await done

    async def end(self, error: BaseException | None) -> None:  # noqa: ARG002
        self._snapshot.close()


class _Writer(threading.Thread):
    """See the module's text. Daemonic: a process that ends without `close` does so as after a crash, which is safe."""

    def __init__(self, file: LmdbFile, answer: Callable[[list[tuple[_Commit, FireflyerError | None]]], None]) -> None:
        super().__init__(name="kvstore-writer", daemon=True)
        self._file = file
        self._answer = answer
        # Not a SimpleQueue: Python 3.11 may wait for ever in its `get` when the timeout passes at the wrong moment.
        self._queue: queue.Queue[_Commit | None] = queue.Queue()
        snapshot = file.snapshot()
        self._stored_version = snapshot.version
        snapshot.close()
        self._resolver = Resolver(self._stored_version)
        self._broken: FireflyerError | None = None
        self._stopped = False
        self._expected = 1
        self._patience_s = 0.0

    def put(self, commit: _Commit) -> None:
        self._queue.put(commit)

    def stop(self) -> None:
        """What is queued is still written."""
        self._queue.put(None)

    def run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = self._gathered(first)
            began_s = time.monotonic()
            answers = self._write(batch)
            self._patience_s = (time.monotonic() - began_s) * PATIENCE_SHARE
            self._expected = len(batch)
            self._answer(answers)
            if self._stopped:
                return

    def _gathered(self, first: _Commit) -> list[_Commit]:
        """What has queued up. Those who were answered last are likely to come again at once: without a moment's
        patience two halves of the callers would take turns, and each sync would serve one half."""
        batch, batch_bytes = [first], first.bytes_counted
        until_s = time.monotonic() + self._patience_s
        while len(batch) < MAX_BATCH_COMMITS and batch_bytes < MAX_BATCH_BYTES:
            left_s = until_s - time.monotonic() if len(batch) < self._expected else 0.0
            try:
                commit = self._queue.get(timeout=max(0.0, left_s))
            except queue.Empty:
                break
            if commit is None:
                self._stopped = True
                break
            batch.append(commit)
            batch_bytes += commit.bytes_counted
        return batch

    def _write(self, batch: list[_Commit]) -> list[tuple[_Commit, FireflyerError | None]]:
        if self._broken is not None:
            return [(commit, self._broken) for commit in batch]
        answers: list[tuple[_Commit, FireflyerError | None]] = []
        accepted: list[tuple[int, _Commit]] = []
        for commit in batch:
            refusal = self._resolver.refusal(commit.read_version, commit.reads)
            if refusal is None:
                version = self._resolver.version + 1
                self._resolver.add(version, commit.mutations.conflicts())
                accepted.append((version, commit))
            else:
                answers.append((commit, Conflict(f"transaction not committed: {refusal}; run it again", retry_ns=0)))
        if accepted:
            answers += self._stored(accepted)
        if self._stored_version < self._resolver.version:
            # Nobody has seen the versions that failed. With them in the window, who reads what they wrote could never
            # commit again.
            self._resolver = Resolver(self._stored_version)
        return answers

    def _stored(self, accepted: list[tuple[int, _Commit]]) -> list[tuple[_Commit, FireflyerError | None]]:
        failure = self._store(accepted[-1][0], [commit.mutations for _, commit in accepted])
        if isinstance(failure, NoSpace) and len(accepted) > 1:  # for some there may be: those that clear
            return [(commit, self._store(version, [commit.mutations])) for version, commit in accepted]
        return [(commit, failure) for _, commit in accepted]

    def _store(self, version: int, batch: list[Mutations]) -> FireflyerError | None:
        if self._broken is not None:
            return self._broken
        try:
            self._file.write(version, batch)
        except NoSpace as error:
            return error
        except Exception as error:
            # What the kernel could not write may be gone from its cache: no later sync would tell.
            cause = error.message if isinstance(error, FireflyerError) else f"{type(error).__name__}: {error}"
            self._broken = PermanentError(
                f"{cause}; it accepts no more commits until it is opened again: restart the process"
            )
            return self._broken
        self._stored_version = version
        return None
