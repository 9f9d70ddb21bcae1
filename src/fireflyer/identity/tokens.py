"""The users of a cluster, with their roles and tokens, in one private file.

The file keeps hashes of tokens only (`fireflyer.identity.users`); since for the handshake the hash is as good as the
token, the file must be private (mode 0600) and is refused otherwise.

Every change takes the lock file, reads, changes and replaces the file atomically: several processes (a service and an
administrator's command) may use one file at a time. Readers notice a replaced file by themselves.

Each user has a uid, by which files belong to them; those that are assigned here are never given to another one, also
when the user was removed. Files of version 1 had none: their users get theirs, in the order in which they were made,
when such a file is read (so all readers agree), and keep them when it is written. Files of version 2 had no roles and
no scopes of tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import MIB
from fireflyer.identity.handshake import UserKey, token_key
from fireflyer.identity.private_files import lock_file, read_private_file, write_private_file
from fireflyer.identity.users import (
    FIRST_UID,
    MAX_GROUPS,
    MAX_ID,
    MAX_ROLES,
    MAX_USERS,
    USER_SCOPE,
    Account,
    Identity,
    Scope,
    TokenInfo,
    UserInfo,
    check_ids,
    check_name,
    check_role,
    expiry_of,
    max_tokens,
    new_token,
    no_token,
    no_user,
    refused_token,
    token_id_or_refused,
    too_many,
    uid_taken,
    user_exists,
)

__all__ = ["FileContent", "TokenStore"]

_MAX_FILE_BYTES: Final = 256 * MIB
_NOBODY: Final = bytes(32)

_UnixId = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
_Role = Annotated[str, msgspec.Meta(max_length=65)]


class _Token(msgspec.Struct, kw_only=True):
    id: Annotated[str, msgspec.Meta(max_length=64)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    label: str
    created_s: int
    expires_s: int | None
    scope: Scope = "user"


class _User(msgspec.Struct, kw_only=True):
    name: str
    created_s: int
    tokens: list[_Token]
    uid: _UnixId | None = None
    """None in files of version 1 only; so is `gid`."""
    gid: _UnixId | None = None
    groups: Annotated[list[_UnixId], msgspec.Meta(max_length=MAX_GROUPS)] = []
    roles: Annotated[list[_Role], msgspec.Meta(max_length=MAX_ROLES)] = []


class _File(msgspec.Struct, kw_only=True):
    version: int
    users: list[_User]
    next_uid: _UnixId = FIRST_UID
    """Higher than all that were assigned."""


class FileContent(NamedTuple):
    """`tokens`: with the key of each. `digest`: SHA-256, the same for the same users and tokens."""

    users: list[UserInfo]
    tokens: list[tuple[TokenInfo, bytes]]
    next_uid: int
    digest: bytes


_VERSION: Final = 3
_Signature = tuple[int, int, int]


class TokenStore:
    """The users in the file `path`, which need not exist yet. Threads may share one.

    Raises `PermissionDenied` when other users may read the file, `DataCorruption` when it is not what this class wrote.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._lock = threading.Lock()
        self._signature: _Signature | None = None
        self._users: dict[str, _User] = {}
        self._next_uid = FIRST_UID
        self._tokens: dict[str, tuple[str, _Token]] = {}
        with self._lock:
            self._refresh()

    def create_user(
        self, name: str, now_s: int, *, uid: int | None = None, gid: int | None = None, groups: Sequence[int] = ()
    ) -> Account:
        """Create a user as in `IdentityStore`, like the methods of the same names below."""
        check_name(name)
        check_ids(name, uid, gid, groups)
        with self._changing():
            if name in self._users:
                raise user_exists(name)
            if len(self._users) >= MAX_USERS:
                raise UsageError(f"there are {MAX_USERS} users, the maximum; remove some")
            taken = {user.uid: user.name for user in self._users.values()}
            if uid is None:
                uid = self._new_uid(taken)
            elif uid in taken:
                raise uid_taken(taken[uid], uid)
            user = _User(
                name=name,
                created_s=now_s,
                tokens=[],
                uid=uid,
                gid=uid if gid is None else gid,
                groups=sorted(set(groups)),
            )
            self._users[name] = user
        return _account(user)

    def _new_uid(self, taken: Mapping[int | None, str]) -> int:
        while self._next_uid in taken:
            self._next_uid += 1
        self._next_uid += 1
        if self._next_uid > MAX_ID:
            raise UsageError(f"all uids up to {MAX_ID} were assigned; give one with --uid")
        return self._next_uid - 1

    def remove_user(self, name: str) -> None:
        with self._changing():
            self._user(name)
            del self._users[name]

    def grant_role(self, name: str, role: str) -> None:
        check_role(role)
        with self._changing():
            roles = self._user(name).roles
            if role not in roles:
                if len(roles) >= MAX_ROLES:
                    raise UsageError(f"user {name} has {MAX_ROLES} roles, the maximum; revoke some")
                roles.append(role)
                roles.sort()

    def revoke_role(self, name: str, role: str) -> None:
        with self._changing():
            roles = self._user(name).roles
            if role in roles:
                roles.remove(role)

    def issue(
        self, user: str, now_s: int, *, lifetime_s: int | None = None, label: str = "", scope: Scope = "user"
    ) -> str:
        expires_s = expiry_of(now_s, lifetime_s, label, scope)
        made = new_token()
        entry = _Token(
            id=made.id, sha256=made.key.hex(), label=label, created_s=now_s, expires_s=expires_s, scope=scope
        )
        with self._changing():
            tokens = self._user(user).tokens
            tokens[:] = [old for old in tokens if not _expired(old, now_s)]
            if sum(old.scope == scope for old in tokens) >= max_tokens(scope):
                raise too_many(user, scope)
            tokens.append(entry)
        return made.token

    def revoke(self, token_id: str) -> None:
        with self._changing():
            found = self._tokens.get(token_id)
            if found is None:
                raise no_token(token_id)
            self._user(found[0]).tokens.remove(found[1])

    def expire(self, token_id: str, expires_s: int) -> None:
        """The token counts no more from `expires_s` on. Raises `NotFound`, `UsageError` where it expires earlier."""
        with self._changing():
            found = self._tokens.get(token_id)
            if found is None:
                raise no_token(token_id)
            if found[1].expires_s is not None and found[1].expires_s < expires_s:
                raise UsageError(f"token {token_id} expires earlier already; issue a new one instead")
            found[1].expires_s = expires_s

    def verify(self, token: str, now_s: int) -> Identity:
        token_id = token_id_or_refused(token)
        with self._lock:
            self._refresh()
            found = self._tokens.get(token_id)
            roles = tuple(self._users[found[0]].roles) if found is not None else ()
        right = hmac.compare_digest(token_key(token), bytes.fromhex(found[1].sha256) if found else _NOBODY)
        if found is None or not right or _expired(found[1], now_s):
            raise refused_token()
        user, entry = found
        return Identity(user, entry.scope, roles if entry.scope == "user" else (), entry.id, entry.label)

    def find(self, token_id: str, now_s: int, scopes: Collection[Scope] = USER_SCOPE) -> UserKey | None:
        with self._lock:
            self._refresh()
            found = self._tokens.get(token_id)
            user = None if found is None else self._users.get(found[0])
        if found is None or user is None or _expired(found[1], now_s) or found[1].scope not in scopes:
            return None
        scope = found[1].scope
        roles = tuple(user.roles) if scope == "user" else ()
        return UserKey(user.name, bytes.fromhex(found[1].sha256), _account(user), roles, scope)

    def account(self, name: str) -> Account | None:
        """Account as it is now; None when there is no such user."""
        user = self.user(name)
        return None if user is None else user.account

    def user(self, name: str) -> UserInfo | None:
        with self._lock:
            self._refresh()
            user = self._users.get(name)
            return None if user is None else UserInfo(_account(user), tuple(user.roles), user.created_s)

    def users(self) -> list[str]:
        """Sorted names."""
        with self._lock:
            self._refresh()
            return sorted(self._users)

    def tokens(self, user: str) -> list[TokenInfo]:
        """The user's tokens in the order of issue, expired ones included. Raises `NotFound`."""
        with self._lock:
            self._refresh()
            return [
                TokenInfo(
                    id=t.id, user=user, label=t.label, created_s=t.created_s, expires_s=t.expires_s, scope=t.scope
                )
                for t in self._user(user).tokens
            ]

    def content(self) -> FileContent | None:
        """All that the file says; None where there is no file."""
        with self._lock:
            self._refresh()
            if self._signature is None:
                return None
            users = sorted(self._users.values(), key=lambda user: user.name)
            infos = [UserInfo(_account(user), tuple(user.roles), user.created_s) for user in users]
            tokens = [
                (TokenInfo(id=t.id, user=user.name, label=t.label, created_s=t.created_s, expires_s=t.expires_s,
                           scope=t.scope), bytes.fromhex(t.sha256))
                for user in users
                for t in user.tokens
            ]  # fmt: skip
            return FileContent(infos, tokens, self._next_uid, hashlib.sha256(self._encoded()).digest())

    def _encoded(self) -> bytes:
        users = sorted(self._users.values(), key=lambda user: user.name)
        return msgspec.json.encode(_File(version=_VERSION, users=users, next_uid=self._next_uid))

    def _user(self, name: str) -> _User:
        user = self._users.get(name)
        if user is None:
            raise no_user(name)
        return user

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock, read, (the caller changes), write. What the caller began is dropped when it raises."""
        with self._lock, lock_file(f"{self._path}.lock"):
            self._refresh()
            try:
                yield
                write_private_file(self._path, msgspec.json.format(self._encoded(), indent=1) + b"\n")
            finally:
                self._signature = None
                self._refresh()

    def _refresh(self) -> None:
        signature = self._read_signature()
        if signature is not None and signature == self._signature:
            return
        content = _File(version=_VERSION, users=[]) if signature is None else self._read()
        users = content.users
        self._next_uid = content.next_uid
        self._users = {user.name: user for user in users}
        self._tokens = {token.id: (user.name, token) for user in users for token in user.tokens}
        _assign_missing(self._users, self._new_uid)
        self._signature = signature

    def _read_signature(self) -> _Signature | None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translate_os_error(error, f"read {self._path}") from error
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read(self) -> _File:
        try:
            content = decode_json(read_private_file(self._path, _MAX_FILE_BYTES), _File)
        except DECODE_ERRORS as error:
            raise DataCorruption(f"token file {self._path} is damaged: {error}; restore it from a backup") from None
        if content.version not in (1, 2, _VERSION):
            raise DataCorruption(
                f"token file {self._path} has format version {content.version}, this release reads {_VERSION}; "
                "install a newer release"
            )
        return content


def _assign_missing(users: Mapping[str, _User], new_uid: Callable[[Mapping[int | None, str]], int]) -> None:
    """To users of a file of version 1."""
    missing = sorted(
        (user for user in users.values() if user.uid is None), key=lambda user: (user.created_s, user.name)
    )
    for user in missing:
        user.uid = user.gid = new_uid({other.uid: other.name for other in users.values()})


def _account(user: _User) -> Account:
    uid = user.uid or 0
    return Account(user.name, uid, uid if user.gid is None else user.gid, tuple(user.groups))


def _expired(token: _Token, now_s: int) -> bool:
    return token.expires_s is not None and now_s >= token.expires_s
