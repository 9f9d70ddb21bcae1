"""Memory that direct IO can use: whole pages, large ones where the system gives them, and not shared with children."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

__all__ = ["aligned_memory"]

_MADV_HUGEPAGE: Final = 14
_MADV_WIPEONFORK: Final = 18


def aligned_memory(size_bytes: int) -> memoryview:
    """Writable bytes that begin at a page, not touched yet. They are given back when nothing refers to them.

    A child made by fork finds zeros there: a device that writes into memory while a fork marks it copy-on-write may
    write into the child's copy, and every page of a snapshot would be copied once more by the next save. The child
    keeps the addresses. Without them (MADV_DONTFORK) it would give them to something else, a thread's stack say, which
    would be unmapped when the child's copy of the object that is returned here is collected."""
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_MADV_HUGEPAGE, _MADV_WIPEONFORK):
        with contextlib.suppress(OSError):  # a kernel without it; small pages serve
            memory.madvise(advice)
    return memoryview(memory)[:size_bytes]
