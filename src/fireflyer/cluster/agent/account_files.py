"""Files that the account of a run leaves for the agent, read as a stranger's."""

from __future__ import annotations

import os
import stat
from typing import Final, TypeVar

from fireflyer.base.decoding import DECODE_ERRORS, decode_json

__all__ = ["read_account_file"]

_MAX_FILE_BYTES: Final = 256 << 10
_T = TypeVar("_T")


def read_account_file(directory: str, name: str, kind: type[_T]) -> _T | None:
    """A small file that another account may have put there; None where it is not there, or nothing that can be used."""
    try:
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.fstat(parent).st_uid:
                return None
            data = file.read(_MAX_FILE_BYTES + 1)
        return decode_json(data, kind) if len(data) <= _MAX_FILE_BYTES else None
    except (OSError, *DECODE_ERRORS):
        return None
    finally:
        os.close(parent)
