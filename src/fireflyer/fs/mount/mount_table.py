"""What is mounted where, as the kernel lists it to this process."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

__all__ = ["SUBTYPE", "MountEntry", "is_mounted", "mounted_on"]

SUBTYPE: Final = "fireflyer"
_LIST: Final = "/proc/self/mountinfo"
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


class MountEntry(NamedTuple):
    """`device`: "major:minor", of no other mount before the process of this one has let it go."""

    device: str
    file_system: str


def mounted_on(directory: str) -> MountEntry | None:
    """What is seen there, if something is mounted on this very directory. Asks that mount nothing: its process may be
    gone, or stand."""
    above, name = os.path.split(os.path.abspath(directory))
    place = os.path.join(os.path.realpath(above), name)
    found = _listed()
    return found.get(place) or found.get(os.path.realpath(place))


def is_mounted(directory: str) -> bool:
    """A mount of `ff fs mount`."""
    found = mounted_on(directory)
    return found is not None and found.file_system == f"fuse.{SUBTYPE}"


def _listed() -> dict[str, MountEntry]:
    """A later one covers those before it."""
    found: dict[str, MountEntry] = {}
    with open(_LIST, "rb") as file:
        for line in file:
            mount, _, source = line.partition(b" - ")
            _, _, device, _, place, *_ = mount.split(b" ")
            name = os.fsdecode(_OCTAL.sub(lambda octal: bytes([int(octal[1], 8)]), place))
            found[name] = MountEntry(device.decode("ascii"), source.split(b" ")[0].decode(errors="replace"))
    return found
