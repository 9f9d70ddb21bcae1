"""The embedded store's directory: an LMDB environment with two tables, owned by one process.

`records` holds the keys; a value is followed by the CRC-32 of key and value, since LMDB has no checksums. `state` holds
the format's name and the version of the last commit, which every snapshot shows, so that a reader knows what it reads.

Snapshots may begin in any thread and show what was committed last. Writing belongs to one thread. A write is durable
when `write` returns, and nobody sees it before: it is in the `journal`, synced, when LMDB commits it. LMDB itself syncs
nothing then. From time to time its file is synced (`_checkpoint`), and the journal begins anew; until the next time a
reader keeps the pages of that moment from being used again, so that the file can go back to it when it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import lmdb

from fireflyer.base.errors import (
    Aborted,
    Busy,
    DataCorruption,
    Exists,
    FireflyerError,
    NoSpace,
    PermanentError,
    UsageError,
)
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import GIB, MIB
from fireflyer.kvstore.core.keys import MAX_PAGE_BYTES, Item, KeyRange, Page, shown
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.journal import Journal
from fireflyer.runtime.disk import RealDisk

__all__ = ["MAP_BYTES", "MAX_READERS", "LmdbFile", "LmdbSnapshot"]

MAP_BYTES: Final = 1024 * GIB
"""Address space, not memory or disk: the store can grow to it without moving under its readers."""
LEAST_MAP_BYTES: Final = GIB
MAX_READERS: Final = 4096
"""Snapshots that are open."""
_OWN_READERS: Final = 6
"""For going back (two for a moment), and for copies."""
RESERVE_BYTES: Final = 4 * MIB
"""Of the file, beyond what records take: see `LmdbFile._reserve`."""
GROWTH_BYTES: Final = 4 * MIB
_FORMAT: Final = b"fireflyer kvstore 2"
_FORMAT_BEFORE: Final = b"fireflyer kvstore 1"
"""Without a journal."""
CHECKPOINT_EVERY: Final = 256
"""Batches. Pages that they free are not used again before."""
_CRC_BYTES: Final = 4
_META: Final = struct.Struct("<16xI124xQ")
"""Of LMDB's first pages, where pointers have 64 bits: magic, number of the transaction."""
_META_MAGIC: Final = 0xBEEFC0DE
_NOT_KNOWN: Final = 1 << 64


