"""Blobs in a directory that only its owner may read: `ab/ab12…`, in 256 folders by the first two digits.

A blob is written beside them, hashed on its way, made durable, and gets its name by a rename; so a name always stands
for all of its bytes. The lock file orders renewals and removals of all processes that use the directory: `renew` and
the rename of `put` share it, `delete` has it alone between looking at a blob's time and removing it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from fireflyer.base.errors import FireflyerError, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Data
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.blobs import StoredBlob, check_hash, new_hasher
from fireflyer.cluster.objects.port import MAX_BLOB_BYTES, READ_BYTES, Objects, checked_pieces

__all__ = ["DirectoryObjects", "held_lock"]

STALE_PART_NS: Final = 24 * 3600 * SECOND
"""Parts of blobs that a process left when it was killed are removed after this."""
_PARTS: Final = "parts"
_LOCK: Final = "lock"


@contextlib.contextmanager
def held_lock(path: str, how: int) -> Iterator[int]:
    """The lock file `path`, made private, while this lasts; `how`: of flock(2). Gives its descriptor. Raises
    `BlockingIOError` where `how` says not to wait."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, how)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except FireflyerError:
        raise
    except OSError as error:
        raise translate_os_error(error, what) from error


class DirectoryObjects(Objects):
    def __init__(
        self,
        root: str,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        durable: bool = True,
        max_bytes: int = MAX_BLOB_BYTES,
    ) -> None:
        """`durable` False: for a cache, whose blobs can be had again; they are verified at each use anyway."""
        self._root = os.path.abspath(root)
        self._wall_ns = wall_ns
        self._durable = durable
        self._max_bytes = max_bytes
        with _translated(f"make the object directory {root}"):
            os.makedirs(os.path.join(self._root, _PARTS), mode=0o700, exist_ok=True)
            os.chmod(self._root, 0o700)

    def path_of(self, blob: str) -> str:
        """Path of its bytes. Nobody may write there."""
        return os.path.join(self._root, check_hash(blob)[:2], blob)

    def put(self, blob: str, size_bytes: int, pieces: Iterable[Data]) -> bool:
        path = self.path_of(blob)
        if not 0 <= size_bytes <= self._max_bytes:
            raise UsageError(f"blob {blob[:12]}… has {size_bytes} bytes; {self._max_bytes} are allowed")
        with _translated(f"put blob {blob[:12]}… into {self._root}"):
            if self._renewed(path, size_bytes):
                return False
            part = os.path.join(self._root, _PARTS, f"{blob[:12]}.{secrets.token_hex(8)}")
            try:
                self._write(part, blob, size_bytes, pieces)
                self._make_folder(os.path.dirname(path))
                with self._lock(fcntl.LOCK_SH):
                    os.rename(part, path)
                    self._set_time(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
            if self._durable:
                _sync_directory(os.path.dirname(path))
        return True

    def get(self, blob: str) -> Iterator[bytes]:
        path = self.path_of(blob)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"blob {blob[:12]}… is not in {self._root}; put it again") from None
        except OSError as error:
            raise translate_os_error(error, f"read {path}") from error
        return checked_pieces(blob, _pieces(fd, path), self._root)

    def stat(self, blob: str) -> StoredBlob:
        try:
            status = os.lstat(self.path_of(blob))
        except FileNotFoundError:
            raise NotFound(f"blob {blob[:12]}… is not in {self._root}; put it again") from None
        except OSError as error:
            raise translate_os_error(error, f"look at {self.path_of(blob)}") from error
        return StoredBlob(blob, status.st_size, status.st_mtime_ns)

    def renew(self, blobs: Sequence[str]) -> list[bool]:
        paths = [self.path_of(blob) for blob in blobs]
        with _translated(f"renew blobs in {self._root}"), self._lock(fcntl.LOCK_SH):
            return [self._set_time(path) for path in paths]

    def delete(self, blobs: Sequence[str], renewed_before_ns: int) -> list[str]:
        deleted = []
        for blob in blobs:
            path = self.path_of(blob)
            with _translated(f"remove {path}"), self._lock(fcntl.LOCK_EX), contextlib.suppress(FileNotFoundError):
                if os.lstat(path).st_mtime_ns < renewed_before_ns:
                    os.unlink(path)
                    deleted.append(blob)
        return deleted

    def discard(self, blob: str) -> None:
        path = self.path_of(blob)
        with _translated(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def list(self) -> Iterator[StoredBlob]:
        self._remove_stale_parts()
        with _translated(f"read directory {self._root}"):
            folders = sorted(name for name in os.listdir(self._root) if len(name) == 2)
        for folder in folders:
            directory = os.path.join(self._root, folder)
            with _translated(f"read directory {directory}"), os.scandir(directory) as found:
                entries = list(found)
            for one in entries:
                if not _is_blob(one.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = one.stat(follow_symlinks=False)
                    yield StoredBlob(one.name, status.st_size, status.st_mtime_ns)

    def _make_folder(self, path: str) -> None:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return
        if self._durable:
            _sync_directory(self._root)

    def _lock(self, how: int) -> contextlib.AbstractContextManager[int]:
        return held_lock(os.path.join(self._root, _LOCK), how)

    def _renewed(self, path: str, size_bytes: int) -> bool:
        """Whether the blob is there. One of another size is not: its bytes were lost with power."""
        with self._lock(fcntl.LOCK_SH):
            try:
                return os.lstat(path).st_size == size_bytes and self._set_time(path)
            except FileNotFoundError:
                return False

    def _set_time(self, path: str) -> bool:
        now_ns = self._wall_ns()
        try:
            os.utime(path, ns=(now_ns, now_ns), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _write(self, part: str, blob: str, size_bytes: int, pieces: Iterable[Data]) -> None:
        hasher = new_hasher()
        written = 0
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            for piece in pieces:
                rest = memoryview(piece).cast("B")
                written += len(rest)
                if written > size_bytes:
                    break
                hasher.update(rest)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            if self._durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        if written != size_bytes:
            more = "more than" if written > size_bytes else f"{written} of"
            raise UsageError(f"blob {blob[:12]}… has {more} {size_bytes} bytes; the file changed while it was sent")
        if hasher.hexdigest() != blob:
            raise UsageError(f"blob {blob[:12]}… has another hash than its name; the file changed while it was sent")

    def _remove_stale_parts(self) -> None:
        directory = os.path.join(self._root, _PARTS)
        with _translated(f"read directory {directory}"), os.scandir(directory) as found:
            for one in found:
                with contextlib.suppress(FileNotFoundError):
                    if one.stat(follow_symlinks=False).st_mtime_ns < time.time_ns() - STALE_PART_NS:
                        os.unlink(one.path)


def _is_blob(name: str) -> bool:
    return len(name) == 64 and not name.strip("0123456789abcdef")


def _pieces(fd: int, path: str) -> Iterator[bytes]:
    try:
        while piece := os.read(fd, READ_BYTES):
            yield piece
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    finally:
        os.close(fd)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
