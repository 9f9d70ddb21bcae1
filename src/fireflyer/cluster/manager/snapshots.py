"""Snapshots in the manager that leads: what users send, what submissions name, what nodes fetch, what may go.

    users   begin, send, seal ──┐
    submissions held ───────────┼──> SnapshotStore (in threads) ──> Objects
    nodes   piece ──────────────┤
    hourly  collect ────────────┘

A manager that takes over begins with what the rows of unfinished tasks name. Submissions whose blobs were under way at
the former leader begin again, and send what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from fireflyer.base.errors import Busy, FireflyerError, NotFound, PermissionDenied, Timeout, UsageError
from fireflyer.base.units import MIB, SECOND
from fireflyer.cluster.core.objects.frames import read_frames
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.objects import Objects, SnapshotStore
from fireflyer.cluster.schema.sync import BlobPiece, FetchBlob

__all__ = ["Snapshots"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
PIECE_BYTES: Final = MIB // 2
"""Of one answer to a node."""
SENDING: Final = 16
"""Requests that send blobs, at once: each has a thread."""
SENDING_OF_USER: Final = 4
STALLED_S: Final = 30.0
"""A client that sends nothing for so long is given up."""
COLLECT_S: Final = 3600.0


@dataclass(slots=True)
class _Reader:
    """A node reads a blob from its beginning to its end, on one connection."""

    snapshot: str
    blob: str
    size_bytes: int
    pieces: Iterator[bytes]
    offset: int = 0
    rest: bytes = b""

    def read(self, offset: int) -> bytes:
        """The next bytes from `offset`, which is not below `self.offset`. Blocks."""
        while True:
            if not self.rest:
                self.rest = next(self.pieces, b"")
                if not self.rest:
                    return b""
            skipped = min(offset - self.offset, len(self.rest))
            self.offset, self.rest = self.offset + skipped, self.rest[skipped:]
            if self.rest:
                data, self.rest = self.rest[:PIECE_BYTES], self.rest[PIECE_BYTES:]
                self.offset += len(data)
                return data


class Snapshots:
    """Lives in the loop of `platform`. All calls raise `Elsewhere` where this manager does not lead."""

    def __init__(self, platform: Platform, objects: Objects) -> None:
        self._platform = platform
        self._objects = objects
        self._store = SnapshotStore(objects)
        self._term = 0
        self._loading = asyncio.Lock()
        self._threads = ThreadPoolExecutor(SENDING, "snapshots")
        self._sending: dict[str, int] = {}
        self._readers: dict[int, _Reader] = {}

    def close(self) -> None:
        """Requests that are under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _current(self) -> SnapshotStore:
        """That of this term, loaded."""
        async with self._loading:
            term = self._platform.term()
            if term != self._term:
                store = SnapshotStore(self._objects)
                damaged = await asyncio.to_thread(store.load, self._platform.snapshots())
                for snapshot in damaged:
                    _log.error("a snapshot of an unfinished task cannot be read snapshot=%s", snapshot)
                self._store, self._term = store, term
        return self._store

    # --- users ---

    async def begin(self, owner: str, snapshot: str, manifest: bytes) -> tuple[str, ...]:
        """Which blobs to send. Raises `UsageError` for a manifest that is refused, `NoSpace` over the quota, `Busy`."""
        store = await self._current()
        return await asyncio.to_thread(store.begin, owner, snapshot, manifest)

    async def send(self, owner: str, snapshot: str, stream: AsyncIterator[bytes]) -> int:
        """Blobs in frames; how many they were. Raises `NotFound`, `UsageError`, `NoSpace`, `Busy`."""
        store = await self._current()
        if self._sending.get(owner, 0) >= SENDING_OF_USER or sum(self._sending.values()) >= SENDING:
            raise Busy("too many snapshots are being sent; try again in a moment", retry_ns=SECOND)
        self._sending[owner] = self._sending.get(owner, 0) + 1
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, _put_all, store, owner, snapshot, _blocking(stream, loop))
        work.add_done_callback(lambda _: self._sent(owner))
        return await asyncio.shield(work)

    def _sent(self, owner: str) -> None:
        self._sending[owner] -= 1
        if not self._sending[owner]:
            del self._sending[owner]

    async def seal(self, owner: str, snapshot: str) -> None:
        """All of it is there. Raises `NotFound` where something is missing."""
        store = await self._current()
        await asyncio.to_thread(store.seal, owner, snapshot)

    @contextlib.asynccontextmanager
    async def held(self, owner: str, snapshots: Iterable[str]) -> AsyncIterator[None]:
        """They stay while rows that name them are committed. Raises `UsageError` for one that the user has not sent."""
        named = tuple(dict.fromkeys(one for one in snapshots if one))
        if not named:
            yield
            return
        store = await self._current()
        try:
            for snapshot in named:
                await asyncio.to_thread(_hold, store, owner, snapshot)
            yield
        finally:
            for snapshot in named:
                store.release(owner, snapshot)  # of this call, and of the `begin` with which it was sent
                store.release(owner, snapshot)

    # --- nodes ---

    async def piece(self, node: str, connection: int, asked: FetchBlob) -> BlobPiece:
        """For a node that has a run with this snapshot. Raises `PermissionDenied`, `NotFound`, `DataCorruption`."""
        if not self._platform.runs_snapshot(node, asked.snapshot):
            raise PermissionDenied(f"{node} has no run with snapshot {asked.snapshot[:12]}…")
        store = await self._current()
        reader = self._readers.pop(connection, None)
        if (
            reader is None
            or (reader.snapshot, reader.blob) != (asked.snapshot, asked.blob)
            or reader.offset > asked.offset
        ):
            size_bytes, pieces = await asyncio.to_thread(store.open, asked.snapshot, asked.blob)
            reader = _Reader(asked.snapshot, asked.blob, size_bytes, pieces)
        data = await asyncio.to_thread(reader.read, asked.offset)
        if reader.offset < reader.size_bytes:
            self._readers[connection] = reader
        return BlobPiece(size_bytes=reader.size_bytes, data=data)

    def disconnected(self, connection: int) -> None:
        self._readers.pop(connection, None)

    # --- collection ---

    async def collect_for_ever(self) -> None:
        """Until it is cancelled: what no unfinished task names, and is older than the grace age, is removed."""
        while True:
            await asyncio.sleep(COLLECT_S)
            if not self._platform.leads:
                continue
            try:
                await self.collect()
            except FireflyerError as error:
                _log.error("blobs were not collected reason=%s", error)

    async def collect(self) -> None:
        store = await self._current()
        loop = asyncio.get_running_loop()
        done = await asyncio.to_thread(store.collect, partial(_in_loop, loop, self._platform.snapshots))
        _log.info("blobs were collected blobs=%d bytes=%d damaged=%s", *done)


