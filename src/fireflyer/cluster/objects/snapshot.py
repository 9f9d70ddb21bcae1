"""From a directory to the manifest of its snapshot. Files that have not changed since the last time are not read.

Links are kept as links: nothing outside of the directory is read. What is no file, directory or link is an error.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Final

from fireflyer.base.errors import Busy, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.core.objects.blobs import new_hasher
from fireflyer.cluster.core.objects.manifest import (
    MANIFEST_LIMITS,
    DirectoryEntry,
    Entry,
    FileEntry,
    LinkEntry,
    Manifest,
    ManifestLimits,
    make_manifest,
)
from fireflyer.cluster.objects.ignore import Rules, default_rules, rules_below
from fireflyer.cluster.objects.stat_cache import StatCache, stamp_of

__all__ = ["PIECE_BYTES", "open_pieces", "take_snapshot"]

PIECE_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 128
ATTEMPTS: Final = 3
"""To read a file that changes while it is read."""


def take_snapshot(
    directory: str,
    *,
    cache: StatCache | None = None,
    ignore: Sequence[str] = (),
    git_ignore: bool = False,
    limits: ManifestLimits = MANIFEST_LIMITS,
) -> Manifest:
    """The manifest of `directory`. `ignore`: rules beside those in its files. Blocks.

    Raises `UsageError` for what cannot be in a snapshot or is too much, `Busy` for a file that is being written,
    `NotFound`, `PermissionDenied`.
    """
    scan = _Scan(directory, cache, limits)
    entries = list(scan.entries("", default_rules(ignore, git=git_ignore), 0))
    manifest = make_manifest(entries, limits)
    if cache is not None:
        cache.save()
    return manifest


class _Scan:
    def __init__(self, root: str, cache: StatCache | None, limits: ManifestLimits) -> None:
        self._root = root
        self._cache = cache
        self._limits = limits
        self._count = 0
        self._bytes = 0

    def entries(self, path: str, rules: Rules, depth: int) -> Iterator[Entry]:
        directory = os.path.join(self._root, path) if path else self._root
        if depth > MAX_DEPTH:
            raise UsageError(f"{directory} is more than {MAX_DEPTH} directories deep; ignore some in .ffignore")
        found = _scanned(directory)
        rules = rules_below(rules, directory, path, [one.name for one in found])
        for one in found:
            below = f"{path}/{one.name}" if path else one.name
            is_directory = one.is_dir(follow_symlinks=False)
            if rules.ignores(below, is_directory):
                continue
            self._counted()
            if is_directory:
                yield DirectoryEntry(below, _status(one).st_mode & 0o777 | 0o700)
                yield from self.entries(below, rules, depth + 1)
            elif one.is_symlink():
                yield LinkEntry(below, _target(one.path))
            else:
                yield self._file(one, below)

    def _counted(self) -> None:
        """An error while it is found, not after everything has been read."""
        self._count += 1
        if self._count > self._limits.entries:
            raise UsageError(
                f"{self._root} has more than {self._limits.entries} files; name those that are not needed in .ffignore"
            )

    def _check_size(self, path: str, size_bytes: int) -> None:
        """Before it is read. The manifest has the words for it."""
        self._bytes += size_bytes
        if size_bytes > self._limits.file_bytes:
            make_manifest([FileEntry(os.path.basename(path), 0, size_bytes, "0" * 64)], self._limits)
        elif self._bytes > self._limits.total_bytes:
            make_manifest([FileEntry("files", 0, self._bytes, "0" * 64)], self._limits._replace(file_bytes=self._bytes))

    def _file(self, one: os.DirEntry[str], path: str) -> FileEntry:
        status = _status(one)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{one.path} is no file, directory or link; ignore it in .ffignore")
        self._check_size(path, status.st_size)
        stamp = stamp_of(status)
        blob = self._cache.get(path, stamp) if self._cache is not None else None
        mode = status.st_mode & 0o777 | 0o600
        if blob is not None:
            return FileEntry(path, mode, status.st_size, blob)
        started_ns = time.time_ns()
        read, blob = _hashed(one.path)
        if self._cache is not None:
            self._cache.put(path, stamp_of(read), blob, started_ns)
        return FileEntry(path, mode, read.st_size, blob)


def _scanned(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError as error:
        raise translate_os_error(error, f"read directory {directory}") from error


def _status(one: os.DirEntry[str]) -> os.stat_result:
    try:
        return one.stat(follow_symlinks=False)
    except OSError as error:
        raise translate_os_error(error, f"look at {one.path}") from error


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError as error:
        raise translate_os_error(error, f"read link {path}") from error


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise translate_os_error(error, f"read {path} (ignore it in .ffignore if it is not needed)") from error


def _hashed(path: str) -> tuple[os.stat_result, str]:
    for _ in range(ATTEMPTS):
        fd = _open(path)
        try:
            before = os.fstat(fd)
            hasher = new_hasher()
            while piece := os.read(fd, PIECE_BYTES):
                hasher.update(piece)
            if stamp_of(os.fstat(fd)) == stamp_of(before):
                return before, hasher.hexdigest()
        except OSError as error:
            raise translate_os_error(error, f"read {path}") from error
        finally:
            os.close(fd)
    raise Busy(f"{path} is being written; wait until it is complete, or ignore it in .ffignore")


def open_pieces(directory: str, path: str) -> Iterator[bytes]:
    """The bytes of a file of a snapshot, to be sent. Raises `FireflyerError`."""
    full = os.path.join(directory, path)
    fd = _open(full)
    try:
        while piece := os.read(fd, PIECE_BYTES):
            yield piece
    except OSError as error:
        raise translate_os_error(error, f"read {full}") from error
    finally:
        os.close(fd)
