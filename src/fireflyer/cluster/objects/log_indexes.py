"""Which blobs a log is made of, where all managers find it: `TASK/RUN/STREAM@WRITER-NUMBER`.

A log's index only grows, and each version of it is true: it says what some of the log's bytes are, from the first on.
So of several versions the one that says most is taken, whoever wrote it. A store of logs (`writer`) writes names that
no other one writes, each once, and then removes those that it has taken or written before. A manager that leads no more
and hangs in the middle can thus add a version that says less, or remove one beside which it has put one that says more:
it spoils nothing. An answer to a node counts only while its manager leads (`manager.logs`), so what a node was told to
be durable was put before the next leader reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import DataCorruption, FireflyerError, NotFound
from fireflyer.cluster.core.objects.blobs import BlobHash
from fireflyer.cluster.core.objects.log_stream import MAX_GAPS
from fireflyer.cluster.objects.named_files import NamedFiles

__all__ = ["Index", "LogIndexes", "Segment", "StreamIndex", "decode_index", "says_most"]

MAX_INDEX_BYTES: Final = 64 << 20
MAX_SEGMENTS: Final = 200_000
MAX_VERSIONS: Final = 8
"""Of one log that are read: one, and what managers left that were killed while they wrote."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    blob: BlobHash

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Index(msgspec.Struct, frozen=True, tag="fireflyer-log"):
    version: int
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()
    gaps: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=MAX_GAPS)] = ()
    cut: bool = False
    closed: bool = False

    @property
    def end(self) -> int:
        """Of the bytes that it says."""
        return max([0, *(one.end for one in self.segments[-1:]), *(end for _, end in self.gaps[-1:])])


_DECODER: Final = msgpack_decoder(Index)


def decode_index(data: bytes, where: str) -> Index:
    """Raises `DataCorruption`."""
    try:
        found = _DECODER.decode(data)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{where} cannot be read ({error}); remove it: this log is lost") from None
    if found.version != 1:
        raise DataCorruption(f"{where} was written by a newer release (version {found.version}); upgrade this one")
    return found


def says_most(versions: Iterable[Index]) -> Index:
    """Of one log. One that nothing follows says more than any other; without versions, nothing."""
    return max(versions, key=lambda one: (one.closed or one.cut, one.end), default=Index(1))


class StreamIndex:
    """Of one log. Used by one thread at a time."""

    def __init__(self, files: NamedFiles, folder: str, stream: str, writer: str, names: tuple[str, ...]) -> None:
        self._files, self._folder, self._stream, self._writer = files, folder, stream, writer
        self._names = names
        """That are there, as far as this store knows."""
        self._number = 0

    def read(self) -> list[Index]:
        """All versions. Raises `DataCorruption`."""
        found = []
        for name in self._names[-MAX_VERSIONS:]:
            try:
                data = self._files.get(f"{self._folder}/{name}", MAX_INDEX_BYTES)
            except NotFound:
                continue  # its writer has replaced it
            found.append(decode_index(data, f"index {self._folder}/{name} of the logs"))
        return found

    def write(self, index: Index) -> None:
        """Durable when it returns."""
        self._number += 1
        name = f"{self._stream}@{self._writer}-{self._number:010}"
        self._files.put(f"{self._folder}/{name}", msgspec.msgpack.encode(index))
        left = []
        for old in self._names:
            try:
                self._files.remove(f"{self._folder}/{old}")
            except FireflyerError:
                left.append(old)  # the next time
        self._names = (*left[-MAX_VERSIONS:], name)


class LogIndexes:
    """Of one store of logs."""

    def __init__(self, files: NamedFiles) -> None:
        self._files = files
        self._writer = secrets.token_hex(8)

    def of_run(self, task: int, run: int) -> dict[str, StreamIndex]:
        """By log, those that have an index."""
        names: dict[str, list[str]] = {}
        for one in self._files.list(f"{task}/{run}"):
            stream, at, _ = one.name.partition("@")
            if at:
                names.setdefault(stream, []).append(one.name)
        return {stream: self.new(task, run, stream, tuple(found)) for stream, found in names.items()}

    def new(self, task: int, run: int, stream: str, names: tuple[str, ...] = ()) -> StreamIndex:
        return StreamIndex(self._files, f"{task}/{run}", stream, self._writer, names)

    def has(self, task: int, run: int) -> bool:
        return any("@" in one.name for one in self._files.list(f"{task}/{run}"))

    def runs(self) -> list[tuple[int, int]]:
        """(task, run) of all that have one, or had."""
        found = []
        for task in _numbers(one.name for one in self._files.list("")):
            runs = _numbers(one.name for one in self._files.list(str(task)))
            found += [(task, run) for run in runs]
        return found

    def changed_ns(self, task: int, run: int) -> int:
        """0 where there is none."""
        return max((one.changed_ns for one in self._files.list(f"{task}/{run}")), default=0)

    def remove(self, task: int, run: int) -> None:
        self._files.remove(f"{task}/{run}")
        if not self._files.list(str(task)):
            self._files.remove(str(task))


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii())
