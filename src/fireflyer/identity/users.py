"""Users, their roles and their tokens: what is known of them, what is allowed, and `IdentityStore`, which keeps them.

A token is `fft1.<id>.<secret>`: the id is public and finds the entry, the secret is 256 random bits. Stores keep
`sha256(token)` only, so that reading one does not reveal tokens; since the secret is random and long, a slow hash or a
salt would add nothing. For the handshake the hash is as good as the token (see `fireflyer.identity.handshake`).

A role is `owner:role`, as `fs:admin` or `platform:operator`. What it allows is the owner's business: a store only
keeps the word.

The scope of a token says what it was issued for. `user`: a person's own; whoever shows it is that user, with all their
roles. `run`: for the processes of one run. It always expires, it carries no role, whatever roles the user has, and a
handshake finds it only where the server asks for this scope. `label` says which run.

Times are Unix seconds and come from the caller.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from fireflyer.base.errors import Exists, NotFound, PermissionDenied, UsageError
from fireflyer.identity.account import Account, Scope
from fireflyer.identity.handshake import BEARER_MARK, UserKey, token_id_of, token_key

__all__ = ["FIRST_UID", "MAX_GROUPS", "MAX_ID", "MAX_LIFETIME_S", "MAX_ROLES", "MAX_RUN_LIFETIME_S"]
__all__ += ["MAX_RUN_TOKENS_PER_USER"]
__all__ += ["MAX_TOKENS_PER_USER", "MAX_USERS", "MAX_USERS_PER_PAGE", "USER_SCOPE", "Account", "Identity"]
__all__ += ["IdentityStore", "NewToken", "Scope", "TokenInfo", "UserInfo", "check_ids", "check_name", "check_role"]
__all__ += ["max_tokens", "new_token", "no_token", "no_user", "refused_token", "token_id_or_refused", "too_many"]
__all__ += ["check_label", "check_token_id", "expiry_of", "uid_taken", "user_exists"]

MAX_USERS: Final = 10_000
MAX_USERS_PER_PAGE: Final = 1000
MAX_TOKENS_PER_USER: Final = 64
"""Of scope `user`."""
MAX_RUN_TOKENS_PER_USER: Final = 1024
MAX_LIFETIME_S: Final = 100 * 365 * 24 * 3600
MAX_RUN_LIFETIME_S: Final = 7 * 24 * 3600
"""A run that goes on for longer gets another token."""
MAX_GROUPS: Final = 64
"""Of one user, beside their own."""
MAX_ROLES: Final = 32
"""Of one user."""
FIRST_UID: Final = 10_000
"""Above those that distributions give to the people of one machine."""
MAX_ID: Final = (1 << 32) - 2
"""The last number means "unchanged" in system calls."""
_MAX_LABEL_CHARS: Final = 80
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_TOKEN_ID = re.compile(r"[!-\-/-~]{1,64}")
"""A dot ends the id in a token."""
_ROLE = re.compile(r"[a-z][a-z0-9-]{0,31}:[a-z][a-z0-9-]{0,31}")

USER_SCOPE: Final[tuple[Scope, ...]] = ("user",)


class UserInfo(msgspec.Struct, frozen=True):
    """`roles`: sorted."""

    account: Account
    roles: tuple[str, ...]
    created_s: int


class TokenInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Public part of a token. `expires_s` is None for one that does not expire."""

    id: str
    user: str
    label: str
    created_s: int
    expires_s: int | None
    scope: Scope = "user"


class Identity(msgspec.Struct, frozen=True):
    """User who showed a token. `roles`: of the user now; none for the scope `run`."""

    user: str
    scope: Scope
    roles: tuple[str, ...]
    token_id: str
    label: str


class IdentityStore(Protocol):
    """Users, their uids, groups and roles, and tokens by their hash. `TokenFile` (a file) and `AccountStore` (the
    key-value store) are the two that exist.

    Its methods are coroutines, since a store may be on another machine, and since a file is locked and synced: neither
    may hold up the loop of a service. Each change happens whole or not at all, and is durable when its coroutine has
    returned. Where that raised `Timeout`, or was cancelled, the change may have happened. Several processes may use one
    store."""

    async def create_user(
        self, name: str, now_s: int, *, uid: int | None = None, gid: int | None = None, groups: Sequence[int] = ()
    ) -> Account:
        """`uid`: by default one that nobody has had; `gid`: by default the same number. Raises `Exists` (also where
        another user has this uid), `UsageError` for a bad name or number, or too many users or groups."""

    async def remove_user(self, name: str) -> None:
        """Remove a user with all tokens and roles. Raises `NotFound`."""

    async def user(self, name: str) -> UserInfo | None:
        """User as they are now; None when there is no such user."""

    async def users(self, after: str = "", limit: int = MAX_USERS_PER_PAGE) -> list[UserInfo]:
        """Users whose names come after this one, sorted by name; `MAX_USERS_PER_PAGE` at most."""

    async def grant_role(self, name: str, role: str) -> None:
        """Grant a role; one that the user has is no error. Raises `NotFound`, and `UsageError` for a bad role."""

    async def revoke_role(self, name: str, role: str) -> None:
        """Revoke a role. Nothing happens where the user has it not. Raises `NotFound` (no such user)."""

    async def issue(
        self, user: str, now_s: int, *, lifetime_s: int | None = None, label: str = "", scope: Scope = "user"
    ) -> str:
        """A new token, shown this once only. `run`: `lifetime_s` must be given, `MAX_RUN_LIFETIME_S` at most. Expired
        ones make room. Raises `NotFound` (no such user), `UsageError` over a limit."""

    async def revoke(self, token_id: str) -> None:
        """Revoke a token: from now on it is refused. Raises `NotFound`."""

    async def tokens(self, user: str) -> list[TokenInfo]:
        """The user's tokens in the order of issue; of those that have expired some may be missing. Raises
        `NotFound`."""

    async def verify(self, token: str, now_s: int) -> Identity:
        """User who shows this token, of either scope. Raises `PermissionDenied`, with one message for every reason."""

    async def find(self, token_id: str, now_s: int, scopes: Collection[Scope] = USER_SCOPE) -> UserKey | None:
        """Find the key that checks a token, with the account of its user and the roles that it carries now; None when
        it is unknown, revoked, expired, or of another scope."""


