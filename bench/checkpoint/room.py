"""Whether memory and disk have room for what a case needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

__all__ = ["kib_of", "missing_room"]

_SPARE_BYTES: Final = 512 << 20
"""For everything else."""


def kib_of(field: str, file: str) -> int:
    """A line `Field:  123 kB` of a file of the kernel."""
    for line in Path(file).read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(field)


def missing_room(memory_bytes: int, disk_bytes: int, directory: str) -> str | None:
    """What there is too little of; memory that can be had without paging counts."""
    available_bytes = kib_of("MemAvailable", "/proc/meminfo") << 10
    for what, needed, there in (
        ("memory", memory_bytes + _SPARE_BYTES, available_bytes),
        ("space on the disk", disk_bytes + _SPARE_BYTES, shutil.disk_usage(directory).free),
    ):
        if there < needed:
            return f"it needs {needed >> 20} MiB of {what}, {there >> 20} MiB are free"
    return None
