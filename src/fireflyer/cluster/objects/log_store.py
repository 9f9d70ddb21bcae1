"""The logs of all runs, as the manager has them: sealed segments among the objects, indexes that name them beside
these, and under `root/TASK/RUN/STREAM/` the newest bytes, which are not durable yet.

Every call blocks and may be made by several threads; logs of one run wait for each other, those of others do not. One
process at a time: with several managers it is the one that leads. The next one finds the indexes when it is asked for a
run, reads those of that run alone, and gets the newest bytes from the node again; `root` may be its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from fireflyer.base.errors import Busy, DataCorruption, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import GIB, MIB, SECOND
from fireflyer.cluster.core.objects.log_stream import Append, Gap, accept, ends
from fireflyer.cluster.objects.log_files import SEGMENT_BYTES, LogFiles
from fireflyer.cluster.objects.log_indexes import LogIndexes, StreamIndex
from fireflyer.cluster.objects.named_files import DirectoryFiles, NamedFiles
from fireflyer.cluster.objects.port import Objects
from fireflyer.cluster.schema.logs import STREAM_PATTERN, LogAnswer, LogChunk, LogEnd

__all__ = ["Found", "LogInfo", "LogPage", "LogStore", "RunKey", "SearchPage"]

MAX_RUN_BYTES: Final = 1 * GIB
MAX_STREAMS: Final = 16_384
"""Of one run."""
MAX_RUNS_LOADED: Final = 1024
MAX_READ_BYTES: Final = 4 * MIB
MAX_SEARCHED_BYTES: Final = 64 * MIB
MAX_FOUND: Final = 1000
MAX_LINE_BYTES: Final = 4096
MAX_WAIT_NS: Final = 60 * SECOND
_STREAM: Final = re.compile(STREAM_PATTERN)


class RunKey(NamedTuple):
    task: int
    run: int


class LogInfo(NamedTuple):
    stream: str
    end: int
    gaps: tuple[Gap, ...]
    cut: bool
    closed: bool


class LogPage(NamedTuple):
    """`data` begins at `offset`, which is behind the asked one where bytes were lost; the next page is at
    `next_offset`. `cut` and `closed` are only said with the last page: nothing comes after it."""

    offset: int
    data: bytes
    next_offset: int
    cut: bool
    closed: bool


class Found(NamedTuple):
    offset: int
    """Of the line."""
    line: str


class SearchPage(NamedTuple):
    found: tuple[Found, ...]
    next_offset: int | None
    """Where to go on; None: all of the log was searched."""


class _Run:
    def __init__(self, key: RunKey, directory: str) -> None:
        self.key = key
        self.directory = directory
        self.lock = threading.Condition()
        self.streams: dict[str, LogFiles] = {}
        self.damaged: dict[str, str] = {}
        """Logs whose index cannot be read, and why."""
        self.size_bytes = 0
        self.loaded = False
        self.removed = False
        self.users = 0


class LogStore:
    def __init__(
        self,
        root: str,
        objects: Objects,
        *,
        index_files: NamedFiles | None = None,
        max_run_bytes: int = MAX_RUN_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        on_growth: Callable[[RunKey, str], None] = lambda _run, _stream: None,
    ) -> None:
        """`index_files`: of the indexes, which other managers have too; None: below `root`. `on_growth` is called in
        the thread that appended, without a lock; it must not block."""
        self._root = os.path.abspath(root)
        self._indexes = LogIndexes(DirectoryFiles(self._root) if index_files is None else index_files)
        self._objects = objects
        self._max_run_bytes = max_run_bytes
        self._segment_bytes = segment_bytes
        self._on_growth = on_growth
        self._lock = threading.Lock()
        self._runs: dict[RunKey, _Run] = {}
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {root}") from error

    # -- from nodes ----------------------------------------------------------------------------------------------------

    def append(self, run: RunKey, chunk: LogChunk) -> LogAnswer:
        """The caller has checked that the node has the run. Raises `NoSpace`, `UsageError`; the node tries again."""
        with self._used(run, make=True) as loaded, loaded.lock:
            files = self._stream(loaded, chunk.stream)
            room_bytes = max(0, self._max_run_bytes - loaded.size_bytes)
            grown = self._apply(loaded, files, accept(files.state, chunk, room_bytes), chunk.data)
            answer = _answer(files)
        if grown:
            self._on_growth(run, chunk.stream)
        return answer

    def close(self, run: RunKey, end: LogEnd) -> LogAnswer:
        """End the log: if the answer says `closed`, all that the node sent is durable and nothing comes after it."""
        with self._used(run, make=True) as loaded, loaded.lock:
            files = self._stream(loaded, end.stream)
            grown = self._apply(loaded, files, Append(ends(files.state, end.end)), b"")
            answer = _answer(files)
        if grown:
            self._on_growth(run, end.stream)
        return answer

    # -- for people ----------------------------------------------------------------------------------------------------

    def streams(self, run: RunKey) -> tuple[LogInfo, ...]:
        """Streams of a run by name. Raises `NotFound`."""
        with self._used(run) as loaded, loaded.lock:
            return tuple(_info(name, loaded.streams[name]) for name in sorted(loaded.streams))

    def read(self, run: RunKey, stream: str, offset: int, max_bytes: int = MAX_READ_BYTES) -> LogPage:
        """Read the bytes from `offset` on, `max_bytes` at most. Raises `NotFound`."""
        if not 0 < max_bytes <= MAX_READ_BYTES or offset < 0:
            raise UsageError(f"offset {offset} and max_bytes {max_bytes} must be in 0…, 1…{MAX_READ_BYTES}")
        with self._used(run) as loaded, loaded.lock:
            files = _known(loaded, run, stream)
            data = bytearray()
            begin = at = files.behind_gap(offset)
            while len(data) < max_bytes and (piece := files.read(at)) is not None:
                if piece.offset != at:
                    break  # a gap: the next page begins behind it
                taken = piece.data[: max_bytes - len(data)]
                data += taken
                at = piece.offset + len(taken)
            last = at >= files.state.end
            return LogPage(begin, bytes(data), at, last and files.state.cut, last and files.state.closed)

    def wait(self, run: RunKey, stream: str, offset: int, wait_ns: int) -> None:
        """Wait until the log has more than `offset` bytes or nothing more will come, at most `wait_ns`. Raises
        `NotFound`."""
        deadline_ns = time.monotonic_ns() + min(wait_ns, MAX_WAIT_NS)
        with self._used(run) as loaded, loaded.lock:
            while not loaded.removed:
                state = _known(loaded, run, stream).state
                left_ns = deadline_ns - time.monotonic_ns()
                if state.end > offset or state.cut or state.closed or left_ns <= 0:
                    return
                loaded.lock.wait(left_ns / SECOND)

    def search(self, run: RunKey, stream: str, text: str, offset: int = 0, max_found: int = 200) -> SearchPage:
        """Lines that contain `text`, upper and lower case alike. Reads at most `MAX_SEARCHED_BYTES` from `offset`,
        which is the beginning of a line; a line is told with at most `MAX_LINE_BYTES`."""
        needle = text.encode().lower()
        if not needle or len(needle) > MAX_LINE_BYTES or not 0 < max_found <= MAX_FOUND:
            raise UsageError(f"the text must have 1 to {MAX_LINE_BYTES} bytes, and max_found be at most {MAX_FOUND}")
        found: list[Found] = []
        at, searched = offset, 0
        for line_offset, line in self._lines(run, stream, offset):
            searched += line_offset - at + len(line)
            at = line_offset + len(line)
            if needle in line.lower():
                found.append(Found(line_offset, line[:MAX_LINE_BYTES].decode(errors="replace").rstrip("\r\n")))
            if len(found) >= max_found or searched >= MAX_SEARCHED_BYTES:
                return SearchPage(tuple(found), at)
        return SearchPage(tuple(found), None)

    def _lines(self, run: RunKey, stream: str, offset: int) -> Iterator[tuple[int, bytes]]:
        """With their ends; a line without one is told in pieces of a page."""
        rest = b""
        while page := self.read(run, stream, offset, 1 * MIB):
            if page.offset != offset and rest:
                yield offset - len(rest), rest
                rest = b""
            begin = page.offset - len(rest)
            lines = (rest + page.data).splitlines(keepends=True) if page.data else [rest]
            ends_here = not page.data
            rest = b"" if ends_here or len(lines[-1]) > MIB or lines[-1].endswith(b"\n") else lines.pop()
            for line in lines:
                if line:
                    yield begin, line
                begin += len(line)
            if ends_here:
                return
            offset = page.next_offset

    # -- retention -----------------------------------------------------------------------------------------------------

    def runs(self) -> list[RunKey]:
        """All that have logs, sorted."""
        found = {RunKey(*one): None for one in self._indexes.runs()}
        for task in _numbers(self._root):
            found.update({RunKey(task, run): None for run in _numbers(os.path.join(self._root, str(task)))})
        return sorted(found)

    def size_bytes(self, run: RunKey) -> int:
        with self._used(run) as loaded, loaded.lock:
            return loaded.size_bytes

    def remove(self, run: RunKey) -> None:
        """Remove the log; its blobs go with the next collection. Nothing happens where there is no such run."""
        with self._lock:
            loaded = self._runs.pop(run, None)
        if loaded is not None:
            with loaded.lock:
                loaded.removed = True
                loaded.lock.notify_all()
                shutil.rmtree(loaded.directory, ignore_errors=True)
        shutil.rmtree(self._directory(run), ignore_errors=True)
        self._indexes.remove(*run)
        try:
            os.rmdir(os.path.join(self._root, str(run.task)))
        except OSError:
            pass  # it has other runs

    def references(self) -> Iterator[str]:
        """All blobs of all logs: what a collection must keep. Raises `DataCorruption` for one whose blobs are
        unknown."""
        for run in self.runs():
            try:
                with self._used(run) as loaded, loaded.lock:
                    for message in loaded.damaged.values():
                        raise DataCorruption(message)
                    found = [blob for name in sorted(loaded.streams) for blob in loaded.streams[name].blobs]
            except NotFound:
                continue  # removed meanwhile
            yield from found

    def changed_ns(self, run: RunKey) -> int:
        """Time of the last write to the log, Unix time; 0 where there is no such run."""
        newest_ns = self._indexes.changed_ns(*run)
        for directory, _, names in os.walk(self._directory(run)):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                with contextlib.suppress(FileNotFoundError):
                    newest_ns = max(newest_ns, os.lstat(path).st_mtime_ns)
        return newest_ns

    def collect(self, renewed_before_ns: int) -> int:
        """Removes the blobs that no log names and that were not put since; how many. No others may put blobs there.
        Raises `DataCorruption` as `references` does, before anything is removed."""
        named = set(self.references())
        unnamed = [
            one.blob for one in self._objects.list() if one.renewed_ns < renewed_before_ns and one.blob not in named
        ]
        return len(self._objects.delete(unnamed, renewed_before_ns))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _apply(self, loaded: _Run, files: LogFiles, change: Append, data: bytes) -> bool:
        before, size_bytes = files.state, files.size_bytes
        try:
            files.apply(change, data)
        finally:
            loaded.size_bytes += files.size_bytes - size_bytes
        if files.state == before:
            return False
        loaded.lock.notify_all()
        return True

    def _directory(self, run: RunKey) -> str:
        if run.task < 0 or run.run < 0:
            raise UsageError(f"task {run.task} and run {run.run} must not be negative")
        return os.path.join(self._root, str(int(run.task)), str(int(run.run)))

    @contextlib.contextmanager
    def _used(self, run: RunKey, *, make: bool = False) -> Iterator[_Run]:
        """A run, which is not unloaded meanwhile. Its lock is not held."""
        with self._lock:
            loaded = self._runs.pop(run, None)
            if loaded is None:
                directory = self._directory(run)
                if not make and not os.path.isdir(directory) and not self._indexes.has(*run):
                    raise NotFound(f"run {run.run} of task {run.task} has no logs")
                loaded = _Run(run, directory)
                self._unload()
            self._runs[run] = loaded
            loaded.users += 1
        try:
            with loaded.lock:
                if not loaded.loaded:
                    self._load(loaded)
            yield loaded
        finally:
            with self._lock:
                loaded.users -= 1

    def _load(self, loaded: _Run) -> None:
        local = os.listdir(loaded.directory) if os.path.isdir(loaded.directory) else []
        indexes = self._indexes.of_run(*loaded.key)
        for name in sorted({*local, *indexes}):
            if _STREAM.match(name):
                try:
                    files = self._files(loaded, name, indexes.get(name))
                except DataCorruption as error:
                    loaded.damaged[name] = error.message
                    continue
                loaded.streams[name] = files
                loaded.size_bytes += files.size_bytes
        loaded.loaded = True

    def _files(self, loaded: _Run, stream: str, index: StreamIndex | None) -> LogFiles:
        directory = os.path.join(loaded.directory, stream)
        index = self._indexes.new(*loaded.key, stream) if index is None else index
        return LogFiles(directory, index, self._objects, self._segment_bytes)

    def _unload(self) -> None:
        """The runs that were not used for longest; all of their state is on disk."""
        for key, one in list(self._runs.items()):
            if len(self._runs) < MAX_RUNS_LOADED:
                return
            if one.users == 0:
                del self._runs[key]

    def _stream(self, loaded: _Run, stream: str) -> LogFiles:
        if loaded.removed:
            raise NotFound("the logs of this run were removed; nothing more is taken")
        if stream in loaded.damaged:
            raise DataCorruption(loaded.damaged[stream])
        files = loaded.streams.get(stream)
        if files is None:
            if _STREAM.match(stream) is None:
                raise UsageError(f"{stream[:80]!r} is no name of a log; write it like rank-3")
            if len(loaded.streams) >= MAX_STREAMS:
                raise Busy(f"a run has at most {MAX_STREAMS} logs; write into fewer files")
            files = loaded.streams[stream] = self._files(loaded, stream, None)
        return files


def _known(loaded: _Run, run: RunKey, stream: str) -> LogFiles:
    if stream in loaded.damaged:
        raise DataCorruption(loaded.damaged[stream])
    files = loaded.streams.get(stream)
    if files is None:
        raise NotFound(f"run {run.run} of task {run.task} has no log {stream[:80]!r}")
    return files


def _answer(files: LogFiles) -> LogAnswer:
    return LogAnswer(files.state.end, files.durable, files.state.cut, files.state.closed)


def _info(name: str, files: LogFiles) -> LogInfo:
    return LogInfo(name, files.state.end, files.state.gaps, files.state.cut, files.state.closed)


def _numbers(directory: str) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(directory) if name.isdecimal() and name.isascii())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise translate_os_error(error, f"read directory {directory}") from error