class NewToken(NamedTuple):
    """`key` is what stores keep of `token`."""

    token: str
    id: str
    key: bytes


def new_token() -> NewToken:
    token = f"{BEARER_MARK}.{secrets.token_hex(8)}.{secrets.token_urlsafe(32)}"
    return NewToken(token, token_id_of(token), token_key(token))


def expiry_of(now_s: int, lifetime_s: int | None, label: str, scope: Scope) -> int | None:
    """When a new token expires, if ever. Raises `UsageError` for one that may not be issued so."""
    if scope not in ("user", "run"):
        raise UsageError(f"token scope {str(scope)[:80]!r}; 'user' and 'run' are allowed")
    if lifetime_s is None and scope == "run":
        raise UsageError("a token of a run must expire; give lifetime_s")
    if lifetime_s is not None and lifetime_s <= 0:
        raise UsageError(f"lifetime_s {lifetime_s} must be positive, or None for a token that does not expire")
    limit_s = MAX_LIFETIME_S if scope == "user" else MAX_RUN_LIFETIME_S
    if lifetime_s is not None and lifetime_s > limit_s:
        raise UsageError(f"lifetime_s {lifetime_s} of a token of scope {scope}; at most {limit_s} are allowed")
    check_label(label)
    return None if lifetime_s is None else now_s + lifetime_s


def max_tokens(scope: Scope) -> int:
    return MAX_TOKENS_PER_USER if scope == "user" else MAX_RUN_TOKENS_PER_USER


def check_label(label: str) -> None:
    """Raises `UsageError`."""
    if len(label) > _MAX_LABEL_CHARS or not label.isprintable():
        raise UsageError(f"token label {label[:80]!r} must be printable and at most {_MAX_LABEL_CHARS} characters")


def check_token_id(token_id: str) -> None:
    """Raises `UsageError`."""
    if not _TOKEN_ID.fullmatch(token_id):
        raise UsageError(f"token id {token_id[:80]!r} must be 1 to 64 printable ASCII characters without dots")


def check_name(name: str) -> None:
    """Raises `UsageError`."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"user name {name[:80]!r} must be 1 to 64 letters, digits, '.', '_' or '-', and not begin with a digit"
        )


def check_ids(name: str, uid: int | None, gid: int | None, groups: Sequence[int]) -> None:
    """Raises `UsageError`."""
    for number in (uid, gid, *groups):
        if number is not None and not 0 <= number <= MAX_ID:
            raise UsageError(f"uid or gid {number}; 0 to {MAX_ID} are allowed")
    if len(set(groups)) > MAX_GROUPS:
        raise UsageError(f"{len(set(groups))} groups of user {name}; at most {MAX_GROUPS} are allowed")


def check_role(role: str) -> None:
    """Raises `UsageError`."""
    if not _ROLE.fullmatch(role):
        raise UsageError(
            f"role {role[:80]!r} must be OWNER:ROLE, each 1 to 32 small letters, digits or '-', as fs:admin"
        )


# --- the refusals that all stores have in common ---


def no_user(name: str) -> NotFound:
    return NotFound(f"there is no user {name[:80]!r}; `ff fs admin user list` shows them")


def user_exists(name: str) -> Exists:
    return Exists(f"user {name} exists already")


def uid_taken(user: str, uid: int) -> Exists:
    return Exists(f"user {user} has uid {uid} already")


def no_token(token_id: str) -> NotFound:
    return NotFound(f"there is no token with id {token_id[:80]!r}")


def too_many(user: str, scope: Scope) -> UsageError:
    of_runs = " of runs" if scope == "run" else ""
    return UsageError(f"user {user} has {max_tokens(scope)} tokens{of_runs}, the maximum; revoke some")


def refused_token() -> PermissionDenied:
    return PermissionDenied("the token is unknown, revoked or expired; ask an administrator for a new one")


def token_id_or_refused(token: str) -> str:
    """Raises `PermissionDenied`."""
    try:
        return token_id_of(token)
    except UsageError:
        raise refused_token() from None
