"""The arena of this process: memory that the other ranks of its node map too (see cpp/include/fireflyer/arena.hpp).

It outlives the communicator for which it was made: a re-formed group takes it over, so that arrays allocated in it stay
registered. Arrays keep the mapping alive; this object keeps the descriptor by which new neighbours map it.
"""

from __future__ import annotations

import errno
import os
import weakref

from fireflyer.base.errors import UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.native import Arena

__all__ = ["OwnMemory", "all_memory_bytes"]


class OwnMemory:
    """Until `release`, or until it is collected, others can be let in."""

    def __init__(self, size_bytes: int) -> None:
        """Raises `UsageError`, `Busy` when the process may open no more files."""
        if size_bytes < 0:
            raise UsageError(f"arena_bytes {size_bytes} must not be negative")
        try:
            self.fd = Arena.create(size_bytes)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise translate_os_error(error, f"make an arena of {size_bytes} bytes") from error
            raise UsageError(
                f"cannot make an arena of {size_bytes} bytes: {error}; pass a smaller arena_bytes"
            ) from error
        self._descriptor = weakref.finalize(self, os.close, self.fd)
        try:
            self.arena = Arena(self.fd)
        except OSError as error:
            raise UsageError(
                f"cannot map an arena of {size_bytes} bytes: {error}; pass a smaller arena_bytes, or raise the limit "
                "on address space (ulimit -v)"
            ) from error

    @property
    def shared(self) -> bool:
        return self._descriptor.alive

    def release(self) -> None:
        """Closes the descriptor: nobody can map it any more. Arrays stay valid. Idempotent."""
        self._descriptor()


def all_memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
