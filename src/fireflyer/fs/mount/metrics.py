"""What a mount tells Prometheus. All of it is counted anyway, or looked up when somebody asks.

How many inodes the kernel knows nobody counts: their numbers are never used again, so what it forgets is nothing to us.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fireflyer.runtime.metrics import Series

if TYPE_CHECKING:
    from fireflyer.native.fuse import FuseSession

__all__ = ["MountUsage", "mount_series"]


@dataclass(frozen=True, slots=True)
class MountUsage:
    """What a mount has in its memory. `dirty_bytes`: written by programs, and not at the storage nodes yet."""

    inodes: int
    files: int
    dirty_bytes: int


def mount_series(
    session: FuseSession, under_way: Mapping[str, int], directories: int, held: MountUsage
) -> Sequence[Series]:
    """`under_way`: requests that are not answered, by kind. `directories`: that are open."""
    errors = {errno.errorcode.get(error, "other"): count for error, count in session.errors.items()}
    return [
        _by("fireflyer_mount_requests_total", "Requests of the kernel", "request", session.requests),
        _by("fireflyer_mount_refusals_total", "Requests answered with an error, by errno", "reason", errors),
        Series.one(
            "fireflyer_mount_read_bytes_total", "counter", "Given to programs or the kernel", session.read_bytes
        ),
        Series.one("fireflyer_mount_written_bytes_total", "counter", "Taken from programs", session.written_bytes),
        Series(
            "fireflyer_mount_under_way",
            "gauge",
            "Requests that are not answered yet; locks may wait for long",
            [({"request": kind}, float(count)) for kind, count in under_way.items()],
        ),
        Series.one("fireflyer_mount_inodes", "gauge", "Files that are open, each once", held.inodes),
        Series.one("fireflyer_mount_open_files", "gauge", "Opens of files that were not closed", held.files),
        Series.one(
            "fireflyer_mount_open_directories", "gauge", "Opens of directories that were not closed", directories
        ),
        Series.one(
            "fireflyer_mount_dirty_bytes", "gauge", "Written, and not at the storage nodes yet", held.dirty_bytes
        ),
    ]


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Series:
    return Series(name, "counter", text, [({label: key}, float(count)) for key, count in counts.items()])
