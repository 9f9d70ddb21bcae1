"""Users, roles and tokens as operators change them: who may, and who did, in the audit and in the log."""

from __future__ import annotations

import logging
import time

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cluster.core.platform.access import check_roles_of, check_tokens_of, check_user
from fireflyer.cluster.history.audit import AuditLog
from fireflyer.cluster.manager.rights import OPERATORS
from fireflyer.cluster.manager.run_tokens import RunTokens
from fireflyer.cluster.manager.web.sessions import FoundToken, Principal
from fireflyer.cluster.schema.api import KnownUser, NewUser, ShownToken
from fireflyer.identity import IdentityStore, TokenInfo, UserInfo, UserKey
from fireflyer.identity.users import refused_token

__all__ = ["Users"]

_log = logging.getLogger(__name__)


class Users:
    """Over the `IdentityStore` of all managers. `operators`: users who are administrators beside those with the role.
    Raises `NotFound`, `Exists`, `UsageError`, `PermissionDenied` and what the store raises."""

    def __init__(self, store: IdentityStore, operators: tuple[str, ...], runs: RunTokens, audit: AuditLog) -> None:
        self._store = store
        self._audit = audit
        self._operators = operators
        self._runs = runs

    # --- who asks ---

    async def verify(self, token: str) -> FoundToken:
        """Raises `PermissionDenied`."""
        of_run = await self._runs.verify(token)
        if of_run is not None:
            return of_run
        who = await self._store.verify(token, int(time.time()))
        if who.scope != "user":
            raise refused_token()
        return FoundToken(user=who.user, token_id=who.token_id, roles=self._roles(who.user, who.roles))

    async def still(self, token_id: str) -> FoundToken | None:
        """None for a token that is revoked or expired."""
        if self._runs.is_of_run(token_id):
            return await self._runs.still(token_id)
        key = await self._store.find(token_id, int(time.time()))
        user = None if key is None else await self._store.user(key.user)
        if user is None:
            return None
        name = user.account.name
        return FoundToken(user=name, token_id=token_id, roles=self._roles(name, user.roles))

    async def find(self, token_id: str) -> UserKey | None:
        """For handshakes of other services, which let in who shows a token of a person or of a run."""
        if self._runs.is_of_run(token_id):
            return await self._runs.find(token_id)
        return await self._store.find(token_id, int(time.time()))

    async def roles_of(self, name: str) -> tuple[str, ...] | None:
        """None where there is no such user."""
        user = await self._store.user(name)
        return None if user is None else self._roles(name, user.roles)

    def _roles(self, user: str, roles: tuple[str, ...]) -> tuple[str, ...]:
        return OPERATORS if user in self._operators else roles

    # --- users ---

    async def known(self, by: Principal, after: str, limit: int) -> list[KnownUser]:
        check_user("", (), by.roles)
        return [self._shown(user) for user in await self._store.users(after, limit)]

    async def create(self, by: Principal, new: NewUser, *, address: str = "") -> KnownUser:
        check_user(new.name, (), by.roles)
        if new.roles:
            check_roles_of(by.roles)
        async with self._audit.entry(by.user, "CreateUser", new.name, ", ".join(new.roles), address=address):
            await self._store.create_user(new.name, int(time.time()), uid=new.uid)
            for role in new.roles:
                await self._store.grant_role(new.name, role)
        _log.info("user created user=%s roles=%s by=%s", new.name, ",".join(new.roles), by.user)
        return self._shown(await self._user(new.name))

    async def remove(self, by: Principal, name: str, *, address: str = "") -> str:
        user = await self._user(name)
        check_user(name, self._roles(name, user.roles), by.roles)
        if name == by.user:
            raise UsageError("you cannot remove yourself; ask another administrator")
        async with self._audit.entry(by.user, "RemoveUser", name, address=address):
            await self._store.remove_user(name)
        _log.info("user removed user=%s by=%s", name, by.user)
        return f"user {name} and their tokens are removed; their tasks stay"

    async def grant(self, by: Principal, name: str, role: str, *, address: str = "") -> str:
        check_roles_of(by.roles)
        await self._user(name)
        async with self._audit.entry(by.user, "GrantRole", name, role, address=address):
            await self._store.grant_role(name, role)
        _log.info("role granted user=%s role=%s by=%s", name, role, by.user)
        return f"user {name} has the role {role}"

    async def revoke_role(self, by: Principal, name: str, role: str, *, address: str = "") -> str:
        check_roles_of(by.roles)
        if name == by.user:
            raise UsageError("you cannot take a role from yourself; ask another administrator")
        await self._user(name)
        async with self._audit.entry(by.user, "RevokeRole", name, role, address=address):
            await self._store.revoke_role(name, role)
        _log.info("role revoked user=%s role=%s by=%s", name, role, by.user)
        return f"user {name} has not the role {role}"

    # --- tokens ---

    async def tokens(self, by: Principal, name: str) -> list[TokenInfo]:
        await self._may_change_tokens(by, name)
        return await self._store.tokens(name)

    async def issue(
        self, by: Principal, name: str, lifetime_s: int | None, label: str, *, address: str = ""
    ) -> ShownToken:
        await self._may_change_tokens(by, name)
        now_s = int(time.time())
        async with self._audit.entry(by.user, "IssueToken", name, label, address=address):
            token = await self._store.issue(name, now_s, lifetime_s=lifetime_s, label=label)
        _log.info("token issued user=%s lifetime_s=%s by=%s", name, lifetime_s, by.user)
        return ShownToken(token, None if lifetime_s is None else now_s + lifetime_s)

    async def revoke(self, by: Principal, name: str, token_id: str, *, address: str = "") -> str:
        await self._may_change_tokens(by, name)
        if all(token.id != token_id for token in await self._store.tokens(name)):
            raise NotFound(f"user {name} has no token {token_id[:80]!r}; `ff user tokens {name}` shows them")
        async with self._audit.entry(by.user, "RevokeToken", name, f"token {token_id}", address=address):
            await self._store.revoke(token_id)
        _log.info("token revoked user=%s token=%s by=%s", name, token_id, by.user)
        return f"token {token_id} of {name} is revoked"

    async def _may_change_tokens(self, by: Principal, name: str) -> None:
        user = await self._store.user(name)
        if user is None and name != by.user:
            check_user(name, (), by.roles)  # whether there is such a user is not for everybody
        known = await self._user(name)
        check_tokens_of(name, self._roles(name, known.roles), by.user, by.roles)

    async def _user(self, name: str) -> UserInfo:
        user = await self._store.user(name)
        if user is None:
            raise NotFound(f"there is no user {name[:80]!r}; `ff user list` shows them")
        return user

    def _shown(self, user: UserInfo) -> KnownUser:
        name = user.account.name
        return KnownUser(name=name, uid=user.account.uid, roles=self._roles(name, user.roles), created_s=user.created_s)
