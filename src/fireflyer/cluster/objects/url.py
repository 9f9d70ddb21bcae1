"""Blobs behind a URL of fsspec (`s3://bucket/fireflyer`, `ff://manager:7000/objects`, `file:///…`, `memory://…`).

A blob is written under a name of its own and moved when its bytes were checked, since not every file system makes a
file appear at once. No lock orders renewals and removals here: a blob that is renewed in the moment between the look at
its time and its removal is lost, and `SnapshotStore.seal` then asks for it again. Where a file system cannot set
times, a blob that is older than `asked_again_ns` is said to be missing, so that it is put again, which renews it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from fireflyer.base.errors import FireflyerError, NotFound, PermanentError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Data
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.blobs import StoredBlob, check_hash, new_hasher
from fireflyer.cluster.objects.directory import DirectoryObjects
from fireflyer.cluster.objects.port import MAX_BLOB_BYTES, READ_BYTES, Objects, checked_pieces

__all__ = ["UrlObjects", "fsspec_at", "modified_ns", "open_objects", "translated"]

ASKED_AGAIN_NS: Final = 3600 * SECOND
_NEVER_OLD_NS: Final = 1 << 62


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """File systems of fsspec raise what their libraries raise."""
    try:
        yield
    except FireflyerError:
        raise
    except FileNotFoundError as error:  # some have no errno
        raise NotFound(f"{what}: no such file") from error
    except OSError as error:
        raise translate_os_error(error, what) from error
    except Exception as error:
        raise PermanentError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def fsspec_at(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The file system, and the path in it. Raises `UsageError` where fsspec or what it needs is not installed."""
    try:
        import fsspec
    except ImportError:
        raise UsageError(f"{url} needs fsspec; run: pip install 'fireflyer[fsspec]'") from None
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be opened by fsspec ({error})") from None
    return fs, str(root).rstrip("/")


