"""Who is an administrator of the file system."""

from __future__ import annotations

from typing import Final

from fireflyer.runtime.rpc import Caller

__all__ = ["FS_ADMIN", "is_administrator"]

FS_ADMIN: Final = "fs:admin"
"""The role. It is all that counts: whoever may add users to a platform could take a name."""


def is_administrator(caller: Caller) -> bool:
    """A user who shows a token that carries the role: that of a run carries none."""
    return caller.role == "user" and FS_ADMIN in caller.roles
