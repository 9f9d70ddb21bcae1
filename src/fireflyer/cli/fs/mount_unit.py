"""The unit of systemd that `ff fs mount --unit` prints."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING, Final

from fireflyer.base.errors import UsageError
from fireflyer.cli.units import exec_line, print_unit_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fireflyer.cli.fs.connect import ClusterTarget

__all__ = ["print_mount_unit"]

# A user mounts by fusermount3, which has rights that NoNewPrivileges would take. After a kill the dead mount would keep
# the next start from its place; after an orderly end there is none.
_SETTINGS: Final = """\
TimeoutStopSec=5min
ExecStopPost=-/bin/sh -c '[ "$$SERVICE_RESULT" = success ] || exec "$$@"' sh {umount}
"""


def print_mount_unit(
    kind: str, where: ClusterTarget, place: str, options: tuple[str, ...], files: Mapping[str, str | None]
) -> int:
    """`options`: further words of `ff fs mount`. `files`: option and path of each file with a secret; None: not given.
    Raises `UsageError` for a place that is no directory."""
    place = os.path.abspath(place)
    if not os.path.isdir(place):
        raise UsageError(f"{place} is no directory; make it, since a unit does not")
    if where.directory:
        target = ["--dir", os.path.abspath(where.directory)]
    else:
        target = [word for manager in where.managers for word in ("--manager", manager)]
        target += [word for name, path in files.items() if path for word in (name, os.path.abspath(path))]
    words = ("fs", "mount", *target, *options)
    name = "-".join(("fireflyer-mount", *re.findall(r"\w+", place, re.ASCII)))
    return print_unit_of(
        kind,
        (*words, place),
        asked=("ff", *words, "--unit", kind, place),
        name=name,
        what=f"files of 3FS on {_printable(place)}",
        title=f"Mounts {shlex.quote(where.directory or ','.join(where.managers))} on {shlex.quote(place)}",
        settings=_SETTINGS.format(umount=exec_line("fs", "umount", "--lazy", place)),
    )


def _printable(place: str) -> str:
    """In a description systemd replaces what begins with a percent sign."""
    return place.replace("%", "%%")
