"""Who a user is in a file system, and what a token was issued for: what all of `identity` speaks of."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Account", "Scope"]

Scope = Literal["user", "run"]
"""`user`: a person's own token. `run`: that of the processes of one run, which carries no role (`identity.users`)."""


class Account(msgspec.Struct, frozen=True):
    """Numbers of a user in a file system. `groups`: supplementary ones, sorted."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
