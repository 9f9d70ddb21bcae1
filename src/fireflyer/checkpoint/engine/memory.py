"""Memory that direct IO can use (whole pages, large ones where the system gives them, not shared with children), and
memory of tensors that is made ready before bytes arrive."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterable, Iterator
from typing import Final

from fireflyer.base.units import MIB

__all__ = ["aligned_memory", "made_ready"]

_LIBC: Final = ctypes.CDLL(None)
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14."""
_SLICE_BYTES: Final = 8 * MIB
"""Made ready in one call, so that the thread ends soon when it is to."""
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


@contextlib.contextmanager
def made_ready(ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
    """While the block runs, a thread has the system give pages to these ranges of memory (address, bytes), in order:
    what is copied there later waits for no page fault. Contents stay. Memory that has its pages costs little; where the
    system cannot do it, or has no thread left, nothing changes. The thread has ended when the block has."""
    ended = threading.Event()
    thread = threading.Thread(target=_make_ready, args=(ranges, ended), name="checkpoint-memory", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the user has as many threads as allowed
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _make_ready(ranges: Iterable[tuple[int, int]], ended: threading.Event) -> None:
    for address, size_bytes in ranges:
        first, end = address + -address % mmap.PAGESIZE, (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for begin in range(first, end, _SLICE_BYTES):
            length = min(_SLICE_BYTES, end - begin)
            given = not ended.is_set() and not _LIBC.madvise(
                ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
            )
            if not given:
                return
