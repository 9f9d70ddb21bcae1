"""How a process of the file system finds whose token it is: in a file of its own, and by asking other services."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Collection, Sequence

from fireflyer.accounts.finders import finder_in_file, first_of
from fireflyer.accounts.remote import RemoteAccounts
from fireflyer.fs.service.rights import FS_ADMIN
from fireflyer.identity import NodeCredential, TokenStore
from fireflyer.identity.handshake import FindUser, UserKey

__all__ = ["finding_users"]


@contextlib.asynccontextmanager
async def finding_users(
    tokens_file: str, administrators: Collection[str], servers: Sequence[str], credential: NodeCredential
) -> AsyncIterator[FindUser | None]:
    """`tokens_file`: empty where there is none. `administrators`: names of users in it who have the role. `servers`:
    who else knows users; they are asked for tokens that the file does not have. None: there are services only. Raises
    `FireflyerError` for a file that cannot be used."""
    finders = [_with_role(finder_in_file(TokenStore(tokens_file)), administrators)] if tokens_file else []
    async with contextlib.AsyncExitStack() as stack:
        if servers:
            remote = await stack.enter_async_context(RemoteAccounts(servers, credential))
            finders.append(remote.find)
        yield first_of(finders)


def _with_role(find_user: FindUser, administrators: Collection[str]) -> FindUser:
    async def find(token_id: str) -> UserKey | None:
        user = await find_user(token_id)
        if user is None or user.user not in administrators or user.scope != "user" or FS_ADMIN in user.roles:
            return user
        return dataclasses.replace(user, roles=tuple(sorted((*user.roles, FS_ADMIN))))

    return find
