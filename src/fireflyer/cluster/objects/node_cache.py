"""Snapshots on a node: blobs are fetched once, verified at each use, and copied into a directory for each run.

A run gets files of its own, by FICLONE where the file system shares blocks (XFS, btrfs), else by copying. Hard links
would be faster, and wrong: user code that writes into one of its files would change the blob for all later runs, of
other users, too.

The directory appears complete or not at all: it is made under a name of its own, which nobody else may enter, and
renamed. Several processes may use one cache. Who materialises a snapshot says so by a locked file in `in-use`, with the
manifest: blobs of these are not evicted. Of several who want the same snapshot one fetches, the others wait for its
lock. Directories named `*.part` were left by a process that was killed: who makes the directories of runs removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from fireflyer.base.errors import DataCorruption, Exists, FireflyerError, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Data
from fireflyer.base.units import GIB
from fireflyer.cluster.core.objects.blobs import check_hash, hash_of, new_hasher
from fireflyer.cluster.core.objects.collection import choose_evicted
from fireflyer.cluster.core.objects.manifest import (
    MANIFEST_LIMITS,
    MAX_MANIFEST_BYTES,
    DirectoryEntry,
    FileEntry,
    LinkEntry,
    Manifest,
    ManifestLimits,
    blobs_of,
    decode_manifest,
)
from fireflyer.cluster.objects.directory import DirectoryObjects, held_lock
from fireflyer.cluster.objects.port import read_blob

__all__ = ["DEFAULT_CACHE_BYTES", "Fetch", "NodeCache"]

DEFAULT_CACHE_BYTES: Final = 64 * GIB
FICLONE: Final = 0x40049409
"""linux/fs.h"""
_COPY_BYTES: Final = 1 << 20

Fetch = Callable[[str, int], Iterable[Data]]
"""The bytes of a blob, by name and size, from the manager. Need not be verified: the cache does."""


class NodeCache:
    def __init__(
        self,
        root: str,
        *,
        max_bytes: int = DEFAULT_CACHE_BYTES,
        limits: ManifestLimits = MANIFEST_LIMITS,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Of the directory `root`, which only this user may read."""
        self._root = os.path.abspath(root)
        self._max_bytes = max_bytes
        self._limits = limits
        self._blobs = DirectoryObjects(os.path.join(self._root, "blobs"), durable=False, wall_ns=wall_ns)
        self._shares_blocks = True
        try:
            for name in ("in-use", "fetching"):
                os.makedirs(os.path.join(self._root, name), mode=0o700, exist_ok=True)
            os.chmod(self._root, 0o700)
        except OSError as error:
            raise translate_os_error(error, f"make the cache {root}") from error

    def materialise(
        self, snapshot: str, target: str, fetch: Fetch, *, account: tuple[int, int] | None = None
    ) -> Manifest:
        """Makes the directory `target`, which must not exist, with all files of the snapshot. Blocks.

        `account`: the uid and gid that own everything (needs root). The parent of `target` must not be theirs. Raises
        what `fetch` raises, `Exists`, `NoSpace`, `UsageError` for a manifest that is refused, `DataCorruption` where
        `fetch` gives other bytes.
        """
        check_hash(snapshot)
        if os.path.lexists(target):
            raise Exists(f"{target} exists already; choose another directory")
        data = self._manifest(snapshot, fetch)
        manifest = decode_manifest(data, self._limits)
        with self._in_use(snapshot, data):
            with held_lock(os.path.join(self._root, "fetching", snapshot[:16]), fcntl.LOCK_EX):
                self._fetch_missing(manifest, fetch)
            part = f"{target}.{secrets.token_hex(8)}.part"
            try:
                self._build(manifest, part, fetch, account)
                os.rename(part, target)
            except OSError as error:
                raise translate_os_error(error, f"materialise {target}") from error
            finally:
                _remove_tree(part)
        return manifest

    def manifest(self, snapshot: str, fetch: Fetch) -> Manifest:
        """Raises as `materialise` does."""
        return decode_manifest(self._manifest(check_hash(snapshot), fetch), self._limits)

    def used_bytes(self) -> int:
        return sum(one.size_bytes for one in self._blobs.list())

    def _manifest(self, snapshot: str, fetch: Fetch) -> bytes:
        with contextlib.suppress(NotFound, DataCorruption):
            data = read_blob(self._blobs, snapshot, MAX_MANIFEST_BYTES)
            self._blobs.renew([snapshot])
            return data
        self._blobs.discard(snapshot)
        data = _bounded(fetch(snapshot, MAX_MANIFEST_BYTES), MAX_MANIFEST_BYTES)
        if hash_of(data) != snapshot:
            raise DataCorruption(f"the manifest of snapshot {snapshot[:12]}… has other bytes; fetch it again")
        self._make_room({snapshot: len(data)})
        self._blobs.put(snapshot, len(data), [data])
        return data

    def _fetch_missing(self, manifest: Manifest, fetch: Fetch) -> None:
        blobs = blobs_of(manifest)
        names = list(blobs)
        missing = [blob for blob, there in zip(names, self._blobs.renew(names), strict=True) if not there]
        if missing:
            self._make_room({blob: blobs[blob] for blob in missing})
        for blob in missing:
            self._fetch(blob, blobs[blob], fetch)

    def _fetch(self, blob: str, size_bytes: int, fetch: Fetch) -> None:
        try:
            self._blobs.put(blob, size_bytes, fetch(blob, size_bytes))
        except UsageError as error:  # the source's fault, not the caller's
            raise DataCorruption(f"blob {blob[:12]}… was fetched with other bytes than its name; try again") from error

    def _make_room(self, needed: dict[str, int]) -> None:
        """For these, and for what others who use the cache are fetching now."""
        with held_lock(os.path.join(self._root, "lock"), fcntl.LOCK_EX):
            in_use = self._blobs_in_use()
            cached = list(self._blobs.list())
            awaited = {**in_use, **needed}
            for one in cached:
                awaited.pop(one.blob, None)
            evicted = choose_evicted(cached, in_use, sum(awaited.values()), self._max_bytes)
            self._blobs.delete(evicted, 1 << 62)

    @contextlib.contextmanager
    def _in_use(self, snapshot: str, data: bytes) -> Iterator[None]:
        """A lock ends with the process that holds it, however it ends."""
        path = os.path.join(self._root, "in-use", f"{snapshot}.{secrets.token_hex(8)}")
        with contextlib.ExitStack() as stack:
            try:
                with held_lock(os.path.join(self._root, "lock"), fcntl.LOCK_EX):
                    fd = stack.enter_context(held_lock(path, fcntl.LOCK_SH))
                    _write_all(fd, data)
            except OSError as error:
                raise translate_os_error(error, f"write {path}") from error
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _blobs_in_use(self) -> dict[str, int]:
        directory = os.path.join(self._root, "in-use")
        found: dict[str, int] = {}
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            try:
                with held_lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    os.unlink(path)  # of a process that was killed
            except BlockingIOError:
                found.update(self._blobs_named(path))
            except OSError as error:
                raise translate_os_error(error, f"lock {path}") from error
        return found

    def _blobs_named(self, path: str) -> dict[str, int]:
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            return {}
        return {os.path.basename(path).partition(".")[0]: len(data), **blobs_of(decode_manifest(data, self._limits))}

    def _build(self, manifest: Manifest, part: str, fetch: Fetch, account: tuple[int, int] | None) -> None:
        os.mkdir(part, 0o700)
        directories = [part]
        for entry in manifest.entries:
            path = os.path.join(part, entry.path)
            if type(entry) is DirectoryEntry:
                os.mkdir(path, 0o700)
                directories.append(path)
            elif type(entry) is FileEntry:
                self._copy(entry, path, fetch, account)
        for entry in manifest.entries:  # links last: nothing above was made through one
            if type(entry) is LinkEntry:
                path = os.path.join(part, entry.path)
                os.symlink(entry.target, path)
                if account is not None:
                    os.chown(path, *account, follow_symlinks=False)
        modes = {entry.path: entry.mode for entry in manifest.entries if type(entry) is DirectoryEntry}
        for path in reversed(directories):  # from the leaves up: what has its owner is entered no more
            os.chmod(path, modes.get(path[len(part) + 1 :], 0o700))
            if account is not None:
                os.chown(path, *account)

    def _copy(self, entry: FileEntry, path: str, fetch: Fetch, account: tuple[int, int] | None) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                self._fill(fd, entry)
            except (DataCorruption, NotFound):
                self._blobs.discard(entry.blob)
                self._fetch(entry.blob, entry.size_bytes, fetch)
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
                self._fill(fd, entry)
            os.fchmod(fd, entry.mode)
            if account is not None:
                os.fchown(fd, *account)
        finally:
            os.close(fd)

    def _fill(self, fd: int, entry: FileEntry) -> None:
        """The copy is what is verified, so that nothing can change between."""
        if not (entry.size_bytes and self._shares_blocks and self._cloned(fd, entry.blob)):
            for piece in self._blobs.get(entry.blob):
                _write_all(fd, piece)
            return
        hasher = new_hasher()
        while piece := os.read(fd, _COPY_BYTES):
            hasher.update(piece)
        if hasher.hexdigest() != entry.blob:
            raise DataCorruption(f"blob {entry.blob[:12]}… in {self._root} has other bytes than were fetched")

    def _cloned(self, fd: int, blob: str) -> bool:
        try:
            source = os.open(self._blobs.path_of(blob), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.ioctl(fd, FICLONE, source)
        except OSError:
            self._shares_blocks = False  # another file system, or one that cannot
            return False
        finally:
            os.close(source)
        return True


def _bounded(pieces: Iterable[Data], max_bytes: int) -> bytes:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > max_bytes:
            raise DataCorruption(f"a manifest was fetched that is longer than {max_bytes} bytes; fetch it again")
    return bytes(data)


def _write_all(fd: int, data: Data) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(fd, rest) :]


def _remove_tree(path: str) -> None:
    with contextlib.suppress(FireflyerError, OSError):
        shutil.rmtree(path)
