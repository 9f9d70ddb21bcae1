"""Memory that direct IO can use: whole pages, large ones where the system gives them, and not shared with children."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final

__all__ = ["HUGE_PAGE_BYTES", "advise_huge_pages", "aligned_memory"]

HUGE_PAGE_BYTES: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_LIBC: Final = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def aligned_memory(size_bytes: int) -> memoryview:
    """Writable bytes that begin at a page, not touched yet. They are given back when nothing refers to them.

    A child made by fork does not have them: a device that writes into memory while a fork marks it copy-on-write may
    write into the child's copy, and every page of a snapshot would be copied once more by the next save."""
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # a kernel without it; small pages serve
            memory.madvise(advice)
    return memoryview(memory)[:size_bytes]


def advise_huge_pages(address: int, size_bytes: int) -> None:
    """Asks for large pages for the whole ones in a range of private memory that is not touched yet: the first touch of
    a page costs the more the smaller pages are."""
    begin = address + -address % HUGE_PAGE_BYTES
    end = (address + size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end > begin:
        _LIBC.madvise(begin, end - begin, _MADV_HUGEPAGE)  # advice: a failure changes nothing
