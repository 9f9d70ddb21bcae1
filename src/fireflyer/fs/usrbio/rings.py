"""Rings: reads or writes that are prepared one by one, carried out together, and waited for.

    prepare ──> prepared ──submit──> queued ──a batch, as io_depth says──> under way ──> over ──wait──> given back

`io_depth` 0: all that is queued goes at once. Above 0: batches of just so many, and what is fewer waits for more. Below
0: batches of at most so many; with a `timeout` fewer wait for more, but not longer than that. A ring has one thread,
which is gone soon after the ring is. One thread prepares and submits, one waits; they may be the same.
"""

from __future__ import annotations

import datetime
import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.fs.usrbio.mounts import Registered, deregister_fd, extract_mount_point, file_of, files_of, register_fd

__all__ = ["IorPriority", "Result", "ioring", "iovec", "make_ioring", "make_iovec", "read_file"]

_log = logging.getLogger(__name__)
MAX_ENTRIES: Final = 1 << 20
MAX_OFFSET: Final = (1 << 63) - 1
FORBID_HOLES: Final = 2
DEFAULT_BLOCK_BYTES: Final = 1 << 30


class IorPriority:
    """Taken, and without effect: operations of a ring are carried out as they come."""

    HIGH = -1
    NORMAL = 0
    LOW = 1


class iovec:  # noqa: N801  # as its users write it
    """Memory for reads and writes: what `make_iovec` was given. Parts of it are memory views of the same bytes."""

    def __init__(self, memory: Any) -> None:
        self._view = memoryview(memory).cast("B")

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, part: slice) -> memoryview:
        return self._view[part]

    def __setitem__(self, part: slice, data: Any) -> None:
        self._view[part] = memoryview(data).cast("B")


class Result(msgspec.Struct, frozen=True):
    """Result of one operation of a ring."""

    result: int
    """Bytes, or an errno below 0. Fewer bytes than asked for: the file ends there."""
    userdata: Any = None


class _Operation(msgspec.Struct):
    target: Registered
    memory: memoryview
    offset: int
    userdata: Any
    queued_s: float = 0.0


class _Work:
    """What a ring and its thread share; the thread knows nothing of the ring, so that the ring can go."""

    def __init__(self, for_read: bool, io_depth: int, timeout_s: float | None) -> None:
        self.for_read, self.io_depth, self.timeout_s = for_read, io_depth, timeout_s
        self.changed = threading.Condition()
        self.queued: deque[_Operation] = deque()
        self.over: deque[Result] = deque()
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def run(self) -> None:
        while (batch := self._next()) is not None:
            results = _carried_out(batch, self.for_read)
            batch = None  # the memory is the caller's again before they hear of it
            with self.changed:
                self.over += results
                results = []  # or this thread would keep what the caller has been given back, until the next batch
                self.changed.notify_all()

    def _next(self) -> list[_Operation] | None:
        with self.changed:
            while not self.closed:
                count, wait_s = self._due(time.monotonic())
                if count:
                    return [self.queued.popleft() for _ in range(count)]
                self.changed.wait(wait_s)
            return None

    def _due(self, now_s: float) -> tuple[int, float | None]:
        """How many may go now; else after how long to look again."""
        there, depth = len(self.queued), self.io_depth
        if not there or depth == 0:
            return there, None
        if depth > 0:
            return (depth if there >= depth else 0), None
        if there >= -depth or self.timeout_s is None:
            return min(there, -depth), None
        left_s = self.queued[0].queued_s + self.timeout_s - now_s
        return (there, None) if left_s <= 0 else (0, left_s)


def _carried_out(batch: Sequence[_Operation], for_read: bool) -> list[Result]:
    """All at once; where that fails one by one, so that each has an error of its own."""
    by_files: dict[int, list[int]] = {}
    for at, one in enumerate(batch):
        by_files.setdefault(id(one.target.files), []).append(at)
    found = [Result(0)] * len(batch)
    for places in by_files.values():
        files = batch[places[0]].target.files
        wanted = [(batch[at].target.file, batch[at].offset, batch[at].memory) for at in places]
        action = files.read_batch if for_read else files.write_batch
        try:
            counts = action(wanted)
        except Exception:  # or this thread would end, and whoever waits would wait for ever
            counts = [_alone(action, one) for one in wanted]
        for at, count in zip(places, counts, strict=True):
            found[at] = Result(int(count), batch[at].userdata)
    return found


def _alone(action: Callable[[list[Any]], list[int]], wanted: Any) -> int:
    try:
        return action([wanted])[0]
    except OSError as error:
        return -(error.errno or errno.EIO)
    except Exception:
        _log.warning("an operation of a ring failed", exc_info=True)
        return -errno.EIO


