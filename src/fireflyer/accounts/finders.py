"""Whose token it is, for the handshakes of a service: what `Accepts` awaits, over a file or a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from fireflyer.identity.account import Scope
from fireflyer.identity.handshake import FindUser, UserKey
from fireflyer.identity.tokens import TokenStore

__all__ = ["BOTH", "finder_in_file", "first_of"]

BOTH: Final[tuple[Scope, ...]] = ("user", "run")


def finder_in_file(tokens: TokenStore) -> FindUser:
    """Of either scope. It looks in the loop itself, not in a thread: a file that did not change is not read again, and
    threads may be waiting for disks that hang."""

    async def find(token_id: str) -> UserKey | None:
        return tokens.find(token_id, int(time.time()), BOTH)

    return find


def first_of(finders: Sequence[FindUser]) -> FindUser | None:
    """Where there are several, the first that knows the token says whose it is. None: there are no users."""
    if len(finders) < 2:
        return finders[0] if finders else None

    async def find(token_id: str) -> UserKey | None:
        for one in finders:
            user = await one(token_id)
            if user is not None:
                return user
        return None

    return find
