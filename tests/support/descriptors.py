"""Which descriptors this process has, and how many it may still open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["only_free", "open_descriptors"]


def open_descriptors() -> set[int]:
    listed = [int(fd) for fd in os.listdir("/proc/self/fd")]
    return {fd for fd in listed if os.path.islink(f"/proc/self/fd/{fd}")}


@contextmanager
def only_free(count: int) -> Iterator[None]:
    """Within it only `count` more can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_descriptors()  # without the one by which they were listed
    free = [fd for fd in range(len(used) + count + 1) if fd not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
