"""The file of records: one a line, appended for years by nodes that share the file, and bounded.

    append   lock ─> is it still the file of that name? ─> cut off a torn line ─> one write ─> above the limit: compact
    compact  the newest record of each node, newest others up to half of the limit ─> new file, fsync, rename

Both are done under the lock of the file itself (flock). Who has waited for the lock of a file that was replaced
meanwhile looks up the name again, so no record is appended to a file that nobody reads any more. A crash leaves the old
file or the new one; readers need no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import MIB
from fireflyer.validators.core.validation.records import MAX_RECORDS, NodeRecord, as_written

__all__ = ["MAX_RECORD_BYTES", "append_record", "first_record", "read_records"]

MAX_RECORD_BYTES: Final = 128 * MIB
"""Of a file: 18,000 records of nodes with 8 GPUs. A larger one, of an earlier release, is read from its newest ones."""
_MAX_LINE_BYTES: Final = MIB
_LOCK_S: Final = 60.0
"""For which another process may hold the lock; compacting a file takes seconds."""
_LOCK_LOOK_S: Final = 0.02
_MOST: Final = 0.5
"""Share of `MAX_RECORD_BYTES` that a file has which was compacted, ..."""
_MOST_NEWEST: Final = 0.75
"""... more only where the newest records of so many nodes need it."""
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


def read_records(path: str) -> list[NodeRecord]:
    """The newest ones that `MAX_RECORD_BYTES` and `MAX_RECORDS` allow, the oldest in front. Raises `FireflyerError`;
    names the line that is wrong."""
    lines, first, where = _newest_lines(path, MAX_RECORD_BYTES)
    return [_decoded(path, line, number, where) for number, line in enumerate(lines, first)]


def first_record(path: str) -> NodeRecord | None:
    """None: there is no such file, or it has none. Raises `FireflyerError`."""
    try:
        with open(path, "rb") as file:
            line = file.readline(_MAX_LINE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    return _decoded(path, line, 1, "") if line.endswith(b"\n") else None


def append_record(path: str, record: NodeRecord) -> None:
    """Makes the file where there is none. A file that cannot be compacted grows on, and is read from its newest
    records. Raises `FireflyerError`, a `Busy` where another process holds its lock for a minute."""
    path = os.path.realpath(path)  # a link stays, and leads to the new file
    line = msgspec.json.encode(as_written(record)) + b"\n"
    try:
        with _opened(path) as (fd, alone):
            if alone:
                _end_last_line(path, fd)
            _write(fd, line)
            if alone and os.fstat(fd).st_size > MAX_RECORD_BYTES:
                with contextlib.suppress(OSError, FireflyerError):  # the record is there
                    _compact(path, fd)
    except FireflyerError:
        raise
    except OSError as error:
        raise translate_os_error(error, f"write {path}") from error


def _newest_lines(path: str, most_bytes: int) -> tuple[Sequence[bytes], int, str]:
    """Lines, the number of the first, and of which part of the file these are numbers."""
    try:
        with open(path, "rb") as file:
            older_bytes = max(0, os.fstat(file.fileno()).st_size - most_bytes)
            if older_bytes:
                file.seek(older_bytes - 1)
                file.readline(most_bytes + 1)  # the rest of the record that begins before
            text = file.read(most_bytes)
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    lines = text[: text.rfind(b"\n") + 1].splitlines()  # a torn line is cut off by who appends next
    older = max(0, len(lines) - MAX_RECORDS)
    return lines[older:], older + 1, f" of its last {most_bytes >> 20} MiB" if older_bytes else ""


def _decoded(path: str, line: bytes, number: int, where: str) -> NodeRecord:
    try:
        return decode_json(line, NodeRecord)
    except DECODE_ERRORS as error:
        text = f"{path}, line {number}{where}: {error}; `ff validate --record` writes such lines"
        raise UsageError(text) from error


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[int, bool]]:
    """The file of that name, and whether nobody else appends to it or replaces it meanwhile. On a file system without
    locks it is appended to all the same: others cannot lock it either, so nobody compacts it."""
    ends_s = time.monotonic() + _LOCK_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            alone = _locked(path, fd, ends_s)
            if _is_at(path, fd):
                yield fd, alone
                return
        finally:
            os.close(fd)


def _locked(path: str, fd: int, ends_s: float) -> bool:
    """False: the file system has no locks."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > ends_s:
                raise Busy(f"another process holds the lock of {path}; the record was not appended") from None
            time.sleep(_LOCK_LOOK_S)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise


def _is_at(path: str, fd: int) -> bool:
    try:
        there, mine = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _end_last_line(path: str, fd: int) -> None:
    """Cuts what a process has left that died while it wrote a record: no reader would get past it. A whole record gets
    its end. Raises `UsageError` for anything else, which is of another file."""
    size = os.fstat(fd).st_size
    start = max(0, size - _MAX_LINE_BYTES)
    tail = os.pread(fd, size - start, start)
    if not tail or tail.endswith(b"\n"):
        return
    begin = tail.rfind(b"\n") + 1
    line = tail[begin:]
    try:
        decode_json(line, NodeRecord)
    except DECODE_ERRORS as error:
        if not line.startswith(b"{") or isinstance(error, msgspec.ValidationError):  # JSON of something else
            raise UsageError(
                f"{path} ends with a line that is no record; name a file that ff validate wrote"
            ) from error
        os.ftruncate(fd, start + begin)
    else:
        os.write(fd, b"\n")


def _write(fd: int, line: bytes) -> None:
    size = os.fstat(fd).st_size
    written = os.write(fd, line)
    if written < len(line):
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _compact(path: str, fd: int) -> None:
    lines, first, where = _newest_lines(path, MAX_RECORD_BYTES + _MAX_LINE_BYTES)  # all of them, but of an old file
    kept = _to_keep(path, lines, first, where)
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # of a process that died
    try:
        _write_new(new, kept, os.fstat(fd))
        os.rename(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_new(new: str, kept: Sequence[bytes], like: os.stat_result) -> None:
    """Of the same owner: who may not give it to the owner of the old file leaves this to others."""
    copy = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(copy, "wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fchmod(copy, like.st_mode & 0o777)
        if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(copy, like.st_uid, like.st_gid)
        os.fsync(copy)


def _to_keep(path: str, lines: Sequence[bytes], first: int, where: str) -> list[bytes]:
    """In their order. Nodes are compared with the newest record of each node of a model, and are due by it; older ones
    are for people."""
    seen: set[tuple[str, str]] = set()
    newest: list[int] = []
    older: list[int] = []
    for place in reversed(range(len(lines))):
        record = _decoded(path, lines[place], first + place, where)
        (older if (record.model, record.node) in seen else newest).append(place)
        seen.add((record.model, record.node))
    kept: set[int] = set()
    size = 0
    for places, most in ((newest, _MOST_NEWEST), (older, _MOST)):
        for place in places:
            size += len(lines[place]) + 1
            if size > most * MAX_RECORD_BYTES:
                break
            kept.add(place)
    return [lines[place] for place in sorted(kept)]
