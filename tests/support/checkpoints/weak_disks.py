"""Disks that leave out a sync, for campaigns of crashes that must notice it."""

from __future__ import annotations

from collections.abc import Callable

from fireflyer.base.ports import Data, Disk, DiskFile, DiskLock, Transfer

__all__ = ["WithoutSync"]


class WithoutSync(Disk):
    """A disk whose `operation` does nothing where `affects` says so."""

    def __init__(self, disk: Disk, operation: str, affects: Callable[[str], bool]) -> None:
        self._disk, self._operation, self._affects = disk, operation, affects
        self.durable_names = disk.durable_names

    def create(self, path: str, *, direct: bool = False) -> DiskFile:
        file = self._disk.create(path, direct=direct)
        return WithoutFsync(file) if self._operation == "fsync" and self._affects(path) else file

    def open(self, path: str, *, direct: bool = False) -> DiskFile:
        return self._disk.open(path, direct=direct)

    def mkdir(self, path: str) -> None:
        self._disk.mkdir(path)

    def rename(self, source: str, target: str) -> None:
        self._disk.rename(source, target)

    def remove(self, path: str) -> None:
        self._disk.remove(path)

    def rmdir(self, path: str) -> None:
        self._disk.rmdir(path)

    def list(self, path: str) -> list[str]:
        return self._disk.list(path)

    def exists(self, path: str) -> bool:
        return self._disk.exists(path)

    def is_dir(self, path: str) -> bool:
        return self._disk.is_dir(path)

    def hold(self, path: str, *, wait: bool = True) -> DiskLock | None:
        return self._disk.hold(path, wait=wait)

    def sync_dir(self, path: str) -> None:
        if self._operation != "sync_dir" or not self._affects(path):
            self._disk.sync_dir(path)

    def free_bytes(self, path: str) -> int:
        return self._disk.free_bytes(path)


class WithoutFsync(DiskFile):
    def __init__(self, file: DiskFile) -> None:
        self._file = file

    def pwrite(self, data: Data, offset: int) -> None:
        self._file.pwrite(data, offset)

    def pread(self, length: int, offset: int) -> bytes:
        return self._file.pread(length, offset)

    def start_pwrite(self, data: memoryview, offset: int) -> Transfer:
        return self._file.start_pwrite(data, offset)

    def start_pread(self, target: memoryview, offset: int) -> Transfer:
        return self._file.start_pread(target, offset)

    def allocate(self, size_bytes: int) -> None:
        self._file.allocate(size_bytes)

    def size(self) -> int:
        return self._file.size()

    def fsync(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()
