"""`TokenStore` for the loop of a service: each call in a thread, since it locks, reads and syncs a file."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from fireflyer.identity.handshake import UserKey
from fireflyer.identity.tokens import TokenStore
from fireflyer.identity.users import (
    MAX_USERS_PER_PAGE,
    USER_SCOPE,
    Account,
    Identity,
    Scope,
    TokenInfo,
    UserInfo,
)

__all__ = ["TokenFile"]


class TokenFile:
    """The `IdentityStore` in a file. A call that is cancelled goes on to its end in its thread."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    async def create_user(
        self, name: str, now_s: int, *, uid: int | None = None, gid: int | None = None, groups: Sequence[int] = ()
    ) -> Account:
        return await asyncio.to_thread(self._store.create_user, name, now_s, uid=uid, gid=gid, groups=groups)

    async def remove_user(self, name: str) -> None:
        await asyncio.to_thread(self._store.remove_user, name)

    async def user(self, name: str) -> UserInfo | None:
        return await asyncio.to_thread(self._store.user, name)

    async def users(self, after: str = "", limit: int = MAX_USERS_PER_PAGE) -> list[UserInfo]:
        def page() -> list[UserInfo]:
            names = [name for name in self._store.users() if name > after][: min(limit, MAX_USERS_PER_PAGE)]
            return [user for name in names if (user := self._store.user(name)) is not None]

        return await asyncio.to_thread(page)

    async def grant_role(self, name: str, role: str) -> None:
        await asyncio.to_thread(self._store.grant_role, name, role)

    async def revoke_role(self, name: str, role: str) -> None:
        await asyncio.to_thread(self._store.revoke_role, name, role)

    async def issue(
        self, user: str, now_s: int, *, lifetime_s: int | None = None, label: str = "", scope: Scope = "user"
    ) -> str:
        return await asyncio.to_thread(self._store.issue, user, now_s, lifetime_s=lifetime_s, label=label, scope=scope)

    async def revoke(self, token_id: str) -> None:
        await asyncio.to_thread(self._store.revoke, token_id)

    async def tokens(self, user: str) -> list[TokenInfo]:
        return await asyncio.to_thread(self._store.tokens, user)

    async def verify(self, token: str, now_s: int) -> Identity:
        return await asyncio.to_thread(self._store.verify, token, now_s)

    async def find(self, token_id: str, now_s: int, scopes: Collection[Scope] = USER_SCOPE) -> UserKey | None:
        return await asyncio.to_thread(self._store.find, token_id, now_s, scopes)
