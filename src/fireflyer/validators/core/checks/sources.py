"""What is captured for the checks: tools that are run, files that are read. Data, which the runner interprets."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["MAX_OUTPUT_BYTES", "Command", "Files", "KernelLog", "MountPoints", "Source"]

MAX_OUTPUT_BYTES: Final = 4 << 20
"""Of one tool; one that prints more is killed. A report of `nvidia-smi -q -x` on eight GPUs has 300 KiB."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A tool, without a shell."""

    name: str
    argv: tuple[str, ...]
    """With `{}` where the name of a device belongs."""
    each: str = ""
    """It runs once for each path that matches this pattern; the device is the path's part where the pattern has its
    last `*`. Empty: it runs once."""
    limit_s: float = 10.0
    root: bool = False
    """Without root it sees nothing."""
    of_site: bool = False
    """The policy names it: root runs it only where nobody else can change it."""


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """Files of /sys, /proc and /etc, by patterns without the leading `/`."""

    name: str
    patterns: tuple[str, ...]
    last: bool = False
    """Read after all others, with limits of their own: users decide how many there are."""


class MountPoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where mount points lead that are links."""

    name: str
    points: tuple[str, ...] = ()
    fstab: bool = False
    """Those of /etc/fstab, too."""


class KernelLog(msgspec.Struct, frozen=True, kw_only=True):
    """/dev/kmsg, or where that is not allowed the journal."""

    name: str


Source = Command | Files | MountPoints | KernelLog
