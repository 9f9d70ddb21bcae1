"""Users, who they are in a file system, and their tokens, in one private file.

A token is `fft1.<id>.<secret>`: the id is public and finds the entry, the secret is 256 random bits. The file keeps
`sha256(token)` only, so that reading it does not reveal tokens; since the secret is random and long, a slow hash or a
salt would add nothing. For the handshake the hash is as good as the token (see `fireflyer.identity.handshake`), which
is why the file must be private (mode 0600) and is refused otherwise.

Every change takes the lock file, reads, changes and replaces the file atomically: several processes (a service and an
administrator's command) may use one file at a time. Readers notice a replaced file by themselves. Times are Unix
seconds and come from the caller.

Each user has a uid, by which files belong to them; those that are assigned here are never given to another one, also
when the user was removed. Files of version 1 had none: their users get theirs, in the order in which they were made,
when such a file is read (so all readers agree), and keep them when it is written.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import DataCorruption, Exists, NotFound, PermissionDenied, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import MIB
from fireflyer.identity.handshake import BEARER_MARK, UserKey, token_id_of, token_key
from fireflyer.identity.private_files import lock_file, read_private_file, write_private_file

__all__ = ["FIRST_UID", "MAX_GROUPS", "MAX_TOKENS_PER_USER", "MAX_USERS", "Account", "TokenInfo", "TokenStore"]

MAX_USERS: Final = 10_000
MAX_TOKENS_PER_USER: Final = 64
MAX_GROUPS: Final = 64
"""Of one user, beside their own."""
FIRST_UID: Final = 10_000
"""Above those that distributions give to the people of one machine."""
_MAX_ID: Final = (1 << 32) - 2
"""The last number means "unchanged" in system calls."""
_MAX_LABEL_CHARS: Final = 80
_MAX_FILE_BYTES: Final = 256 * MIB
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_NOBODY: Final = bytes(32)


_UnixId = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ID)]


class Account(msgspec.Struct, frozen=True):
    """Who a user is in a file system. `groups`: supplementary ones, sorted."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class TokenInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What may be shown of a token. `expires_s` is None for one that does not expire."""

    id: str
    user: str
    label: str
    created_s: int
    expires_s: int | None


