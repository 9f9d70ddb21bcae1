"""One log: its index says which blobs it is made of (`log_indexes`), the file `open` has the bytes after them.

`open` is this manager's, and not durable: nodes keep what it has. It is frames of (offset, length, CRC-32, bytes), so
that after a loss of power its good beginning is found. When it is `segment_bytes` long it becomes a blob and is
emptied. In this order: the blob is put, an index that names it written, `open` emptied. Killed between them, the next
process finds frames that the index has, and empties `open`.
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from fireflyer.base.errors import DataCorruption, NotFound
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import MIB
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.log_stream import Append, Gap, StreamState
from fireflyer.cluster.objects.log_indexes import (
    MAX_INDEX_BYTES,
    Index,
    Segment,
    StreamIndex,
    decode_index,
    says_most,
)
from fireflyer.cluster.objects.port import Objects, read_blob
from fireflyer.identity.private_files import read_private_file

__all__ = ["SEGMENT_BYTES", "LogFiles", "Piece"]

SEGMENT_BYTES: Final = 1 * MIB
_FRAME: Final = struct.Struct("<QII")


class _Frame(NamedTuple):
    offset: int
    size_bytes: int
    position: int
    """Of its bytes, in `open`."""


class Piece(NamedTuple):
    offset: int
    data: bytes


class LogFiles:
    """Of one log, used by one thread at a time. `state` is what is there."""

    def __init__(
        self, directory: str, index: StreamIndex, objects: Objects, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """`directory`: of `open`; made when something is written. Raises `DataCorruption`."""
        self._directory = directory
        self._kept_index = index
        self._objects = objects
        self._segment_bytes = segment_bytes
        self._open_path = os.path.join(directory, "open")
        self._index = says_most([*index.read(), *_older_index(os.path.join(directory, "index"))])
        gaps = tuple(Gap(*gap) for gap in self._index.gaps)
        sealed = self._sealed = self._index.end
        self._frames, self._open_bytes = self._read_frames(sealed)
        end = self._frames[-1].offset + self._frames[-1].size_bytes if self._frames else sealed
        self.state = StreamState(end, gaps, self._index.cut, self._index.closed)

    @property
    def durable(self) -> int:
        return self._sealed

    @property
    def size_bytes(self) -> int:
        """Without the gaps."""
        return self.state.end - sum(gap.end - gap.begin for gap in self.state.gaps)

    @property
    def blobs(self) -> list[str]:
        return [one.blob for one in self._index.segments]

    def apply(self, change: Append, data: bytes) -> None:
        """`data`: the chunk's. What cannot be written leaves the state as it was."""
        before = self.state
        if change.gap is not None:
            self._seal()
        if change.end > change.begin:
            self._write_frame(change.state.end - (change.end - change.begin), data[change.begin : change.end])
        self.state = change.state
        if change.gap is not None or change.state.cut or change.state.closed:
            if change.state != before:
                self._seal()
        elif self._frames and self._is_full():
            self._seal()

    def _is_full(self) -> bool:
        """By the log's bytes, or by what their frames need in the file."""
        in_log = self.state.end - self._frames[0].offset
        return in_log >= self._segment_bytes or self._open_bytes >= 2 * self._segment_bytes

    def behind_gap(self, offset: int) -> int:
        """`offset`, or the end of the gap that it is in."""
        for gap in self.state.gaps:
            if gap.begin <= offset < gap.end:
                return gap.end
        return offset

    def read(self, offset: int) -> Piece | None:
        """From `offset` on, or from the end of the gap that it is in; a segment at most. None: nothing is there yet."""
        offset = self.behind_gap(offset)
        if offset >= self.state.end:
            return None
        if self._frames and offset >= self._frames[0].offset:
            return Piece(offset, self._read_open(offset))
        segment = self._index.segments[bisect_right(self._index.segments, offset, key=lambda one: one.offset) - 1]
        data = read_blob(self._objects, segment.blob, segment.size_bytes)
        return Piece(offset, data[offset - segment.offset :])

    def _seal(self) -> None:
        segments = self._index.segments
        if self._frames:
            data = self._read_open(self._frames[0].offset)
            blob = hash_of(data)
            self._objects.put(blob, len(data), [data])
            segments = (*segments, Segment(self._frames[0].offset, len(data), blob))
        index = Index(1, segments, tuple(self.state.gaps), self.state.cut, self.state.closed)
        if index != self._index:
            self._kept_index.write(index)
            self._index = index
            self._sealed = self.state.end
        self._frames, self._open_bytes = [], 0
        self._cut_open_file(0)

    def _write_frame(self, offset: int, data: bytes) -> None:
        head = _FRAME.pack(offset, len(data), zlib.crc32(data, offset & 0xFFFFFFFF))
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            fd = os.open(self._open_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                rest = memoryview(head + data)
                position = self._open_bytes
                while rest:
                    count = os.pwrite(fd, rest, position)
                    rest, position = rest[count:], position + count
            finally:
                os.close(fd)
        except OSError as error:
            raise translate_os_error(error, f"write {self._open_path}") from error
        self._frames.append(_Frame(offset, len(data), self._open_bytes + _FRAME.size))
        self._open_bytes = position

    def _read_open(self, offset: int) -> bytes:
        """All from `offset`, which is in `open`."""
        frames = self._frames[bisect_right(self._frames, offset, key=lambda one: one.offset) - 1 :]
        begin = frames[0].position
        try:
            fd = os.open(self._open_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                data = os.pread(fd, self._open_bytes - begin, begin)
            finally:
                os.close(fd)
        except OSError as error:
            raise translate_os_error(error, f"read {self._open_path}") from error
        if len(data) != self._open_bytes - begin:
            raise DataCorruption(f"{self._open_path} is shorter than what was written to it; look at its disk")
        parts = (data[one.position - begin : one.position - begin + one.size_bytes] for one in frames)
        return b"".join(parts)[offset - frames[0].offset :]

    def _read_frames(self, sealed: int) -> tuple[list[_Frame], int]:
        try:
            with open(self._open_path, "rb") as file:
                data = file.read(2 * self._segment_bytes + MIB)
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise translate_os_error(error, f"read {self._open_path}") from error
        frames: list[_Frame] = []
        at = 0
        for frame in _good_frames(data, sealed):
            frames.append(frame)
            at = frame.position + frame.size_bytes
        if at < len(data):
            self._cut_open_file(at)
        return frames, at

    def _cut_open_file(self, length: int) -> None:
        try:
            os.truncate(self._open_path, length)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise translate_os_error(error, f"cut {self._open_path}") from error


def _good_frames(data: bytes, offset: int) -> Iterator[_Frame]:
    at = 0
    while at + _FRAME.size <= len(data):
        begin, length, crc = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        piece = data[at : at + length]
        if begin != offset or not length or len(piece) != length or zlib.crc32(piece, begin & 0xFFFFFFFF) != crc:
            return
        yield _Frame(begin, length, at)
        at += length
        offset += length


def _older_index(path: str) -> list[Index]:
    """Of a manager of the release before, which kept it beside `open`. Raises `DataCorruption`."""
    try:
        return [decode_index(read_private_file(path, MAX_INDEX_BYTES), path)]
    except NotFound:
        return []
