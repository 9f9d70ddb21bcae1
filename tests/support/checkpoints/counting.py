"""A disk that counts what is read."""

from __future__ import annotations

from fireflyer.base.ports import Transfer
from fireflyer.runtime.disk import RealDisk, RealFile

__all__ = ["Counting"]


class Counting(RealDisk):
    """Counts the bytes that transfers ask for, those that are read otherwise, and the files that are opened."""

    def __init__(self) -> None:
        self.read_bytes, self.other_bytes, self.opened = 0, 0, 0

    def open(self, path: str, *, direct: bool = False) -> RealFile:
        self.opened += 1
        file = super().open(path, direct=direct)
        start, pread = file.start_pread, file.pread

        def started(target: memoryview, offset: int) -> Transfer:
            self.read_bytes += len(target)
            return start(target, offset)

        def read(length: int, offset: int) -> bytes:
            self.other_bytes += length
            return pread(length, offset)

        file.start_pread = started  # type: ignore[method-assign]
        file.pread = read  # type: ignore[method-assign]
        return file
