"""How a process of the file system finds whose token it is: in the store of the cluster, and by asking services."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Collection, Sequence

from fireflyer.accounts import AccountStore
from fireflyer.accounts.finders import finder_in_store, first_of
from fireflyer.accounts.remote import RemoteAccounts
from fireflyer.fs.service.rights import FS_ADMIN
from fireflyer.identity import NodeCredential
from fireflyer.identity.handshake import FindUser, UserKey

__all__ = ["asking_managers", "finding_users"]

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def finding_users(
    users: AccountStore, administrators: Collection[str], platform: Sequence[str], credential: NodeCredential
) -> AsyncIterator[FindUser]:
    """For a manager. `users`: of the cluster itself. `administrators`: names of users in it who have the role.
    `platform`: managers of a platform, who are asked for tokens that the store does not have."""
    finders = [_with_role(finder_in_store(users), administrators)]
    async with contextlib.AsyncExitStack() as stack:
        if platform:
            remote = await stack.enter_async_context(RemoteAccounts(platform, credential))
            finders.append(remote.find)
        yield first_of(finders)


@contextlib.asynccontextmanager
async def asking_managers(
    managers: Sequence[str], credential: NodeCredential, tokens_file: str
) -> AsyncIterator[FindUser]:
    """For any other process. `tokens_file`: what its configuration says, which earlier releases read."""
    if tokens_file:
        _log.warning("tokens_file = %r is not read: managers are asked for users; remove the setting", tokens_file)
    async with RemoteAccounts(managers, credential) as remote:
        yield remote.find


def _with_role(find_user: FindUser, administrators: Collection[str]) -> FindUser:
    async def find(token_id: str) -> UserKey | None:
        user = await find_user(token_id)
        if user is None or user.user not in administrators or user.scope != "user" or FS_ADMIN in user.roles:
            return user
        return dataclasses.replace(user, roles=tuple(sorted((*user.roles, FS_ADMIN))))

    return find
