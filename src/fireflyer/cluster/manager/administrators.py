"""The users of a manager's store, and how the first administrator is made: apart from the manager's process, whose
packages (HTTP, SQL) take longer to import than all of this takes."""

from __future__ import annotations

import os
import time

from fireflyer.accounts import AccountStore
from fireflyer.cluster.core.platform.access import ADMIN
from fireflyer.cluster.history.audit import AuditLog
from fireflyer.cluster.manager.config import PlatformConfig, history_url
from fireflyer.identity import IdentityStore, TokenFile, TokenStore
from fireflyer.kvstore import Engine
from fireflyer.kvstore import open as open_store

__all__ = ["new_administrator", "users_of"]


def users_of(config: PlatformConfig, engine: Engine) -> IdentityStore:
    """Those of the file that the configuration names, else those in the store."""
    return TokenFile(TokenStore(config.tokens_file)) if config.tokens_file else AccountStore(engine)


async def new_administrator(
    config: PlatformConfig, name: str, *, uid: int | None = None, gid: int | None = None
) -> str:
    """A token of user `name`, who is an administrator of the platform from now on, and is made if need be, with these
    numbers: for whoever may open the store. Raises `FireflyerError`."""
    async with await open_store(config.store) as engine:
        users, now_s = users_of(config, engine), int(time.time())
        audit = AuditLog(engine if history_url(config) else None)
        async with audit.entry(f"account {os.geteuid()} of the manager", "NewAdministrator", name):
            if await users.user(name) is None:
                await users.create_user(name, now_s, uid=uid, gid=gid)
            await users.grant_role(name, ADMIN)
            return await users.issue(name, now_s, label="administrator")
