"""Whose token it is, for the handshakes of a service: what `Accepts` awaits, over a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from fireflyer.accounts.store import AccountStore
from fireflyer.identity.account import Scope
from fireflyer.identity.handshake import FindUser, UserKey

__all__ = ["BOTH", "finder_in_store", "first_of"]

BOTH: Final[tuple[Scope, ...]] = ("user", "run")


def finder_in_store(users: AccountStore) -> FindUser:
    """Of either scope."""

    async def find(token_id: str) -> UserKey | None:
        return await users.find(token_id, int(time.time()), BOTH)

    return find


def first_of(finders: Sequence[FindUser]) -> FindUser:
    """The first that knows the token says whose it is."""
    if len(finders) == 1:
        return finders[0]

    async def find(token_id: str) -> UserKey | None:
        for one in finders:
            user = await one(token_id)
            if user is not None:
                return user
        return None

    return find