def _hold(store: SnapshotStore, owner: str, snapshot: str) -> None:
    try:
        store.begin(owner, snapshot)
        store.seal(owner, snapshot)
    except NotFound:
        raise UsageError(f"snapshot {snapshot[:12]}… of {owner} is not complete; send it before the task") from None


def _put_all(store: SnapshotStore, owner: str, snapshot: str, pieces: Iterator[bytes]) -> int:
    store.check_begun(owner, snapshot)  # also where no blob comes, which nothing else would look at
    count = 0
    for frame in read_frames(pieces):
        store.put(owner, snapshot, frame.blob, frame.pieces)
        count += 1
    return count


def _blocking(stream: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
    """For a thread: the pieces of `stream`, one asked for when the one before is written."""
    while True:
        asked = asyncio.run_coroutine_threadsafe(_next(stream), loop)
        try:
            piece = asked.result(STALLED_S)
        except TimeoutError:
            asked.cancel()
            raise Timeout(f"the client sent nothing for {STALLED_S:.0f} s; send the rest again") from None
        if piece is None:
            return
        yield piece


async def _next(stream: AsyncIterator[bytes]) -> bytes | None:
    return await anext(stream, None)


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], _T]) -> _T:
    """From a thread."""

    async def called() -> _T:
        return call()

    return asyncio.run_coroutine_threadsafe(called(), loop).result()