class _Token(msgspec.Struct, kw_only=True):
    id: Annotated[str, msgspec.Meta(max_length=64)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    label: str
    created_s: int
    expires_s: int | None


class _User(msgspec.Struct, kw_only=True):
    name: str
    created_s: int
    tokens: list[_Token]
    uid: _UnixId | None = None
    """None in files of version 1 only; so is `gid`."""
    gid: _UnixId | None = None
    groups: Annotated[list[_UnixId], msgspec.Meta(max_length=MAX_GROUPS)] = []


class _File(msgspec.Struct, kw_only=True):
    version: int
    users: list[_User]
    next_uid: _UnixId = FIRST_UID
    """Higher than all that were assigned."""


_VERSION: Final = 2
_decoder = msgspec.json.Decoder(_File)
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
        """`uid`: by default one that nobody has had; `gid`: by default the same number. Raises `Exists` (also where
        another user has this uid), `UsageError` for a bad name or number, or too many users or groups."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"user name {name[:80]!r} must be 1 to 64 letters, digits, '.', '_' or '-', and not begin with a digit"
            )
        for number in (uid, gid, *groups):
            if number is not None and not 0 <= number <= _MAX_ID:
                raise UsageError(f"uid or gid {number}; 0 to {_MAX_ID} are allowed")
        if len(set(groups)) > MAX_GROUPS:
            raise UsageError(f"{len(set(groups))} groups of user {name}; at most {MAX_GROUPS} are allowed")
        with self._changing():
            if name in self._users:
                raise Exists(f"user {name} exists already")
            if len(self._users) >= MAX_USERS:
                raise UsageError(f"there are {MAX_USERS} users, the maximum; remove some")
            taken = {user.uid: user.name for user in self._users.values()}
            if uid is None:
                uid = self._new_uid(taken)
            elif uid in taken:
                raise Exists(f"user {taken[uid]} has uid {uid} already")
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
        return self._next_uid - 1

    def remove_user(self, name: str) -> None:
        """With all tokens. Raises `NotFound`."""
        with self._changing():
            self._user(name)
            del self._users[name]

    def issue(self, user: str, now_s: int, *, lifetime_s: int | None = None, label: str = "") -> str:
        """A new token, shown this once only. Raises `NotFound` (no such user), `UsageError` over a limit."""
        if lifetime_s is not None and lifetime_s <= 0:
            raise UsageError(f"lifetime_s {lifetime_s} must be positive, or None for a token that does not expire")
        if len(label) > _MAX_LABEL_CHARS or not label.isprintable():
            raise UsageError(f"token label {label[:80]!r} must be printable and at most {_MAX_LABEL_CHARS} characters")
        token = f"{BEARER_MARK}.{secrets.token_hex(8)}.{secrets.token_urlsafe(32)}"
        entry = _Token(
            id=token_id_of(token),
            sha256=token_key(token).hex(),
            label=label,
            created_s=now_s,
            expires_s=None if lifetime_s is None else now_s + lifetime_s,
        )
        with self._changing():
            tokens = self._user(user).tokens
            tokens[:] = [old for old in tokens if not _expired(old, now_s)]
            if len(tokens) >= MAX_TOKENS_PER_USER:
                raise UsageError(f"user {user} has {MAX_TOKENS_PER_USER} tokens, the maximum; revoke some")
            tokens.append(entry)
        return token

    def revoke(self, token_id: str) -> None:
        """From now on the token is refused. Raises `NotFound`."""
        with self._changing():
            found = self._tokens.get(token_id)
            if found is None:
                raise NotFound(f"there is no token with id {token_id[:80]!r}")
            self._user(found[0]).tokens.remove(found[1])

    def verify(self, token: str, now_s: int) -> str:
        """The user whose token this is. Raises `PermissionDenied`, with one message for every reason."""
        refused = PermissionDenied("the token is unknown, revoked or expired; ask an administrator for a new one")
        try:
            token_id = token_id_of(token)
        except UsageError:
            raise refused from None
        found = self.find(token_id, now_s)
        right = hmac.compare_digest(token_key(token), found.key if found else _NOBODY)
        if found is None or not right:
            raise refused
        return found.user

    def find(self, token_id: str, now_s: int) -> UserKey | None:
        """What a handshake needs to check a token; None when it is unknown, revoked or expired.

        Used as `Accepts(secret, lambda token_id: store.find(token_id, int(time.time())))`.
        """
        with self._lock:
            self._refresh()
            found = self._tokens.get(token_id)
        if found is None or _expired(found[1], now_s):
            return None
        return UserKey(found[0], bytes.fromhex(found[1].sha256))

    def account(self, name: str) -> Account | None:
        """As it is now; None when there is no such user."""
        with self._lock:
            self._refresh()
            user = self._users.get(name)
        return None if user is None else _account(user)

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
                TokenInfo(id=t.id, user=user, label=t.label, created_s=t.created_s, expires_s=t.expires_s)
                for t in self._user(user).tokens
            ]

    def _user(self, name: str) -> _User:
        user = self._users.get(name)
        if user is None:
            raise NotFound(f"there is no user {name[:80]!r}; `ff fs admin user list` shows them")
        return user

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock, read, (the caller changes), write. What the caller began is dropped when it raises."""
        with self._lock, lock_file(f"{self._path}.lock"):
            self._refresh()
            try:
                yield
                users = sorted(self._users.values(), key=lambda user: user.name)
                data = msgspec.json.encode(_File(version=_VERSION, users=users, next_uid=self._next_uid))
                write_private_file(self._path, msgspec.json.format(data, indent=1) + b"\n")
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
            content = _decoder.decode(read_private_file(self._path, _MAX_FILE_BYTES))
        except DECODE_ERRORS as error:
            raise DataCorruption(f"token file {self._path} is damaged: {error}; restore it from a backup") from None
        if content.version not in (1, _VERSION):
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
