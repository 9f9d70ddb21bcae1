"""Which account of this machine a user's ranks run as.

An agent of a user serves that account alone. An agent of root asks the site's table (user → account); without a table
the account is the one that the manager names, or that of the user's own name. Accounts with rights of root, and those
that this machine does not have, are refused.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping

import msgspec

from fireflyer.base.errors import PermissionDenied

__all__ = ["Account", "Accounts"]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """As the files of this machine say it."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str
    shell: str


class Accounts:
    """`uid`: of the agent. `table`: the site's; None: there is none. `own_user`: an agent of root serves root alone, as
    on a machine that one person tries the platform on."""

    def __init__(self, uid: int, table: Mapping[str, str] | None = None, *, own_user: bool = False) -> None:
        self.uid = uid
        self._table = table
        self.serves_own = uid != 0 or own_user

    def of_user(self, user: str, named: str) -> Account | None:
        """The account for ranks of `user`, where the manager names `named` (empty: none). None: that of the agent.
        Raises `PermissionDenied`."""
        if self.serves_own:
            if named and self.uid_of(named) != self.uid:
                raise PermissionDenied(f"the agent there runs as uid {self.uid} and starts nothing as {named}")
            return None
        name = named or user
        if self._table is not None:
            if user not in self._table:
                raise PermissionDenied(f"the table of accounts there has no line for user {user}; add one")
            name = self._table[user]
            if named not in ("", name):
                raise PermissionDenied(f"the table of accounts there maps user {user} to {name}, not to {named}")
        return self._account(name)

    def uid_of(self, name: str) -> int | None:
        """None: there is no such account now."""
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            return None

    def _account(self, name: str) -> Account:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise PermissionDenied(f"there is no account {name} there; make it, or correct the table") from None
        groups = os.getgrouplist(name, entry.pw_gid)
        if entry.pw_uid == 0 or entry.pw_gid == 0 or 0 in groups:
            raise PermissionDenied(f"account {name} there has rights of root, as which nothing is started")
        return Account(
            uid=entry.pw_uid,
            gid=entry.pw_gid,
            groups=tuple(groups),
            name=name,
            home=entry.pw_dir,
            shell=entry.pw_shell or "/bin/sh",
        )
