"""Times of a file that was written: the same for its writer before it tells the service, and for all others after it.

Programs compare what `fstat` says before they close a file with what `stat` says later, so that the service must not
set times of its own then. Who writes tells when, by its machine's clock, and both sides work out the times by the same
rule from the attributes before. They grow with each report, however clocks differ, or a change would not be seen.
"""

from __future__ import annotations

from typing import Final

from fireflyer.base.units import SECOND
from fireflyer.fs.schema.inodes import Inode

__all__ = ["MAX_SKEW_NS", "believed", "times_of_write"]

MAX_SKEW_NS: Final = 60 * SECOND
"""By which a client's clock, and the time that a write has waited, may differ from the service's clock."""


def times_of_write(inode: Inode, written_ns: int) -> tuple[int, int]:
    """mtime and ctime of `inode` after a write at `written_ns` (Unix). An mtime that somebody has set far ahead is left
    by a write."""
    mtime_ns = inode.mtime_ns
    if written_ns > mtime_ns or mtime_ns > written_ns + MAX_SKEW_NS:
        mtime_ns = written_ns
    else:
        mtime_ns += 1
    return mtime_ns, max(written_ns, inode.ctime_ns + 1)


def believed(written_ns: int, now_ns: int) -> int:
    """Of the time of a write that a client tells a service whose clock says `now_ns`."""
    return min(max(written_ns, now_ns - MAX_SKEW_NS), now_ns + MAX_SKEW_NS)
