"""The embedded store's directory: an LMDB environment with two tables, owned by one process.

`records` holds the keys; a value is followed by the CRC-32 of key and value, since LMDB has no checksums. `state` holds
the format's name and the version of the last commit, which every snapshot shows, so that a reader knows what it reads.

Snapshots may begin in any thread and show what was committed last. Writing belongs to one thread. A write is durable
when `write` returns: LMDB writes new pages, syncs them, then writes and syncs the page that points to them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import zlib
from collections.abc import Iterator, Sequence
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
from fireflyer.runtime.disk import RealDisk

__all__ = ["MAP_BYTES", "MAX_READERS", "LmdbFile", "LmdbSnapshot"]

MAP_BYTES: Final = 1024 * GIB
"""Address space, not memory or disk: the store can grow to it without moving under its readers."""
LEAST_MAP_BYTES: Final = GIB
MAX_READERS: Final = 4096
RESERVE_BYTES: Final = 4 * MIB
"""Of the file, beyond what records take: see `LmdbFile._reserve`."""
GROWTH_BYTES: Final = 4 * MIB
_FORMAT: Final = b"fireflyer kvstore 1"
_CRC_BYTES: Final = 4


class LmdbFile:
    """Opens the directory `path`, which is made if its parent exists. Raises `Busy` if a process has it open,
    `NotFound`, `DataCorruption`, `NoSpace`."""

    def __init__(self, path: str, *, map_bytes: int = MAP_BYTES) -> None:
        self.path = os.path.abspath(path)
        self._data = os.path.join(self.path, "data.mdb")
        disk = RealDisk()
        with contextlib.suppress(Exists):
            disk.mkdir(self.path)
            disk.sync_dir(os.path.dirname(self.path))
        if not disk.is_dir(self.path):
            raise UsageError(f"key-value store {self.path}: it is a file, a directory is needed")
        self._lock_fd = _take_lock(self.path)
        try:
            self._env = _open_environment(self.path, map_bytes)
            try:
                self._prepare()
                disk.sync_dir(self.path)
            except BaseException:
                self._env.close()
                raise
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _prepare(self) -> None:
        with _translated(f"open key-value store {self.path}"):
            pages, page_bytes = self._env.info()["last_pgno"] + 1, self._env.stat()["psize"]
            file_bytes = os.stat(self._data).st_size
            if file_bytes and file_bytes < pages * page_bytes:  # reading behind the end would kill the process
                raise DataCorruption(f"key-value store {self.path}: its file is cut off; restore a backup")
            self._records = self._env.open_db(b"records")
            self._state = self._env.open_db(b"state")
            with self._env.begin(write=True) as txn:
                found = txn.get(b"format", db=self._state)
                if found is None:
                    txn.put(b"format", _FORMAT, db=self._state)
                elif found != _FORMAT:
                    raise UsageError(
                        f"key-value store {self.path} has format {found!r}; this version reads {_FORMAT!r}"
                    )

    def snapshot(self) -> LmdbSnapshot:
        """What was committed last. Must be closed soon: meanwhile no page that it sees is used again. Raises `Busy`."""
        try:
            txn = self._env.begin()
            return LmdbSnapshot(txn, self._records, self._state)
        except lmdb.ReadersFullError as error:
            raise Busy(f"{MAX_READERS} transactions are open already") from error
        except lmdb.Error as error:
            raise _translate(error, f"read key-value store {self.path}") from error

    def write(self, version: int, batch: Sequence[Mutations]) -> None:
        """All of `batch`, in order, or nothing; durable. Raises `NoSpace`, and whatever the disk says."""
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
        adding = [one for one in batch if not one.makes_room and any(value for _, value in one.writes)]
        if not adding:
            return
        wanted_bytes = 2 * sum(mutations.bytes_counted for mutations in adding) + RESERVE_BYTES
        stat = txn.stat(self._records)
        live_bytes = (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        room_bytes = os.stat(self._data).st_size - live_bytes
        if room_bytes < wanted_bytes:
            self._grow(wanted_bytes - room_bytes + GROWTH_BYTES)

    def _write(self, version: int, batch: Sequence[Mutations]) -> None:
        with self._env.begin(write=True) as txn:
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
            fd = os.open(os.path.join(target, "data.mdb"), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        disk.sync_dir(target)
        disk.sync_dir(os.path.dirname(target))

    def close(self) -> None:
        """Snapshots end with it. Idempotent."""
        if self._lock_fd >= 0:
            self._env.close()
            os.close(self._lock_fd)
            self._lock_fd = -1


class LmdbSnapshot:
    """The records as of `version`."""

    def __init__(self, txn: lmdb.Transaction[bytes], records: lmdb._Database, state: lmdb._Database) -> None:
        self._txn = txn
        self._records = records
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
            raise Busy(f"key-value store {path} is in use by process {owner}; stop that one first") from error
        raise translate_os_error(error, f"lock key-value store {path}") from error
    return fd


def _open_environment(path: str, map_bytes: int) -> lmdb.Environment:
    while True:
        try:
            # Files of mode 0600: they may hold hashes of tokens. No read-ahead: reads are small and scattered.
            return lmdb.open(path, map_size=map_bytes, max_dbs=2, max_readers=MAX_READERS, mode=0o600, readahead=False)
        except lmdb.MemoryError as error:
            if map_bytes <= LEAST_MAP_BYTES:
                raise Busy(f"key-value store {path}: no address space of {map_bytes} bytes; see `ulimit -v`") from error
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
        return NoSpace(f"{what}: its address space is full; clear keys, or raise `ulimit -v`")
    damaged = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)
    if isinstance(error, damaged):
        return DataCorruption(f"{what}: its file is damaged or none of ours ({error.reason}); restore a backup")
    if error.code > 0:
        return translate_os_error(OSError(error.code, os.strerror(error.code)), what)
    if "closed" in str(error):
        return Aborted(f"{what}: it has been closed")
    return PermanentError(f"{what}: {error}")