class LmdbFile:
    """Opens the directory `path`, which is made if its parent exists. Raises `Busy` if a process has it open,
    `NotFound`, `DataCorruption`, `NoSpace`."""

    def __init__(self, path: str, *, map_bytes: int = MAP_BYTES) -> None:
        self.path = os.path.abspath(path)
        self._data = os.path.join(self.path, "data.mdb")
        self._snapshots = 0
        self._snapshots_lock = threading.Lock()
        disk = RealDisk()
        with contextlib.suppress(Exists):
            disk.mkdir(self.path)
            disk.sync_dir(os.path.dirname(self.path))
        if not disk.is_dir(self.path):
            raise UsageError(f"key-value store {self.path} is a file; give a directory")
        self._lock_fd = _take_lock(self.path)
        try:
            with _translated(f"open key-value store {self.path}"):
                self._journal = Journal(self.path)
            try:
                self._open(map_bytes, disk)
            except BaseException:
                self._journal.close()
                raise
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _open(self, map_bytes: int, disk: RealDisk) -> None:
        if self._journal.pages is not None:
            with _translated(f"open key-value store {self.path}"):
                _restore(self._data, self._journal.pages)
        else:
            self._env = _open_environment(self.path, map_bytes, sync=True)
            try:
                self._prepare(_FORMAT_BEFORE)
            finally:
                self._env.close()
            # The journal's name, and that of LMDB's file, before anything counts on finding both.
            disk.sync_dir(self.path)
        self._env = _open_environment(self.path, map_bytes, sync=False)
        try:
            self._pin: lmdb.Transaction[bytes] | None = None
            self._since_checkpoint = 0
            if self._journal.pages is None:
                self._checkpoint()
            else:
                self._pin = self._env.begin()  # the power may go while the records are done again
            self._prepare(_FORMAT)
            with _translated(f"open key-value store {self.path}"):
                for record in self._journal.records():
                    self._begun(record.version, record.batch, reserve=False).commit()
            self._checkpoint()
        except BaseException:
            self._env.close()
            raise

    def _prepare(self, wanted: bytes) -> None:
        """A store of the format before gets its journal, and then the new format."""
        with _translated(f"open key-value store {self.path}"):
            pages, page_bytes = self._env.info()["last_pgno"] + 1, self._env.stat()["psize"]
            file_bytes = os.stat(self._data).st_size
            if file_bytes and file_bytes < pages * page_bytes:  # reading behind the end would kill the process
                raise DataCorruption(f"key-value store {self.path}: data.mdb is truncated; restore a backup")
            self._records = self._env.open_db(b"records")
            self._state = self._env.open_db(b"state")
            with self._env.begin(write=True) as txn:
                found = txn.get(b"format", db=self._state)
                if found == _FORMAT and self._journal.pages is None:
                    raise DataCorruption(f"key-value store {self.path}: its journal is missing; restore a backup")
                if found is None or found == _FORMAT_BEFORE:
                    txn.put(b"format", wanted, db=self._state)
                elif found != _FORMAT:
                    raise UsageError(
                        f"key-value store {self.path} has format {found!r}; this release reads {_FORMAT!r}; install "
                        "the release that wrote it"
                    )

    def snapshot(self) -> LmdbSnapshot:
        """What was committed last. Must be closed soon: meanwhile no page that it sees is used again. Raises `Busy`."""
        with self._snapshots_lock:  # LMDB's own limit would leave none for `_checkpoint`
            if self._snapshots >= MAX_READERS:
                raise Busy(f"{self._snapshots} transactions are open already")
            self._snapshots += 1
        try:
            txn = self._env.begin()
            return LmdbSnapshot(txn, self._records, self._state, self._snapshot_ended)
        except BaseException as error:
            self._snapshot_ended()
            if isinstance(error, lmdb.Error):
                raise _translate(error, f"read key-value store {self.path}") from error
            raise

    def _snapshot_ended(self) -> None:
        with self._snapshots_lock:
            self._snapshots -= 1

    def write(self, version: int, batch: Sequence[Mutations]) -> None:
        """All of `batch`, in order, or nothing; durable. Raises `NoSpace`, and whatever the disk says."""
        if self._since_checkpoint >= CHECKPOINT_EVERY:
            self._checkpoint()
        try:
            self._attempt(version, batch)
        except NoSpace:
            if not self._since_checkpoint:
                raise
            self._checkpoint()  # pages that were kept for going back may be the room that there is
            self._attempt(version, batch)

    def _attempt(self, version: int, batch: Sequence[Mutations]) -> None:
        what = f"write key-value store {self.path}"
        try:
            with _translated(what):
                self._write(version, batch)
        except PermanentError as error:
            wanted_bytes = sum(mutations.bytes_counted for mutations in batch)
            if (cause := self._without_room(error, wanted_bytes)) is not None:
                raise translate_os_error(cause, what) from error
            raise

    def _without_room(self, error: PermanentError, wanted_bytes: int) -> OSError | None:
        """LMDB calls it EIO when the kernel took only a part of a write, as it does where room ends. Then it does not
        let us have more room either, and says why."""
        if not isinstance(error.__cause__, lmdb.Error) or error.__cause__.code != errno.EIO:
            return None
        try:
            self._grow(wanted_bytes + RESERVE_BYTES)
        except OSError as cause:
            return cause
        return None

    def _grow(self, added_bytes: int) -> None:
        fd = os.open(self._data, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, os.fstat(fd).st_size, added_bytes)
        finally:
            os.close(fd)

    def _reserve(self, txn: lmdb.Transaction[bytes], batch: Sequence[Mutations]) -> None:
        """Room for `batch`, and `RESERVE_BYTES` more: to clear keys takes new pages first, and must go on on a full
        disk. So what adds nothing, or says that it makes room, needs no reserve."""
        adding = [one for one in batch if not one.frees_space and any(value for _, value in one.writes)]
        if not adding:
            return
        wanted_bytes = 2 * sum(mutations.bytes_counted for mutations in adding) + RESERVE_BYTES
        stat = txn.stat(self._records)
        live_bytes = (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        room_bytes = os.stat(self._data).st_size - live_bytes
        if room_bytes < wanted_bytes:
            self._grow(wanted_bytes - room_bytes + GROWTH_BYTES)

    def _write(self, version: int, batch: Sequence[Mutations]) -> None:
        body = Journal.encode(batch)
        large = not self._journal.fits(body)
        if large:
            self._checkpoint()
            large = not self._journal.fits(body)
        txn = self._begun(version, batch)
        try:
            self._journal.append(version, body)
            self._since_checkpoint += CHECKPOINT_EVERY if large else 1
        except BaseException:
            txn.abort()
            raise
        try:
            txn.commit()
        except BaseException:
            self._journal.undo(version)
            raise

    def _checkpoint(self) -> None:
        """Raises `PermanentError`: what was not synced may be gone from the kernel's cache."""
        try:
            self._sync_all()
        except (lmdb.Error, OSError) as error:
            self._since_checkpoint = 0  # none at `close`: a second sync would tell nothing
            raise PermanentError(f"sync key-value store {self.path}: {error}") from None

    def _sync_all(self) -> None:
        self._env.sync(True)
        size = 2 * self._env.stat()["psize"]
        fd = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = os.pread(fd, size, 0)
        finally:
            os.close(fd)
        pin = self._env.begin()
        try:
            self._journal.switch(pages)
        except BaseException:
            pin.abort()
            raise
        before, self._pin, self._since_checkpoint = self._pin, pin, 0
        if before is not None:
            before.abort()

    def _begun(
        self, version: int, batch: Sequence[Mutations], *, reserve: bool = True
    ) -> lmdb.Transaction[bytes]:  # fmt: skip
        """All of it done, but for the commit."""
        txn = self._env.begin(write=True)
        try:
            if reserve:
                self._reserve(txn, batch)
            for mutations in batch:
                for cleared in mutations.cleared:
                    self._clear(txn, cleared)
                for key, value in mutations.writes:
                    if value is None:
                        txn.delete(key, db=self._records)
                    else:
                        txn.put(key, value + _crc(key, value), db=self._records)
            txn.put(b"version", version.to_bytes(8, "big"), db=self._state)
        except BaseException:
            txn.abort()
            raise
        return txn

    def _clear(self, txn: lmdb.Transaction[bytes], cleared: KeyRange) -> None:
        with txn.cursor(db=self._records) as cursor:
            found = cursor.set_range(cleared.begin) if cleared.begin else cursor.first()
            while found and (cleared.end is None or cursor.key() < cleared.end):
                cursor.delete()  # moves to the next one
                found = cursor.key() != b""

    def copy(self, path: str) -> None:
        """A new directory with all that is committed, durable. Raises `Exists`, `NotFound`, `NoSpace`."""
        disk = RealDisk()
        target = os.path.abspath(path)
        disk.mkdir(target)
        with _translated(f"copy key-value store {self.path} to {target}"):
            self._env.copy(target, compact=True)
            with contextlib.ExitStack() as stack:
                fd = os.open(os.path.join(target, "data.mdb"), os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                journal = Journal(target)
                stack.callback(journal.close)
                os.fsync(fd)
                journal.switch(os.pread(fd, 2 * self._env.stat()["psize"], 0))
        disk.sync_dir(target)
        disk.sync_dir(os.path.dirname(target))

    def close(self) -> None:
        """Snapshots end with it. Idempotent."""
        if self._lock_fd >= 0:
            if self._since_checkpoint:
                with contextlib.suppress(FireflyerError):  # all is in the journal
                    self._checkpoint()
            self._env.close()
            self._journal.close()
            os.close(self._lock_fd)
            self._lock_fd = -1


class LmdbSnapshot:
    """The records as of `version`."""

    def __init__(
        self, txn: lmdb.Transaction[bytes], records: lmdb._Database, state: lmdb._Database, ended: Callable[[], None]
    ) -> None:
        self._txn = txn
        self._records = records
        self._ended: Callable[[], None] | None = ended
        self.version = int.from_bytes(txn.get(b"version", b"", db=state), "big")

    def get(self, key: bytes) -> bytes | None:
        try:  # not `_translated`, which costs more than the read
            stored = self._txn.get(key, db=self._records)
        except lmdb.Error as error:
            raise _translate(error, "read the key-value store") from error
        return None if stored is None else _verified(key, stored)

    def scan(self, wanted: KeyRange, limit: int, *, reverse: bool) -> Page:
        items: list[Item] = []
        bytes_read = 0
        with _translated("read the key-value store"), self._txn.cursor(db=self._records) as cursor:
            found = _at_end(cursor, wanted) if reverse else _at_begin(cursor, wanted)
            while found:
                key = cursor.key()
                if key not in wanted:
                    break
                if len(items) == limit or bytes_read >= MAX_PAGE_BYTES:
                    return Page(items, True)
                items.append((key, _verified(key, cursor.value())))
                bytes_read += len(key) + len(items[-1][1])
                found = cursor.prev() if reverse else cursor.next()
        return Page(items, False)

    def close(self) -> None:
        """Idempotent."""
        self._txn.abort()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


def _at_begin(cursor: lmdb.Cursor[bytes], wanted: KeyRange) -> bool:
    return cursor.set_range(wanted.begin) if wanted.begin else cursor.first()


def _at_end(cursor: lmdb.Cursor[bytes], wanted: KeyRange) -> bool:
    """On the last key before the end."""
    if wanted.end is None or not cursor.set_range(wanted.end):
        return cursor.last()
    return cursor.prev()


def _crc(key: bytes, value: bytes) -> bytes:
    return zlib.crc32(value, zlib.crc32(key)).to_bytes(_CRC_BYTES, "big")


def _verified(key: bytes, stored: bytes) -> bytes:
    value = stored[:-_CRC_BYTES]
    if _crc(key, value) != stored[-_CRC_BYTES:]:
        raise DataCorruption(f"key-value store: the record of {shown(key)} is damaged; restore a backup")
    return value


def _take_lock(path: str) -> int:
    """Held while the descriptor is open. Raises `Busy`."""
    name = os.path.join(path, "owner")
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise translate_os_error(error, f"open key-value store {path}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise Busy(f"key-value store {path} is in use by process {owner}; stop that process first") from error
        raise translate_os_error(error, f"lock key-value store {path}") from error
    return fd


def _restore(data: str, pages: bytes) -> None:
    """LMDB's file goes back to where these were its first pages."""
    store = os.path.dirname(data)
    fd = os.open(data, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < len(pages):
            raise DataCorruption(f"key-value store {store}: data.mdb is truncated; restore a backup")
        now, half = os.pread(fd, len(pages), 0), len(pages) // 2
        for at in (0, half):
            if _commits(now[at : at + half]) < _commits(pages[at : at + half]):
                raise DataCorruption(
                    f"key-value store {store}: data.mdb is older than its journal; put a backup back as a whole, "
                    "with its journal or with none"
                )
        os.pwrite(fd, pages, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _commits(page: bytes) -> int:
    """How many LMDB had made when it wrote this one of its first pages; a later one has more."""
    magic, commits = _META.unpack_from(page)
    return commits if magic == _META_MAGIC else _NOT_KNOWN


def _open_environment(path: str, map_bytes: int, *, sync: bool) -> lmdb.Environment:
    while True:
        try:
            # Files of mode 0600: they may hold hashes of tokens. No read-ahead: reads are small and scattered.
            return lmdb.open(
                path, map_size=map_bytes, max_dbs=2, max_readers=MAX_READERS + _OWN_READERS, mode=0o600,
                readahead=False, sync=sync,
            )  # fmt: skip
        except lmdb.MemoryError as error:
            if map_bytes <= LEAST_MAP_BYTES:
                raise Busy(
                    f"key-value store {path}: cannot map {map_bytes} bytes of address space; raise the limit "
                    "(`ulimit -v`)"
                ) from error
            map_bytes //= 2
        except lmdb.Error as error:
            raise _translate(error, f"open key-value store {path}") from error


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _translate(error, what) from error
    except OSError as error:
        raise translate_os_error(error, what) from error


def _translate(error: lmdb.Error, what: str) -> FireflyerError:
    if isinstance(error, lmdb.MapFullError):
        return NoSpace(f"{what}: its address space is full; remove data, or raise the limit (`ulimit -v`)")
    damaged = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)
    if isinstance(error, damaged):
        return DataCorruption(f"{what}: data.mdb is damaged or not of Fire-Flyer ({error.reason}); restore a backup")
    if error.code > 0:
        return translate_os_error(OSError(error.code, os.strerror(error.code)), what)
    if "closed" in str(error):
        return Aborted(f"{what}: the store is closed")
    return PermanentError(f"{what}: {error}")
