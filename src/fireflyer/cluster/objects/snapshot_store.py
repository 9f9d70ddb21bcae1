"""The snapshots of all users, as the manager has them: what to send, what is complete, what may go.

    begin(owner, snapshot, manifest) ──> which blobs to send
    put(owner, snapshot, blob, …)        each of them
    seal(owner, snapshot)                all are there: the task's row may name the snapshot
    release(owner, snapshot)             the row is committed, or will not be
    collect(named)                       from time to time

An owner sends every blob that they have not sent before, also where another owner's is there: who could have it for its
name alone could read the files of others. It is then kept once.

Blocks; called by threads. The rows that name snapshots are the manager's, which gives them as `(owner, snapshot)`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.base.ports import Data
from fireflyer.cluster.core.objects.blobs import StoredBlob, check_hash, hash_of, new_hasher
from fireflyer.cluster.core.objects.collection import (
    GRACE_NS,
    Accounts,
    Collection,
    Quota,
    Reservation,
    Reservations,
    Usage,
)
from fireflyer.cluster.core.objects.manifest import (
    MANIFEST_LIMITS,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestLimits,
    blobs_of,
    decode_manifest,
)
from fireflyer.cluster.objects.port import Objects, read_blob

__all__ = ["Collected", "SnapshotStore"]

SWEPT_AT_ONCE: Final = 256
OPENED_SNAPSHOTS: Final = 32


class Collected(NamedTuple):
    blobs: int
    size_bytes: int
    damaged: tuple[str, ...]
    """Named snapshots whose manifest cannot be read. Nothing is removed while there is one: its blobs are unknown."""


class SnapshotStore:
    def __init__(
        self,
        objects: Objects,
        *,
        limits: ManifestLimits = MANIFEST_LIMITS,
        quota_of: Callable[[str], Quota] = lambda _owner: Quota(),
        grace_ns: int = GRACE_NS,
        wall_ns: Callable[[], int] = time.time_ns,
        lock: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._objects = objects
        self._limits = limits
        self._quota_of = quota_of
        self._wall_ns = wall_ns
        self._lock = lock or threading.Lock()
        self._reservations = Reservations()
        self._collection = Collection(grace_ns)
        self._accounts = Accounts()
        self._opened: dict[str, dict[str, int]] = {}
        """Blobs of the snapshots that nodes have asked for lately."""

    def load(self, named: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Load, at the start, what owners are charged for. Gives the snapshots whose manifest cannot be read."""
        damaged = []
        for owner, snapshot in named:
            try:
                blobs = self._blobs_of(snapshot)
            except (DataCorruption, NotFound, UsageError):
                damaged.append(snapshot)
                continue
            with self._lock:
                self._accounts.add(owner, snapshot, blobs)
        return tuple(dict.fromkeys(damaged))

    def begin(self, owner: str, snapshot: str, manifest: bytes | None = None) -> tuple[str, ...]:
        """Blobs that have to be sent. Without `manifest`: of a snapshot that the owner has had already. Raises
        `NotFound` where the manifest must be sent, `UsageError` for one that is not allowed, `NoSpace` over the owner's
        quota, `Busy`."""
        check_hash(snapshot)
        if manifest is None:
            with self._lock:
                known = self._accounts.has_snapshot(owner, snapshot)
            if not known:
                raise NotFound(f"snapshot {snapshot[:12]}… of {owner} is not known; send its manifest")
            blobs = self._blobs_of(snapshot)
        else:
            if hash_of(manifest) != snapshot:
                raise UsageError(f"the manifest is not that of snapshot {snapshot[:12]}…; send what was hashed")
            blobs = _all_blobs(snapshot, len(manifest), decode_manifest(manifest, self._limits))
        reservation = self._reserve(owner, snapshot, blobs)
        if manifest is not None:
            self._objects.put(snapshot, len(manifest), [manifest])
        names = list(blobs)
        there = self._objects.renew(names)
        with self._lock:
            for blob, is_there in zip(names, there, strict=True):
                if is_there and (blob == snapshot or self._accounts.has(owner, blob)):
                    reservation.owed.pop(blob, None)
            return tuple(reservation.owed)

    def check_begun(self, owner: str, snapshot: str) -> None:
        """Raises `NotFound` for a snapshot of which the owner sends nothing."""
        with self._lock:
            self._found(owner, snapshot)

    def put(self, owner: str, snapshot: str, blob: str, pieces: Iterable[Data]) -> None:
        """One of the blobs that `begin` asked for. Raises `NotFound` for others, `UsageError` for wrong bytes."""
        with self._lock:
            reservation = self._found(owner, snapshot)
            if blob not in reservation.blobs:
                raise NotFound(f"blob {blob[:12]!r} is not in snapshot {snapshot[:12]}…; send what was asked for")
            size_bytes = reservation.blobs[blob]
        hashed = _Hashed(pieces)
        if not self._objects.put(blob, size_bytes, hashed):
            hashed.drain(size_bytes)
            if hashed.hash != blob:
                raise UsageError(f"blob {blob[:12]}… has other bytes than its name; the file changed while it was sent")
        with self._lock:
            reservation.owed.pop(blob, None)

    def seal(self, owner: str, snapshot: str) -> None:
        """Confirm that the snapshot is whole and stays until `release`. Raises `NotFound` where a part is missing."""
        with self._lock:
            reservation = self._found(owner, snapshot)
            if reservation.owed:
                raise NotFound(f"{len(reservation.owed)} blobs of snapshot {snapshot[:12]}… are missing; send them")
        names = list(reservation.blobs)
        lost = [blob for blob, there in zip(names, self._objects.renew(names), strict=True) if not there]
        with self._lock:
            if lost:
                reservation.owed.update((blob, reservation.blobs[blob]) for blob in lost)
                raise NotFound(f"{len(lost)} blobs of snapshot {snapshot[:12]}… were lost; begin again")
            self._accounts.add(owner, snapshot, reservation.blobs)

    def release(self, owner: str, snapshot: str) -> None:
        with self._lock:
            self._reservations.release(owner, snapshot)

    def usage(self, owner: str) -> Usage:
        with self._lock:
            return self._accounts.usage(owner)

    def manifest(self, snapshot: str) -> bytes:
        """Manifest, for a node that is to have it. Raises `NotFound`, `DataCorruption`."""
        return read_blob(self._objects, check_hash(snapshot), MAX_MANIFEST_BYTES)

    def open(self, snapshot: str, blob: str) -> tuple[int, Iterator[bytes]]:
        """The size and bytes of a blob of `snapshot`, for a node that is to have that. Raises `NotFound`, also for a
        blob of another snapshot, `DataCorruption` (at the latest before the last piece)."""
        with self._lock:
            blobs = self._opened.pop(snapshot, None)
        if blobs is None:
            blobs = self._blobs_of(snapshot)
        with self._lock:
            self._opened[snapshot] = blobs
            while len(self._opened) > OPENED_SNAPSHOTS:
                del self._opened[next(iter(self._opened))]
        if blob not in blobs:
            raise NotFound(f"blob {blob[:12]!r} is not in snapshot {snapshot[:12]}…; ask for what its manifest names")
        return blobs[blob], self._objects.get(blob)

    def collect(
        self, named: Callable[[], Iterable[tuple[str, str]]], also: Callable[[], Iterable[str]] = tuple
    ) -> Collected:
        """Removes what no row names and nobody has renewed for the grace age. `named` reads the rows, and is called
        after the collection has begun; `also`: other blobs in use, as of logs. Raises `Busy` beside another one."""
        with self._lock:
            now_ns = self._wall_ns()
            self._collection.begin(now_ns, (one.blobs for one in self._reservations.current(now_ns)))
        try:
            damaged = self._mark(named, also)
            if damaged:
                return Collected(0, 0, damaged)
            count, size_bytes = 0, 0
            pages = self._objects.list()
            while page := list(itertools.islice(pages, SWEPT_AT_ONCE)):
                sizes = {one.blob: one.size_bytes for one in page}
                for blob in self._sweep(page):
                    count, size_bytes = count + 1, size_bytes + sizes[blob]
            return Collected(count, size_bytes, ())
        finally:
            with self._lock:
                self._collection.end()

    def _mark(
        self, named: Callable[[], Iterable[tuple[str, str]]], also: Callable[[], Iterable[str]]
    ) -> tuple[str, ...]:
        rows = list(named())
        damaged = []
        for snapshot in dict.fromkeys(snapshot for _, snapshot in rows):
            try:
                blobs = self._blobs_of(snapshot)
            except (DataCorruption, NotFound, UsageError):
                damaged.append(snapshot)
                continue
            with self._lock:
                self._collection.mark(blobs)
        others = list(also())
        with self._lock:
            self._collection.mark(others)
            kept = [(one.owner, one.snapshot) for one in self._reservations.current(self._wall_ns())]
            self._accounts.keep_only([*rows, *kept])
        return tuple(damaged)

    def _sweep(self, page: list[StoredBlob]) -> list[str]:
        with self._lock:
            unused = self._collection.sweep(page)
            return self._objects.delete(unused, self._collection.before_ns) if unused else []

    def _reserve(self, owner: str, snapshot: str, blobs: dict[str, int]) -> Reservation:
        with self._lock:
            now_ns = self._wall_ns()
            others = [one.blobs for one in self._reservations.current(now_ns) if one.owner == owner]
            self._accounts.check(owner, [*others, blobs], self._quota_of(owner))
            reservation = self._reservations.reserve(now_ns, owner, snapshot, blobs)
            self._collection.mark(blobs)
            return reservation

    def _found(self, owner: str, snapshot: str) -> Reservation:
        found = self._reservations.find(self._wall_ns(), owner, snapshot)
        if found is None:
            raise NotFound(f"{owner} has not begun to send snapshot {snapshot[:12]}…, or too long ago; begin it again")
        return found

    def _blobs_of(self, snapshot: str) -> dict[str, int]:
        data = read_blob(self._objects, check_hash(snapshot), MAX_MANIFEST_BYTES)
        return _all_blobs(snapshot, len(data), decode_manifest(data))


def _all_blobs(snapshot: str, size_bytes: int, manifest: Manifest) -> dict[str, int]:
    return {snapshot: size_bytes, **blobs_of(manifest)}


class _Hashed:
    """Pieces on their way, whose hash is wanted when nobody else computes it."""

    def __init__(self, pieces: Iterable[Data]) -> None:
        self._pieces = iter(pieces)
        self._hasher = new_hasher()

    @property
    def hash(self) -> str:
        return self._hasher.hexdigest()

    def __iter__(self) -> Iterator[Data]:
        return self._pieces

    def drain(self, size_bytes: int) -> None:
        """At most so many bytes."""
        for piece in self._pieces:
            size_bytes -= len(memoryview(piece).cast("B"))
            if size_bytes < 0:
                raise UsageError("the blob has more bytes than its manifest says; the file changed while it was sent")
            self._hasher.update(piece)
