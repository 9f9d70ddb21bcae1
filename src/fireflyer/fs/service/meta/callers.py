"""Who a request acts as: what the connection has proven, and what a trusted mount says.

| connection                  | `Actor` | acts as                                                              |
|-----------------------------|---------|----------------------------------------------------------------------|
| node secret                 | given   | that user; uid and gid 0 only with `trusted_root`, else `NOBODY`      |
| node secret                 | none    | uid 0, the same                                                      |
| token of an administrator   | refused | uid 0                                                                |
| token of a run, of any user | refused | uid, gid and groups of their account                                 |
| token of another user       | refused | uid, gid and groups of their account                                 |

Accounts are those that the handshake found; `runtime.token_watch` ends a connection whose user is another one by now.
"""

from __future__ import annotations

import errno

from fireflyer.base.errors import PermissionDenied
from fireflyer.fs.core.meta.context import Requester
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.meta import Actor
from fireflyer.fs.service.meta.config import NOBODY, MetaSettings
from fireflyer.fs.service.rights import is_administrator
from fireflyer.runtime.rpc import Caller

__all__ = ["Callers"]


class Callers:
    def __init__(self, settings: MetaSettings) -> None:
        self._settings = settings

    def user_of(self, caller: Caller) -> str:
        """Empty for a service."""
        return "" if caller.role == "node" else caller.identity

    def requester(self, caller: Caller, client: ClientId) -> Requester:
        """Where no actor is named. Raises `PermissionDenied`."""
        if caller.role == "node":
            return self._trusted(client, Actor(0, 0))
        if is_administrator(caller):
            return Requester(client, 0, 0, (), unrestricted=True)
        account = caller.account
        if account is None:
            raise PermissionDenied(f"user {caller.identity} has no account in this file system; ask an administrator")
        return Requester(client, account.uid, account.gid, account.groups, unrestricted=account.uid == 0, by_path=True)

    def named(self, caller: Caller, client: ClientId, actor: Actor) -> Requester:
        """Raises `FileError` (EPERM) where the caller may not name anybody."""
        if caller.role != "node":
            raise file_error(errno.EPERM, "only services authenticated with the node secret may act for another user")
        return self._trusted(client, actor)

    def _trusted(self, client: ClientId, actor: Actor) -> Requester:
        if self._settings.trusted_root:
            return Requester(client, actor.uid, actor.gid, actor.groups, unrestricted=actor.uid == 0)
        groups = tuple(_unless_root(gid) for gid in actor.groups)
        return Requester(client, _unless_root(actor.uid), _unless_root(actor.gid), groups)


def _unless_root(number: int) -> int:
    return number or NOBODY
