"""Writers on the file system. Each keeps a note of every operation that was acknowledged, on the local disk, and reads
back what it has written."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.recipes.soak.acknowledged import (
    Noted,
    Remove,
    Replace,
    Write,
    content_of,
    decode_notes,
    encode_note,
    twins_of_notes,
)
from fireflyer.recipes.soak.facts import WriterFacts
from fireflyer.recipes.soak.operations import DIRECTORY, WRITERS, operations
from fireflyer.recipes.testbed.facts import FileFact

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["Writer", "running_writers"]

PAUSE_S: Final = 0.1
"""Between two operations: a steady load that leaves the processors to the tasks."""
AGAIN_S: Final = 0.25
STUCK_NS: Final = 900 * SECOND
"""An operation that fails for so long is given up, and the soak with it."""
MAX_ERRORS: Final = 20
_ERRORS: Final = (OSError, FireflyerError)


class Writer:
    """`start`, then `stop`. `now_ns`: the soak's clock."""

    def __init__(self, name: str, files: FileSystem, seed: int, notes: str, now_ns: Callable[[], int]) -> None:
        """`notes`: file for what was acknowledged."""
        self.name = name
        self.acknowledged_ns = -1
        """When the operation that was acknowledged last had begun."""
        self.notes = notes
        self._files = files
        self._seed = seed
        self._now_ns = now_ns
        self._rng = random.Random(seed)
        self._there: dict[str, dict[int, Write | Replace]] = {}
        """Of each file, by offset, what was written there last."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"ff-soak-{name}", daemon=True)
        self._acknowledged = self._bytes = self._repeated = self._longest_ns = self._reads = 0
        self._errors: dict[str, None] = {}
        self._wrong: list[str] = []
        self._stuck = ""
        self._abandoned = False

    @property
    def stuck(self) -> str:
        return self._stuck

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, abandon: bool = False) -> None:
        """The operation in progress is repeated until it is acknowledged first; `abandon`: it is not repeated."""
        self._abandoned = self._abandoned or abandon
        self._over.set()
        self._thread.join()

    def facts(self) -> WriterFacts:
        """After `stop`."""
        return WriterFacts(
            name=self.name,
            acknowledged=self._acknowledged,
            bytes=self._bytes,
            repeated=self._repeated,
            errors=tuple(self._errors),
            longest_ns=self._longest_ns,
            reads=self._reads,
            wrong_reads=tuple(self._wrong),
            stuck=self._stuck,
        )

    def twins(self) -> list[FileFact]:
        """From the notes, after `stop`."""
        with open(self.notes, "rb") as lines:
            return twins_of_notes(self._seed, self.name, decode_notes(lines))

    def _work(self) -> None:
        with open(self.notes, "wb") as notes:
            for operation in operations(self.name, self._seed):
                if self._over.wait(PAUSE_S):
                    return
                begin_ns = self._now_ns()
                if not self._repeat(operation, begin_ns):
                    return
                notes.write(encode_note(operation))
                notes.flush()
                self._remember(operation)
                self._longest_ns = max(self._longest_ns, self._now_ns() - begin_ns)
                self.acknowledged_ns = begin_ns
                self._read_back()

    def _repeat(self, operation: Noted, begin_ns: int) -> bool:
        """Until it is acknowledged; False: it was given up."""
        again = False
        while True:
            try:
                self._perform(operation, again=again)
                return True
            except _ERRORS as error:
                again = True
                self._failed(error)
                if self._abandoned:
                    return False
                if self._now_ns() - begin_ns > STUCK_NS:
                    self._stuck = f"{operation} failed for {STUCK_NS // SECOND} s: {_line(error)}"
                    return False
            time.sleep(AGAIN_S)

    def _failed(self, error: BaseException) -> None:
        self._repeated += 1
        if len(self._errors) < MAX_ERRORS:
            self._errors[_line(error)] = None

    def _perform(self, operation: Noted, *, again: bool) -> None:
        match operation:
            case Write(number, path, offset, size, new):
                with self._files.open_file(path, "wb" if new else "r+b") as file:
                    file.pwrite(content_of(self._seed, self.name, number, size), offset)
                    file.fsync()
            case Replace(number, path, size):
                with self._files.open_file(f"{path}.new", "wb") as file:
                    file.pwrite(content_of(self._seed, self.name, number, size), 0)
                    file.fsync()
                self._files.rename(f"{path}.new", path)
            case Remove(path=path):
                try:
                    self._files.unlink(path)
                except FileNotFoundError:
                    if not again:  # else the try before may have removed it
                        self._wrong.append(f"{path} was not there to be removed")

    def _remember(self, operation: Noted) -> None:
        self._acknowledged += 1
        match operation:
            case Write(path=path, offset=offset, bytes=size):
                self._there.setdefault(path, {})[offset] = operation
                self._bytes += size
            case Replace(path=path, bytes=size):
                self._there[path] = {0: operation}
                self._bytes += size
            case Remove(path=path):
                del self._there[path]

    def _read_back(self) -> None:
        if not self._there:
            return
        path = self._rng.choice(sorted(self._there))
        offset = self._rng.choice(sorted(self._there[path]))
        written = self._there[path][offset]
        found = bytearray(written.bytes)
        try:
            with self._files.open_file(path) as file:
                count = file.pread_into(found, offset)
        except FileNotFoundError:
            self._wrong.append(f"{path} is not there")
            return
        except _ERRORS as error:
            self._failed(error)
            return
        self._reads += 1
        if count != written.bytes or bytes(found) != content_of(self._seed, self.name, written.number, count):
            self._wrong.append(
                f"{path}, {written.bytes} bytes at {offset}: not what operation {written.number} wrote ({count} bytes)"
            )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@contextlib.contextmanager
def running_writers(files: FileSystem, seed: int, directory: str, now_ns: Callable[[], int]) -> Iterator[list[Writer]]:
    """One of each kind; they have stopped at the end of the block. `directory`: for their notes."""
    os.makedirs(directory, exist_ok=True)
    for name in WRITERS:
        files.makedirs(f"{DIRECTORY}/{name}", exist_ok=True)
    writers = [
        Writer(name, files, seed, os.path.join(directory, f"{name}.acknowledged.jsonl"), now_ns) for name in WRITERS
    ]
    for writer in writers:
        writer.start()
    abandon = True
    try:
        yield writers
        abandon = False
    finally:
        for writer in writers:
            writer.stop(abandon=abandon)
