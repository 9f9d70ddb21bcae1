"""Copies one file from a tree to a tree, under a temporary name that becomes the final one at the end.

What a copy goes through: `writing` (the temporary file grows), then `placed` (mode and times are set, the file is
closed, which says whether every byte is where it belongs, and renamed). Until the rename nothing at the target's name
changes, so whoever reads it sees the old file or the whole new one, whatever dies when.

Large files are synced every `SYNC_BYTES`, and the temporary name says so (`partial`): the same copy, begun again,
goes on there. Small ones are removed when they fail: copying them again costs less than looking for them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from fireflyer.base.errors import Aborted, PermanentError
from fireflyer.base.units import MIB
from fireflyer.fs.tools.partial import Partial, alive, key_of, me, parse_partial
from fireflyer.fs.tools.trees import Attributes, CopyTree, OpenFile, join

__all__ = ["BLOCK_BYTES", "RESUME_BYTES", "SYNC_BYTES", "CopyOptions", "copy_file", "copy_link", "same_content"]
__all__ += ["place_attributes", "umask"]

BLOCK_BYTES: Final = 4 * MIB
RESUME_BYTES: Final = 64 * MIB
"""Files of this size and more are taken up again where they were interrupted."""
SYNC_BYTES: Final = 256 * MIB
_serial = itertools.count(1)


class CopyOptions(msgspec.Struct, frozen=True):
    mode: bool = False
    """Keep the permission bits; else those of the target that is replaced, or of the source less the umask."""
    times: bool = False
    owner: bool = False
    """Where that is permitted; where not, set-user-id and set-group-id are not kept either."""
    source_name: str = ""
    """Tells sources of different trees apart, for what is taken up again."""
    resume_bytes: int = RESUME_BYTES
    sync_bytes: int = SYNC_BYTES


class _Copy:
    """One file on its way."""

    def __init__(
        self,
        source: CopyTree,
        path: str,
        target: CopyTree,
        place: str,
        options: CopyOptions,
        stopped: threading.Event | None,
        advanced: Callable[[int], None] | None,
    ) -> None:
        self._source, self._path = source, path
        self._target, self._place = target, place
        self._options = options
        self._stopped, self._advanced = stopped, advanced
        self._directory = posixpath.dirname(place)
        self._attributes = source.stat(path)
        key = key_of(posixpath.basename(place), options.source_name + path, self._attributes)
        self._partial = Partial(key, me(next(_serial)), 0)
        self._resumable = self._attributes.st_size >= options.resume_bytes

    def run(self) -> None:
        try:
            self._copy()
        except OSError as error:
            if error.filename == self._temporary:
                error.filename = self._place
            raise

    def _copy(self) -> None:
        if not stat.S_ISREG(self._attributes.st_mode):
            number = errno.EISDIR if stat.S_ISDIR(self._attributes.st_mode) else errno.EINVAL
            raise OSError(number, "is a directory" if number == errno.EISDIR else "is not a regular file", self._path)
        mode = self._mode_of_target()
        begun = self._begun() if self._resumable else 0
        file = self._target.open(self._temporary, "r+b" if begun else "xb", permissions=0o600)
        try:
            try:
                if begun:
                    file.truncate(begun)
                self._write(file, begun)
            finally:
                # What cannot be closed may lack bytes: `_leave` then finds that the file is shorter than it said.
                file.close()
            self._check_source()
            place_attributes(self._target, self._temporary, self._attributes, self._options, mode=mode)
            self._target.rename(self._temporary, self._place)
        except BaseException as error:
            self._leave(error)
            raise

    @property
    def _temporary(self) -> str:
        return join(self._directory, self._partial.name)

    def _mode_of_target(self) -> int | None:
        try:
            there = self._target.stat(self._place, False)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, "the target is a directory", self._place)
        if not stat.S_ISREG(there.st_mode) and not stat.S_ISLNK(there.st_mode):
            raise FileExistsError(errno.EEXIST, "the target exists and is not a regular file", self._place)
        # Not the set-user-id of somebody else's file: the new one is ours.
        return stat.S_IMODE(there.st_mode) & 0o777 if stat.S_ISREG(there.st_mode) else None

    def _begun(self) -> int:
        """How many bytes an earlier copy has synced; its file is ours then."""
        for entry in self._target.scandir(self._directory):
            found = parse_partial(entry.name)
            if found is None or found.key != self._partial.key or alive(found.owner):
                continue
            taken = msgspec.structs.replace(self._partial, synced_bytes=found.synced_bytes)
            if not 0 < found.synced_bytes <= min(entry.attributes.st_size, self._attributes.st_size):
                continue
            if not self._is_ours(entry.attributes):
                continue
            try:
                self._target.rename(join(self._directory, entry.name), join(self._directory, taken.name))
            except FileNotFoundError:  # another one has taken it
                continue
            self._partial = taken
            return found.synced_bytes
        return 0

    def _is_ours(self, found: Attributes) -> bool:
        """Whoever may write in the directory can put a file, or a link, under the name of one that goes on. The tree
        says whose files are ours: of a cluster this machine does not know."""
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            return False
        probe = join(self._directory, self._partial.name)
        self._target.open(probe, "xb", permissions=0o600).close()
        try:
            return self._target.stat(probe, False).st_uid == found.st_uid
        finally:
            self._target.unlink(probe)

    def _write(self, file: OpenFile, begun: int) -> None:
        reader = self._source.open(self._path, "rb")
        try:
            reader.seek(begun)
            file.seek(begun)
            if begun and self._advanced is not None:
                self._advanced(begun)
            at = begun
            for piece in _pieces(reader):
                if self._stopped is not None and self._stopped.is_set():
                    raise Aborted("interrupted")
                _write_all(file, piece)
                at += len(piece)
                if self._advanced is not None:
                    self._advanced(len(piece))
                if self._resumable and at - self._partial.synced_bytes >= self._options.sync_bytes:
                    self._make_sure(file, at)
            if self._resumable:
                file.fsync()
        except BaseException:
            if self._resumable:
                with contextlib.suppress(Exception):
                    self._make_sure(file, file.tell())
            raise
        finally:
            reader.close()

    def _make_sure(self, file: OpenFile, at: int) -> None:
        file.fsync()
        self._become(msgspec.structs.replace(self._partial, synced_bytes=at))

    def _become(self, partial: Partial) -> None:
        self._target.rename(self._temporary, join(self._directory, partial.name))
        self._partial = partial

    def _check_source(self) -> None:
        now = self._source.stat(self._path)
        was = self._attributes
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (was.st_ino, was.st_size, was.st_mtime_ns):
            self._resumable = False
            raise PermanentError(f"{self._path}: changed while it was copied; copy it again when nothing writes it")

    def _leave(self, error: BaseException) -> None:
        """What was written stays when it can be used again. The first error is the one to be heard."""
        useful = self._resumable and self._partial.synced_bytes > 0
        spent = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        with contextlib.suppress(Exception):
            if useful and not spent:
                self._become(self._partial.free())
            else:
                self._target.unlink(self._temporary)


def copy_file(
    source: CopyTree,
    path: str,
    target: CopyTree,
    place: str,
    *,
    options: CopyOptions | None = None,
    stopped: threading.Event | None = None,
    advanced: Callable[[int], None] | None = None,
) -> None:
    """Copies the regular file `path` of `source` (a symbolic link is followed) to `place`, replacing what is no
    directory. `advanced` is told how many bytes more have been copied, first those that were there already.

    Raises `OSError`; `PermanentError` when the source changed meanwhile; `Aborted` soon after `stopped` was set. Then
    nothing has changed at `place`, and the same call goes on where this one ended, for files of
    `options.resume_bytes` and more."""
    _Copy(source, path, target, place, options or CopyOptions(), stopped, advanced).run()


def copy_link(source: CopyTree, path: str, target: CopyTree, place: str) -> None:
    """Makes `place` the same symbolic link, replacing what is no directory."""
    wanted = source.readlink(path)
    directory = posixpath.dirname(place)
    temporary = join(directory, Partial(key_of(place, path, source.stat(path, False)), me(next(_serial)), 0).name)
    try:
        target.symlink(wanted, temporary)
        try:
            target.rename(temporary, place)
        except BaseException:
            with contextlib.suppress(OSError):
                target.unlink(temporary)
            raise
    except OSError as error:
        error.filename = place
        raise


def place_attributes(
    target: CopyTree, place: str, attributes: Attributes, options: CopyOptions, *, mode: int | None = None
) -> None:
    """`mode`: of what was there, used where the options do not say that the source's is kept. Set-user-id and
    set-group-id of a file are kept only with its owner: a program of somebody else would otherwise act as us."""
    owned = options.owner or stat.S_ISDIR(attributes.st_mode)
    if options.owner:
        try:
            target.chown(place, attributes.st_uid, attributes.st_gid, False)
        except PermissionError:
            owned = False  # who may not give files away keeps them, and nobody acts as the owner by them
    if options.mode:
        mode = stat.S_IMODE(attributes.st_mode) & (0o7777 if owned else 0o1777)
    elif mode is None:
        mode = stat.S_IMODE(attributes.st_mode) & 0o777 & ~umask()
    target.chmod(place, mode)
    if options.times:
        target.utime(place, ns=(attributes.st_atime_ns, attributes.st_mtime_ns))


def umask() -> int:
    """Of this process, which only /proc tells without changing it."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def same_content(
    source: CopyTree, path: str, target: CopyTree, place: str, *, stopped: threading.Event | None = None
) -> bool:
    first, second = source.open(path, "rb"), target.open(place, "rb")
    try:
        for one, other in itertools.zip_longest(_pieces(first), _pieces(second)):
            if stopped is not None and stopped.is_set():
                raise Aborted("interrupted")
            if one is None or other is None or one != other:
                return False
        return True
    finally:
        first.close()
        second.close()


def _pieces(file: OpenFile) -> Iterator[memoryview]:
    """Full blocks but for the last: a read may give less than it was asked for before the end. The memory is used
    again for the next."""
    block = memoryview(bytearray(BLOCK_BYTES))
    while True:
        filled = 0
        while filled < BLOCK_BYTES:
            count = file.readinto(block[filled:])
            if not count:
                break
            filled += count
        if filled:
            yield block[:filled]
        if filled < BLOCK_BYTES:
            return


def _write_all(file: OpenFile, piece: memoryview) -> None:
    while piece:
        written = file.write(piece)
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        piece = piece[written:]
