"""Users of a test, as a listener asks for them."""

from __future__ import annotations

from collections.abc import Mapping

from fireflyer.identity.handshake import FindUser, UserKey

__all__ = ["known"]


def known(users: Mapping[str, UserKey]) -> FindUser:
    """By the public numbers of their tokens. What the test changes in `users` counts from then on."""

    async def find(token_id: str) -> UserKey | None:
        return users.get(token_id)

    return find
