"""Hashes of files that have not changed since they were read, by size, times and inode, as git's index has them.

A file that changed within `RACY_NS` of being read is not kept: it could change again in the same step of the file
system's clock. A cache that cannot be read is an empty one; a wrong hash in it is found by the store, which hashes what
it is sent.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import MIB, SECOND
from fireflyer.cluster.core.objects.blobs import BlobHash, hash_of
from fireflyer.identity.private_files import read_private_file, write_private_file

__all__ = ["RACY_NS", "Stamp", "StatCache", "stamp_of"]

RACY_NS: Final = 2 * SECOND
MAX_CACHE_BYTES: Final = 128 * MIB


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What changes when a file does. The change time cannot be set back by a program."""

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int


class _Known(msgspec.Struct, frozen=True, array_like=True):
    stamp: Stamp
    blob: BlobHash


class _CacheFile(msgspec.Struct, frozen=True, tag="fireflyer-stat-cache"):
    version: int
    directory: str
    files: dict[str, _Known]


_DECODER: Final = msgpack_decoder(_CacheFile)
VERSION: Final = 1


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


class StatCache:
    """Cache for the files of one directory. Only what was asked for or put since it was read is written again."""

    def __init__(self, path: str, directory: str) -> None:
        """`path` of the cache's own file. Reads it."""
        self._path = path
        self._directory = directory
        self._known = _read(path, directory)
        self._used: dict[str, _Known] = {}
        self._changed = False

    @classmethod
    def below(cls, cache_directory: str, directory: str) -> StatCache:
        """A file of `cache_directory`, which is made, for each directory."""
        os.makedirs(cache_directory, mode=0o700, exist_ok=True)
        name = hash_of(os.path.realpath(directory).encode(errors="surrogateescape"))[:32]
        return cls(os.path.join(cache_directory, f"{name}.stat"), os.path.realpath(directory))

    def get(self, path: str, stamp: Stamp) -> str | None:
        known = self._known.get(path)
        if known is None or known.stamp != stamp:
            return None
        self._used[path] = known
        return known.blob

    def put(self, path: str, stamp: Stamp, blob: str, read_from_ns: int) -> None:
        """`read_from_ns`: the wall time before the file was read."""
        if max(stamp.modified_ns, stamp.changed_ns) < read_from_ns - RACY_NS:
            self._used[path] = _Known(stamp, blob)
            self._changed = True

    def save(self) -> None:
        """A cache that cannot be written is none: nothing is raised."""
        if not self._changed and len(self._used) == len(self._known):
            return
        data = msgspec.msgpack.encode(_CacheFile(VERSION, self._directory, self._used))
        if len(data) > MAX_CACHE_BYTES:
            return
        try:
            write_private_file(self._path, data)
        except FireflyerError:
            pass


def _read(path: str, directory: str) -> dict[str, _Known]:
    try:
        found = _DECODER.decode(read_private_file(path, MAX_CACHE_BYTES))
    except (FireflyerError, *DECODE_ERRORS):
        return {}
    return found.files if found.version == VERSION and found.directory == directory else {}
