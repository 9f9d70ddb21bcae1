"""What the embedded store has committed since LMDB's file was synced: a commit waits for the disk once, not twice.

    append(record) ── one write and one sync ──> answered; LMDB writes the same into the page cache, and syncs nothing
    switch(metas)  ── LMDB was synced ──> the other segment begins, with the pages to which LMDB's file can go back

Pages that LMDB has not synced reach the disk in any order, so after a power cut its file may be torn anywhere, and its
two first pages, which say where everything is, may point to what never arrived. But what they pointed to at the last
switch is whole: it was synced then, and a reader that is open since then keeps LMDB from using any of those pages
again. So each segment begins with these two pages as they were. Opening a store writes them back, which makes it what
it was at the switch, and does again all that is recorded since.

A file of two segments, used in turn. The newer one that has a whole header is in force: a switch is done when its
header is synced, and nothing is recorded in that segment before. A record begins at a multiple of `BLOCK_BYTES`, so
writing one never touches a block of another. It carries its segment's number and a checksum: what was there before, and
what was torn when the power went, is none. Nobody was told of that one, since the sync had not returned. What is too
large for a segment lies in a file beside it, which is synced first; the journal is switched when it is committed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.decoding import msgpack_decoder
from fireflyer.base.errors import DataCorruption, PermanentError
from fireflyer.base.units import MIB
from fireflyer.kvstore.core.keys import KeyRange
from fireflyer.kvstore.core.overlay import Mutations

__all__ = ["BLOCK_BYTES", "NAME", "SEGMENT_BYTES", "Journal", "Record"]

NAME: Final = "journal"
LARGE_NAME: Final = "journal.large"
SEGMENT_BYTES: Final = 4 * MIB
BLOCK_BYTES: Final = 4096
_MAGIC: Final = b"ffkvjrn1"
_HEADER: Final = struct.Struct("<8sQII")
"""Magic, number of the segment, bytes of the pages, checksum of number and pages."""
_RECORD: Final = struct.Struct("<IIQQ")
"""Bytes, checksum of the rest, number of the segment, version."""
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgpack_decoder(list[tuple[list[KeyRange], list[tuple[bytes, bytes | None]]]]).decode
_LARGE: Final = struct.Struct("<cQI")
"""In the place of a batch: that lies in the other file. `_LARGE_MARK`, bytes, checksum."""
_LARGE_MARK: Final = b"L"
"""No batch begins so."""
_UNDONE: Final = b""
"""In the place of a batch: the record before this one counts as not there."""


class Record(NamedTuple):
    version: int
    batch: Sequence[Mutations]


class Journal:
    """`path`: of the store. Made if it is not there; then `pages` is None, as it is until the first `switch`. Raises
    `OSError`, `DataCorruption`."""

    def __init__(self, path: str, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._path = path
        self._segment_bytes = segment_bytes
        self._fd = os.open(os.path.join(path, NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.pages: bytes | None = None
        """The first ones of LMDB's file, as they were at the last switch."""
        self._number = 0
        self._segment = 1
        self._at = 0
        """Of the next record, in the segment."""
        try:
            os.posix_fallocate(self._fd, 0, 2 * segment_bytes)
            for segment in range(2):
                self._read_header(segment)
            self._check_header()
        except BaseException:
            os.close(self._fd)
            raise

    def _read_header(self, segment: int) -> None:
        start = segment * self._segment_bytes
        raw = os.pread(self._fd, _HEADER.size, start)
        magic, number, size, checksum = _HEADER.unpack(raw)
        if magic != _MAGIC or number <= self._number or size > self._segment_bytes - _HEADER.size:
            return
        pages = os.pread(self._fd, size, start + _HEADER.size)
        if _checksum(number, pages) == checksum:
            self._number, self._segment, self.pages = number, segment, pages
            self._at = _aligned(_HEADER.size + size)

    def _check_header(self) -> None:
        """A segment is recorded in when its header is synced. So one with a record, and without a header, had one, and
        pages to which the older one goes back may have been used again. Raises `DataCorruption`."""
        if self.pages is not None and self._read_record(1 - self._segment, self._at, self._number + 1) is not None:
            raise DataCorruption(f"key-value store {self._path}: the journal header is damaged; restore a backup")

    def records(self) -> list[Record]:
        """Since the last switch. The next one is written behind them. Raises `DataCorruption`."""
        found: list[tuple[int, bytes]] = []
        while (record := self._read_record(self._segment, self._at, self._number)) is not None:
            version, body, size = record
            self._at += size
            if body == _UNDONE:
                if not found:
                    raise DataCorruption("key-value store: the journal has no record to undo")
                found.pop()
            else:
                found.append((version, body))
        return [self._decoded(version, body) for version, body in found]

    def _decoded(self, version: int, body: bytes) -> Record:
        if body[:1] == _LARGE_MARK:
            _, size, checksum = _LARGE.unpack(body)
            with open(os.path.join(self._path, LARGE_NAME), "rb") as file:
                body = file.read(size)
            if _checksum(version, body) != checksum:
                raise DataCorruption(
                    f"key-value store {self._path}: the journal of large batches is damaged; restore a backup"
                )
        return Record(version, [Mutations(tuple(cleared), tuple(writes)) for cleared, writes in _DECODE(body)])

    def _read_record(self, segment: int, at: int, wanted: int) -> tuple[int, bytes, int] | None:
        start = segment * self._segment_bytes + at
        left = self._segment_bytes - at - _RECORD.size
        if left < 0:
            return None
        size, checksum, number, version = _RECORD.unpack(os.pread(self._fd, _RECORD.size, start))
        if number != wanted or size > left:
            return None
        body = os.pread(self._fd, size, start + _RECORD.size)
        if _checksum(number, version.to_bytes(8, "little"), body) != checksum:
            return None
        return version, body, _aligned(_RECORD.size + size)

    def append(self, version: int, body: bytes) -> None:
        """Durable when it returns. `fits` has said so, or it was switched just now. Raises `PermanentError`: then it
        may be there or not; `OSError`: it is not."""
        if not self.fits(body):
            body = self._put_aside(version, body)
        checksum = _checksum(self._number, version.to_bytes(8, "little"), body)
        head = _RECORD.pack(len(body), checksum, self._number, version)
        try:
            _write(self._fd, head + body, self._segment * self._segment_bytes + self._at)
            os.fdatasync(self._fd)
        except OSError as error:
            raise PermanentError(f"key-value store: the journal cannot be written: {error}") from error
        self._at += _aligned(len(head) + len(body))

    def _put_aside(self, version: int, body: bytes) -> bytes:
        fd = os.open(os.path.join(self._path, LARGE_NAME), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, len(body))
            _write(fd, body, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        directory = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return _LARGE.pack(_LARGE_MARK, len(body), _checksum(version, body))

    def undo(self, version: int) -> None:
        """The last record was not carried out, and nobody may find it again. Raises `PermanentError`."""
        self.append(version, _UNDONE)

    def fits(self, body: bytes) -> bool:
        """... and what takes it back."""
        undone = BLOCK_BYTES if body else 0
        return self._at + _aligned(_RECORD.size + len(body)) + undone <= self._segment_bytes

    def switch(self, pages: bytes) -> None:
        """LMDB's file is synced, begins with `pages`, and what they point to stays until the next switch. Durable when
        it returns; the records before it are gone. Raises `OSError`."""
        number, segment = self._number + 1, 1 - self._segment
        header = _HEADER.pack(_MAGIC, number, len(pages), _checksum(number, pages))
        _write(self._fd, header + pages, segment * self._segment_bytes)
        os.fdatasync(self._fd)
        self._number, self._segment, self.pages = number, segment, pages
        self._at = _aligned(len(header) + len(pages))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)

    @staticmethod
    def encode(batch: Iterable[Mutations]) -> bytes:
        return _ENCODE([(one.cleared, one.writes) for one in batch])


def _checksum(number: int, *parts: bytes) -> int:
    found = zlib.crc32(number.to_bytes(8, "little"))
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def _aligned(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