class UrlObjects(Objects):
    def __init__(
        self,
        url: str,
        *,
        options: dict[str, Any] | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        asked_again_ns: int = ASKED_AGAIN_NS,
        max_bytes: int = MAX_BLOB_BYTES,
    ) -> None:
        """`options`: of the file system. Raises `UsageError` where fsspec or what it needs is not installed."""
        self._fs, self._root = fsspec_at(url, options or {})
        self._url = url
        self._wall_ns = wall_ns
        self._asked_again_ns = asked_again_ns
        self._max_bytes = max_bytes
        with translated(f"make {url}"):
            self._fs.makedirs(f"{self._root}/parts", exist_ok=True)

    def put(self, blob: str, size_bytes: int, pieces: Iterable[Data]) -> bool:
        path = self._path(blob)
        if not 0 <= size_bytes <= self._max_bytes:
            raise UsageError(f"blob {blob[:12]}… has {size_bytes} bytes; {self._max_bytes} are allowed")
        with translated(f"put blob {blob[:12]}… into {self._url}"):
            if self._renewed(blob) and self.stat(blob).size_bytes == size_bytes:
                return False
            part = f"{self._root}/parts/{blob[:12]}.{secrets.token_hex(8)}"
            try:
                self._write(part, blob, size_bytes, pieces)
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                if self._fs.exists(path):
                    self._fs.rm_file(path)
                self._fs.mv(part, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(part)
                raise
            self._touched(path)
        return True

    def get(self, blob: str) -> Iterator[bytes]:
        path = self._path(blob)
        with translated(f"read blob {blob[:12]}… from {self._url}"):
            try:
                file = self._fs.open(path, "rb")
            except FileNotFoundError:
                raise NotFound(f"blob {blob[:12]}… is not in {self._url}; put it again") from None
        return checked_pieces(blob, self._pieces(file, blob), self._url)

    def stat(self, blob: str) -> StoredBlob:
        with translated(f"look at blob {blob[:12]}… in {self._url}"):
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(self._path(blob))
            except FileNotFoundError:
                raise NotFound(f"blob {blob[:12]}… is not in {self._url}; put it again") from None
            return StoredBlob(blob, int(info["size"]), modified_ns(info))

    def renew(self, blobs: Sequence[str]) -> list[bool]:
        with translated(f"renew blobs in {self._url}"):
            return [self._renewed(blob) for blob in blobs]

    def delete(self, blobs: Sequence[str], renewed_before_ns: int) -> list[str]:
        deleted = []
        for blob in blobs:
            with contextlib.suppress(NotFound), translated(f"remove blob {blob[:12]}… from {self._url}"):
                if self.stat(blob).renewed_ns < renewed_before_ns:
                    self._fs.rm_file(self._path(blob))
                    deleted.append(blob)
        return deleted

    def discard(self, blob: str) -> None:
        with contextlib.suppress(NotFound), translated(f"remove blob {blob[:12]}… from {self._url}"):
            self._fs.rm_file(self._path(blob))

    def list(self) -> Iterator[StoredBlob]:
        with translated(f"list {self._url}"):
            self._fs.invalidate_cache()
            folders = [str(one["name"]).rstrip("/") for one in self._fs.ls(self._root, detail=True)]
        for folder in sorted(folders):
            if len(folder.rpartition("/")[2]) != 2:
                continue
            with translated(f"list {folder}"):
                found = self._fs.ls(folder, detail=True)
            for info in found:
                name = str(info["name"]).rpartition("/")[2]
                if len(name) == 64 and not name.strip("0123456789abcdef"):
                    yield StoredBlob(name, int(info["size"]), modified_ns(info))

    def _path(self, blob: str) -> str:
        return f"{self._root}/{check_hash(blob)[:2]}/{blob}"

    def _renewed(self, blob: str) -> bool:
        try:
            found = self.stat(blob)
        except NotFound:
            return False
        return self._touched(self._path(blob)) or found.renewed_ns > self._wall_ns() - self._asked_again_ns

    def _touched(self, path: str) -> bool:
        """Sets the time, where the file system has a way; not every one keeps what is in the file."""
        now_ns = self._wall_ns()
        if "file" in _protocols(self._fs):
            os.utime(path, ns=(now_ns, now_ns))
            return True
        if "ff" in _protocols(self._fs):
            self._fs.files.utime(path, ns=(now_ns, now_ns))
            return True
        if "memory" in _protocols(self._fs):
            self._fs.store[path].created = datetime.fromtimestamp(now_ns / SECOND).astimezone()
            return True
        return False

    def _write(self, part: str, blob: str, size_bytes: int, pieces: Iterable[Data]) -> None:
        hasher = new_hasher()
        written = 0
        with self._fs.open(part, "wb") as file:
            for piece in pieces:
                written += len(memoryview(piece).cast("B"))
                if written > size_bytes:
                    break
                hasher.update(piece)
                file.write(piece)
            file.flush()
            if "file" in _protocols(self._fs):
                os.fsync(file.fileno())
        if written != size_bytes or hasher.hexdigest() != blob:
            raise UsageError(f"blob {blob[:12]}… has other bytes than its name; the file changed while it was sent")

    def _pieces(self, file: Any, blob: str) -> Iterator[bytes]:
        with translated(f"read blob {blob[:12]}… from {self._url}"), file:
            while piece := file.read(READ_BYTES):
                yield piece


def open_objects(where: str) -> Objects:
    """Open the objects of a directory (an absolute path) or of a URL of fsspec. Raises `UsageError`."""
    if "://" in where:
        return UrlObjects(where)
    if not os.path.isabs(where):
        raise UsageError(f"the object store {where!r} is neither an absolute path nor a URL like s3://bucket/folder")
    return DirectoryObjects(where)


def _protocols(fs: Any) -> tuple[str, ...]:
    found = fs.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def modified_ns(info: dict[str, Any]) -> int:
    """As the file system tells it: seconds, a date, or a text of one. Where it does not, nothing is old."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return int(value.timestamp() * SECOND)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value * SECOND)
    return _NEVER_OLD_NS