class ioring:  # noqa: N801  # as its users write it
    """Ring, as `make_ioring` gives it."""

    def __init__(self, entries: int, for_read: bool, io_depth: int, timeout_s: float | None) -> None:
        self._entries = entries
        self._work = _Work(for_read, io_depth, timeout_s)
        self._prepared: list[_Operation] = []
        self._taken = 0
        """Prepared, and not given back by `wait` yet."""
        weakref.finalize(self, self._work.close)
        threading.Thread(target=self._work.run, name="ioring", daemon=True).start()

    @property
    def entries(self) -> int:
        return self._entries

    def prepare(self, iov: Any, read: bool, fd: int, offset: int, userdata: Any = None) -> int:
        """One operation on all of `iov`, part of a vector or any memory; `offset`: in the file. How many are prepared.
        Raises `OSError`: EAGAIN when the ring is full until `wait` gives something back, EBADF for a descriptor that is
        not registered; `UsageError`."""
        if bool(read) != self._work.for_read:
            raise UsageError(
                f"the ring was made with for_read={self._work.for_read}; make another ring for the other direction"
            )
        if not 0 <= offset <= MAX_OFFSET:
            raise UsageError(f"offset {offset}; offsets are 0 or more and below 2^63")
        if self._taken >= self._entries:
            raise BlockingIOError(
                errno.EAGAIN, f"all {self._entries} entries of the ring are in use; call wait() to free some"
            )
        memory = iov[:] if isinstance(iov, iovec) else memoryview(iov).cast("B")
        if self._work.for_read and memory.readonly:
            raise UsageError("the memory is read-only, but data are to be read into it")
        self._prepared.append(_Operation(file_of(fd), memory, offset, userdata))
        with self._work.changed:
            self._taken += 1
        return len(self._prepared)

    def submit(self) -> Self:
        """Submit what was prepared. Leave its memory alone until `wait` has given it back."""
        now_s = time.monotonic()
        for one in self._prepared:
            one.queued_s = now_s
        work = self._work
        with work.changed:
            work.queued += self._prepared
            work.changed.notify_all()
        self._prepared.clear()
        return self

    def wait(
        self,
        max_results: int | None = None,
        min_results: int | None = None,
        timeout: datetime.timedelta | float | None = None,
    ) -> list[Result]:
        """Wait for `min_results` (1), unless `timeout` (seconds, or a timedelta; None: for ever) ends before; at most
        `max_results`. In the order in which they were submitted, but for those of other batches."""
        least = 1 if min_results is None else min_results
        most = self._entries if max_results is None else max_results
        if isinstance(timeout, datetime.timedelta):
            timeout = timeout.total_seconds()
        until_s = None if timeout is None else time.monotonic() + timeout
        work = self._work
        with work.changed:
            while len(work.over) < min(least, most):
                left_s = None if until_s is None else until_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                work.changed.wait(left_s)
            found = [work.over.popleft() for _ in range(min(most, len(work.over)))]
            self._taken -= len(found)
        return found


def make_iovec(shm: Any, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> iovec:  # noqa: ARG001
    """`shm`: a `multiprocessing.shared_memory.SharedMemory`, or any memory: what is its `buf` counts. Nothing of it is
    registered anywhere, so it may be unlinked at once. `block_size` and `numa` have no effect."""
    files_of(hf3fs_mount_point)
    return iovec(getattr(shm, "buf", shm))


def make_ioring(
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,
    io_depth: int = 0,
    priority: int | None = None,  # noqa: ARG001
    timeout: int | None = None,
    numa: int = -1,  # noqa: ARG001
    flags: int = 0,
) -> ioring:
    """`entries`: operations at most that are prepared and not given back. `io_depth`: see above; `timeout`: of
    milliseconds, for an `io_depth` below 0. `flags`: 1 (read what is not committed) asks for nothing that it has not;
    2 (holes are errors) is refused. Raises `UsageError`."""
    files_of(hf3fs_mount_point)
    if not 0 < entries <= MAX_ENTRIES:
        raise UsageError(f"{entries} entries; 1 to {MAX_ENTRIES} are allowed")
    if abs(io_depth) > entries:
        raise UsageError(f"io_depth {io_depth} is more than the ring's {entries} entries: no batch would ever be full")
    if flags & FORBID_HOLES:
        raise UsageError("flag 2 (holes are errors) is not supported: holes read as zeros")
    return ioring(entries, for_read, io_depth, None if not timeout else timeout / 1000)


def read_file(
    fn: str,
    hf3fs_mount_point: str | None = None,
    block_size: int = DEFAULT_BLOCK_BYTES,
    off: int = 0,
    priority: int | None = None,
    cb: Callable[[memoryview, int], object] | None = None,
) -> memoryview | None:
    """The file from `off` on. With `cb` in blocks: it is called with each and its offset, and None is returned."""
    mount_point = hf3fs_mount_point or extract_mount_point(fn)
    fd = os.open(fn, os.O_RDONLY)
    try:
        register_fd(fd)
        left = max(0, os.fstat(fd).st_size - off)
        memory = memoryview(bytearray(left if cb is None else min(left, block_size)))
        ring = make_ioring(mount_point, 1, True, priority=priority)
        at = 0
        while left > at:
            part = memory[at : at + block_size] if cb is None else memory[: min(block_size, left - at)]
            ring.prepare(part, True, fd, off + at)
            (done,) = ring.submit().wait()
            if done.result < 0:
                raise OSError(-done.result, os.strerror(-done.result), fn)
            if not done.result:
                break
            if cb is not None:
                cb(part[: done.result], off + at)
            at += done.result
        return memory[:at] if cb is None else None
    finally:
        deregister_fd(fd)
        os.close(fd)
