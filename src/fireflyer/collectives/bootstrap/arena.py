"""The arena of this process: memory that the other ranks of its node map too.

The native half is cpp/include/fireflyer/collectives/group/arena.hpp.

Unless a size is given, all groups of a process have one arena, and every rank maps that of another once however many
groups they share: a mapping takes address space for all of the machine's memory, of which there is not enough for one
in every group. So arrays allocated for one group are registered in the others too.

An arena outlives the communicator for which it was made: a re-formed group takes it over, so that arrays allocated in
it stay registered. Arrays keep the mapping alive; this object keeps a descriptor by which new neighbours map it.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import GIB
from fireflyer.native import Arena

__all__ = ["MAX_DEFAULT_ARENA_BYTES", "OwnMemory", "all_memory_bytes"]

MAX_DEFAULT_ARENA_BYTES: Final = 1024 * GIB
"""The arenas of the 64 ranks that a node may have take half of a process's 2**47 bytes of addresses."""


class OwnMemory:
    """Until `release`, or until it is collected, others can be let in."""

    def __init__(self, size_bytes: int | None) -> None:
        """`size_bytes` None: what the groups of this process share, as large as the machine's memory, at most
        `MAX_DEFAULT_ARENA_BYTES`. Raises `UsageError`, `Busy` when the process may open no more files."""
        if size_bytes is not None and size_bytes < 0:
            raise UsageError(f"arena_bytes {size_bytes} must not be negative")
        self._pid = os.getpid()
        self.fd: int
        self.arena: Arena
        with _turn:
            found = None if size_bytes is not None else next((one for one in _common if one.usable), None)
            if found is None:
                self.fd, self.arena = _make(_default_bytes() if size_bytes is None else size_bytes)
            else:
                self.fd, self.arena = _share(found)
            self._descriptor = weakref.finalize(self, os.close, self.fd)
            if size_bytes is None:
                _common.add(self)

    @property
    def shared(self) -> bool:
        return self._descriptor.alive

    def release(self) -> None:
        """Closes the descriptor: nobody can map it any more by this. Arrays stay valid. Idempotent."""
        with _turn:
            self._descriptor()

    @property
    def usable(self) -> bool:
        """Others can be let in, by this process: a forked child has a copy of this object, but no memory behind it."""
        return self.shared and self._pid == os.getpid()


_turn = threading.RLock()
_common: Final[weakref.WeakSet[OwnMemory]] = weakref.WeakSet()


def _after_fork() -> None:
    global _turn  # another thread of the parent may have held it
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def all_memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _default_bytes() -> int:
    return min(all_memory_bytes(), MAX_DEFAULT_ARENA_BYTES)


def _share(found: OwnMemory) -> tuple[int, Arena]:
    try:
        return os.dup(found.fd), found.arena
    except OSError as error:
        raise translate_os_error(error, "share this process's arena") from error


def _make(size_bytes: int) -> tuple[int, Arena]:
    try:
        fd = Arena.create(size_bytes)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise translate_os_error(error, f"make an arena of {size_bytes} bytes") from error
        raise UsageError(f"cannot make an arena of {size_bytes} bytes: {error}; pass a smaller arena_bytes") from error
    try:
        return fd, Arena(fd)
    except OSError as error:
        os.close(fd)
        raise UsageError(
            f"cannot map an arena of {size_bytes} bytes: {error}; pass a smaller arena_bytes, or raise the limit "
            "on address space (ulimit -v)"
        ) from error
