"""Where shards lie, chosen by the path: `ff://…` in 3FS, anything else in a directory of this machine.

Both are read by the same calls: `read_batch` of many (file, offset, buffer) at once. In 3FS that is one call of the
native client; in a directory, also of a mount, it is a `preadv` for each.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

from fireflyer.base.errors import DataCorruption, PermanentError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Disk
from fireflyer.data.files import default_disk
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.tools.addresses import SCHEME
from fireflyer.fs.tools.trees import Attributes, LocalTree, join

__all__ = ["Files", "Place", "disk_of", "place_of", "read_all", "read_whole", "translated"]

ATTEMPTS: Final = 4
"""Of a read of 3FS, each of which lasts as long as its client tries every replica (30 s): in two minutes a storage node
that had the only replica has been started again."""


class Files(Protocol):
    """What readers of shards need of a file system. Raises `OSError`."""

    def stat(self, path: str, follow: bool = True) -> Attributes: ...
    def open_file(self, path: str, flags: int = os.O_RDONLY) -> Any: ...
    def read_batch(self, reads: Sequence[tuple[Any, int, memoryview]]) -> list[int]: ...


class Place(NamedTuple):
    files: Files
    path: str
    """There."""
    name: str
    """For messages: the absolute path, or the URL."""
    remote: bool

    def below(self, name: str) -> Place:
        return self._replace(path=join(self.path, name), name=join(self.name, name))


def place_of(path: str, *, token_file: str | None = None) -> Place:
    """Connects to the cluster that `ff://…` names; the connection is this process's. Raises `UsageError`, and what
    connecting raises. `token_file`: of a user, where the URL names managers."""
    if path.startswith(SCHEME):
        from fireflyer.fs.tools.connections import at

        found = at(path, token_file=token_file)
        return Place(found.files, found.path, found.url, remote=True)
    absolute = os.path.abspath(path)
    return Place(LocalTree(), absolute, absolute, remote=False)


def disk_of(path: str, *, disk: Disk | None = None, token_file: str | None = None) -> tuple[Disk, str, str]:
    """For writing: the disk, the path there, and its name for messages. `disk`: on which `path` is, instead of what
    `path` says."""
    if disk is None and path.startswith(SCHEME):
        from fireflyer.fs.client.files.disk import FileSystemDisk
        from fireflyer.fs.client.files.file_system import FileSystem
        from fireflyer.fs.tools.connections import at

        found = at(path, token_file=token_file)
        prefix = found.url.removesuffix(found.path)
        return FileSystemDisk(cast("FileSystem", found.files), prefix), found.path, found.url
    absolute = os.path.abspath(path)
    return default_disk(disk), absolute, absolute


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of either file system as the classes of `fireflyer.base.errors`."""
    try:
        yield
    except FileError as error:
        if error.errno in (errno.EIO, None):
            raise PermanentError(f"{what}: {error.message}") from error
        raise translate_os_error(OSError(error.errno, error.message), what) from error
    except OSError as error:
        raise translate_os_error(error, what) from error


def read_all(files: Files, reads: Sequence[tuple[Any, int, memoryview]]) -> list[int]:
    """`files.read_batch`, again where 3FS gave up: a read changes nothing, and its next attempt may find a replica."""
    for _ in range(ATTEMPTS - 1):
        try:
            return files.read_batch(reads)
        except FileError as error:
            if error.errno not in (errno.EIO, errno.ETIMEDOUT, errno.EAGAIN):
                raise
    return files.read_batch(reads)


def read_whole(place: Place, max_bytes: int) -> bytes:
    """A small file. Raises `NotFound`, and `DataCorruption` if it is larger than such a file ever is."""
    with translated(f"read {place.name}"):
        size = place.files.stat(place.path).st_size
        if size > max_bytes:
            raise DataCorruption(
                f"{place.name}: {size} bytes, valid files have at most {max_bytes}; restore it from a copy"
            )
        file = place.files.open_file(place.path)
        try:
            data = bytearray(size)
            (count,) = read_all(place.files, [(file, 0, memoryview(data))])
            return bytes(data[:count])
        finally:
            file.close()
