"""The memory that a rank and its supervisor share: the cells of `base.suspension`.

A file without a name (memfd_create(2)): when the last process that has it open ends, however it ends, it is gone. A
rank opens it through /proc, at a path that it is told, so that it may be started by a program of the user's. The size
is sealed: a rank that shortens it would end its supervisor by SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
from collections.abc import MutableSequence
from typing import Final, Self, cast

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.suspension import CELLS

__all__ = ["SharedCells", "memory_barrier"]

_BYTES: Final = 8 * CELLS
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
_GLOBAL: Final = 1


class SharedCells:
    """Made by `create` or `open`."""

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        """For `open`, in any process of this user and machine, until the maker closes it."""
        self._fd = fd
        self._map = mmap.mmap(fd, _BYTES)
        self._view = memoryview(self._map).cast("q")
        self.cells = cast("MutableSequence[int]", self._view)
        """Each one is read and written whole."""

    @classmethod
    def create(cls) -> Self:
        """Raises `FireflyerError`."""
        try:
            fd = os.memfd_create("ff-suspension", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, _BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, f"/proc/{os.getpid()}/fd/{fd}")
        except OSError as error:
            raise translate_os_error(error, "make memory that ranks share with their supervisor") from error

    @classmethod
    def open(cls, path: str) -> Self:
        """Raises `FireflyerError`."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(fd).st_size != _BYTES:
                os.close(fd)
                raise UsageError(f"FF_SUSPENSION={path} is not a file of {_BYTES} bytes that a supervisor has made")
            return cls(fd, path)
        except OSError as error:
            raise translate_os_error(error, f"open {path} (FF_SUSPENSION)") from error

    def close(self) -> None:
        self._view.release()
        self._map.close()
        os.close(self._fd)


def memory_barrier() -> bool:
    """Every thread of this machine has passed a full memory barrier when this returns (membarrier(2)); takes
    milliseconds. False: the kernel does not offer it."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None:
        return False
    try:
        return int(ctypes.CDLL(None, use_errno=True).syscall(number, _GLOBAL, 0, 0)) == 0
    except (OSError, FireflyerError):
        return False
