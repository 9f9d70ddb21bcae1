"""Descriptors 0, 1 and 2 must be open in a process that runs an event loop.

A process may be started without them (`ff run … <&-`, some supervisors). The next files and sockets that it opens
then get these numbers: libuv aborts the process when it closes one of them, and whatever is printed lands in a
stranger's file.
"""

from __future__ import annotations

import os
import sys

__all__ = ["open_standard_streams"]


def open_standard_streams() -> None:
    """Opens those of the three descriptors that are closed on /dev/null, and `sys.stdin`, `sys.stdout`, `sys.stderr`
    where they are None. Changes nothing in a process that has them. Raises `OSError` where there is no /dev/null."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
