"""Writes and reads in the file system all the time, so that its throughput through a failure can be seen.

One thread writes blocks and reads others back, `PAUSE_S` between two operations: a steady load that leaves the
processors to the tasks. Every read is compared with what was written last; the twins of all files are known exactly.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import MIB
from fireflyer.recipes.testbed.facts import FileFact
from fireflyer.recipes.whole.facts import Operation

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["BLOCK_BYTES", "DIRECTORY", "Traffic", "content_of"]

DIRECTORY: Final = "/traffic"
BLOCK_BYTES: Final = MIB
FILES: Final = 24
PAUSE_S: Final = 0.1
MAX_OPERATIONS: Final = 100_000


def content_of(number: int) -> bytes:
    """What operation `number` writes."""
    return np.random.default_rng(number).bytes(BLOCK_BYTES)


class Traffic:
    """`start`, then `stop`. `now_ns`: the demonstration's clock."""

    def __init__(self, files: FileSystem, now_ns: Callable[[], int]) -> None:
        self.operations: list[Operation] = []
        self._files = files
        self._now_ns = now_ns
        self._written: dict[str, int] = {}
        """Which operation wrote each file last."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ff-demo-traffic", daemon=True)

    def start(self) -> None:
        self._files.makedirs(DIRECTORY, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """The operation in progress ends first."""
        self._over.set()
        self._thread.join()

    def twins(self) -> list[FileFact]:
        """After `stop`."""
        return [
            FileFact(path=path, bytes=BLOCK_BYTES, digest=hashlib.sha256(content_of(number)).hexdigest())
            for path, number in sorted(self._written.items())
        ]

    def _work(self) -> None:
        number = 0
        while not self._over.wait(PAUSE_S) and len(self.operations) < MAX_OPERATIONS:
            path = f"{DIRECTORY}/block-{number % FILES:02d}"
            self._perform("write", lambda: self._write(path, number))  # noqa: B023 (performed at once)
            oldest = f"{DIRECTORY}/block-{(number + 1) % FILES:02d}"
            if oldest in self._written:
                self._perform("read", lambda: self._read(oldest))  # noqa: B023
            number += 1

    def _perform(self, kind: str, do: Callable[[], None]) -> None:
        begin_ns, error = self._now_ns(), ""
        try:
            do()
        except (OSError, FireflyerError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        made = Operation(kind=kind, begin_ns=begin_ns, end_ns=self._now_ns(), bytes=BLOCK_BYTES, error=error)
        self.operations.append(made)

    def _write(self, path: str, number: int) -> None:
        data = content_of(number)
        with self._files.open_file(path, "r+b" if path in self._written else "wb") as file:
            file.pwrite(data, 0)
            file.fsync()
        self._written[path] = number

    def _read(self, path: str) -> None:
        found = bytearray(BLOCK_BYTES)
        with self._files.open_file(path) as file:
            count = file.pread_into(found, 0)
        if count != BLOCK_BYTES or bytes(found) != content_of(self._written[path]):
            raise OSError(f"{path} does not hold what was written last")
