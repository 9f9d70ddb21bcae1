"""Memory that a virtual machine's host has taken away.

A guest that reports its free pages gives them to the host within seconds; each costs some 17 us when it is used again,
4.4 ms a MiB, ten times what reading it through a mount costs. Who meets them is chance: whatever is measured after
something large was freed. So as much as will be needed is touched before the clock starts, ours and the peers' alike.
Pages go back during the measurement too, so this helps in part. On a machine that has its memory for itself it costs a
second and changes nothing.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np

from fireflyer.base.units import KIB, MIB

__all__ = ["take_back"]

LEFT_BYTES: Final = 512 * MIB
"""Stays free: what is in the page cache must stay there."""


def take_back(wanted_bytes: float) -> None:
    """Use so much of the memory that is free, or all of it, and free it again."""
    size = min(int(wanted_bytes), _free_bytes() - LEFT_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    if size <= 0:
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        del pages


def _free_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * KIB for line in file if line.startswith("MemFree:"))
