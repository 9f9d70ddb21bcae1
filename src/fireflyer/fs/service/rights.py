"""Who is an administrator of the file system."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from fireflyer.runtime.rpc import Caller

__all__ = ["FS_ADMIN", "is_administrator"]

FS_ADMIN: Final = "fs:admin"
"""The role."""


def is_administrator(caller: Caller, administrators: Collection[str]) -> bool:
    """A user who has the role or is named in the configuration, with a token of their own: the token of a run is worth
    no more than files of its user."""
    if caller.role != "user" or caller.scope != "user":
        return False
    return FS_ADMIN in caller.roles or caller.identity in administrators
