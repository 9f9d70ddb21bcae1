"""Carries out plans: several files at a time, errors told one by one, and an end that leaves nothing half-written."""

from __future__ import annotations

import errno
import stat
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import msgspec

from fireflyer.base.errors import Aborted, FireflyerError
from fireflyer.fs.tools.copying import CopyOptions, copy_file, copy_link, place_attributes, same_content
from fireflyer.fs.tools.plans import CopyFile, CopyLink, MakeDirectory, Remove, SetAttributes, Step
from fireflyer.fs.tools.trees import CopyTree

__all__ = ["Counts", "Observer", "Runner"]

WAITING_PER_WORKER: Final = 8
"""Steps that wait for a worker: enough that none is idle, and a bound for trees of any size."""


class Observer(Protocol):
    """Told from several threads."""

    def advanced(self, size: int) -> None: ...
    def done(self, step: Step) -> None: ...
    def failed(self, path: str, error: Exception) -> None: ...


class Counts(msgspec.Struct):
    files: int = 0
    """Copied, or whose attributes were set."""
    bytes: int = 0
    same: int = 0
    """Compared, and left alone."""
    removed: int = 0
    failed: int = 0


class Runner:
    """Of one command. `run` may be called several times; `counts` adds up. What is below a directory that could not
    be made is left out."""

    def __init__(
        self, source: CopyTree, target: CopyTree, options: CopyOptions, observer: Observer, *, workers: int
    ) -> None:
        self._source, self._target = source, target
        self._options, self._observer = options, observer
        self._workers = workers
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._missing: list[str] = []
        self._broken: BaseException | None = None
        """What is no error of one file: it ends all."""
        self.counts = Counts()

    def run(self, steps: Iterable[Step]) -> None:
        """Raises what is no error of one file: `KeyboardInterrupt` when all that was under way has ended."""
        directories: list[MakeDirectory | SetAttributes] = []
        removals: list[Remove] = []
        room = threading.BoundedSemaphore(self._workers * WAITING_PER_WORKER)
        with ThreadPoolExecutor(self._workers, "ff-copy") as pool:
            try:
                for step in steps:
                    if self._stopped.is_set():
                        break
                    if isinstance(step, Remove) and step.last:
                        removals.append(step)
                    elif not self._left_out(step):
                        self._begin(step, directories, pool, room)
                for _ in range(self._workers * WAITING_PER_WORKER):
                    room.acquire()  # for all that are under way, where an interrupt reaches us
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        if self._broken is not None:
            raise self._broken
        for removal in removals:
            self._attempt(removal)
        for made in reversed(directories):
            self._finish(made)

    def _begin(
        self,
        step: Step,
        directories: list[MakeDirectory | SetAttributes],
        pool: ThreadPoolExecutor,
        room: threading.BoundedSemaphore,
    ) -> None:
        """Directories, and what is in the way, at once: what follows needs that."""
        match step:
            case MakeDirectory():
                directories.append(step)
                self._attempt(step)
            case SetAttributes() if stat.S_ISDIR(step.attributes.st_mode):
                directories.append(step)
            case Remove():
                self._attempt(step)
            case _:
                room.acquire()
                pool.submit(self._attempt, step).add_done_callback(lambda _: room.release())

    def _left_out(self, step: Step) -> bool:
        return any(step.place.startswith(missing) for missing in self._missing)

    def _attempt(self, step: Step) -> None:
        try:
            self._do(step)
        except Aborted as error:
            if not self._stopped.is_set():
                self._broken = error
        except (OSError, FireflyerError) as error:
            with self._lock:
                self.counts.failed += 1
                if isinstance(step, MakeDirectory):
                    self._missing.append(step.place.rstrip("/") + "/")
            self._observer.failed(getattr(step, "path", step.place), error)
        except BaseException as error:
            self._broken = error
            self._stopped.set()
        else:
            self._observer.done(step)

    def _do(self, step: Step) -> None:
        match step:
            case MakeDirectory():
                self._make(step)
            case CopyFile():
                self._copy(step)
            case CopyLink():
                copy_link(self._source, step.path, self._target, step.place)
                self._count(0)
            case SetAttributes():
                place_attributes(self._target, step.place, step.attributes, self._options)
                self._count(0)
            case Remove():
                if step.tree:
                    self._target.rmtree(step.place)
                else:
                    self._target.unlink(step.place)
                self.counts.removed += 1

    def _make(self, step: MakeDirectory) -> None:
        # Ours to write in while it is filled; `_finish` gives it the mode that it shall have.
        mode = stat.S_IMODE(step.attributes.st_mode) & 0o777 | 0o700
        try:
            self._target.mkdir(step.place, mode)
        except FileExistsError:
            mode = self._target.stat(step.place, False).st_mode
            if stat.S_ISLNK(mode):
                words = "a symbolic link is there, and is not followed; remove it, or copy to where it leads"
                raise FileExistsError(errno.EEXIST, words, step.place) from None
            if not stat.S_ISDIR(mode):
                raise

    def _copy(self, step: CopyFile) -> None:
        if step.compare and same_content(self._source, step.path, self._target, step.place, stopped=self._stopped):
            place_attributes(self._target, step.place, step.attributes, self._options)
            with self._lock:
                self.counts.same += 1
            self._observer.advanced(step.attributes.st_size)
            return
        copy_file(
            self._source,
            step.path,
            self._target,
            step.place,
            options=self._options,
            stopped=self._stopped,
            advanced=self._observer.advanced,
        )
        self._count(step.attributes.st_size)

    def _count(self, size: int) -> None:
        with self._lock:
            self.counts.files += 1
            self.counts.bytes += size

    def _finish(self, step: MakeDirectory | SetAttributes) -> None:
        """Modes and times of directories, when nothing is put into them any more."""
        if isinstance(step, MakeDirectory) and (step.place.rstrip("/") + "/") in self._missing:
            return
        if not (self._options.mode or self._options.times or self._options.owner):
            return
        try:
            if isinstance(step, MakeDirectory) or self._differ(step):
                place_attributes(self._target, step.place, step.attributes, self._options)
        except (OSError, FireflyerError) as error:
            self.counts.failed += 1
            self._observer.failed(step.place, error)

    def _differ(self, step: SetAttributes) -> bool:
        wanted, found = step.attributes, self._target.stat(step.place)
        return (stat.S_IMODE(wanted.st_mode), wanted.st_mtime_ns) != (stat.S_IMODE(found.st_mode), found.st_mtime_ns)
