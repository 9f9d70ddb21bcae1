"""Keys and values of users and tokens in the key-value store.

    FNst                                        numbers of the whole cluster
    FNim                                        which file of users was imported
    FNus + name                                 a user
    FNid + uid (4)                              whose uid this is
    FNto + token id                             a token
    FNtu + name + 0 + scope (1) + expiry (8) + token id    the tokens of a user, the next to expire first; no value

A value is one byte, the version of its format, and MessagePack (`kvstore.core.rows`). A row that does not decode, or
that names another one than its key does, is `DataCorruption`: nobody is let in by it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec

from fireflyer.base.errors import DataCorruption
from fireflyer.identity.users import MAX_GROUPS, MAX_ID, MAX_ROLES, Scope
from fireflyer.kvstore import KeyRange, prefix_range
from fireflyer.kvstore.core.rows import decode_row

__all__ = ["IMPORT_KEY", "MAX_SECONDS", "STATE_KEY", "UIDS", "USERS", "ImportRow", "StateRow", "TokenRow", "UidRow"]
__all__ += ["UserRow", "damaged", "decode_named", "end_of_owned", "owned_key", "owned_range", "token_id_in", "uid_in"]
__all__ += ["token_key", "uid_key", "user_key"]

PREFIX: Final = b"FN"
STATE_KEY: Final = PREFIX + b"st"
IMPORT_KEY: Final = PREFIX + b"im"
USERS: Final = PREFIX + b"us"
UIDS: Final = PREFIX + b"id"
TOKENS: Final = PREFIX + b"to"
OWNED: Final = PREFIX + b"tu"

_NEVER: Final = (1 << 64) - 1
_SCOPES: Final[dict[Scope, bytes]] = {"user": b"u", "run": b"r"}

_Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
MAX_SECONDS: Final = 1 << 40
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_SECONDS)]

R = TypeVar("R")


class StateRow(msgspec.Struct, frozen=True):
    users: _Count
    next_uid: _Id
    """Higher than all that were assigned."""


class ImportRow(msgspec.Struct, frozen=True):
    """`digest`: of the file's content (`identity.tokens.FileContent`)."""

    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    imported_s: _Seconds


class UserRow(msgspec.Struct, frozen=True):
    name: _Name
    uid: _Id
    gid: _Id
    groups: Annotated[tuple[_Id, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    roles: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=65)], ...], msgspec.Meta(max_length=MAX_ROLES)]
    created_s: _Seconds
    nonce: Annotated[str, msgspec.Meta(max_length=32)]
    """Of the call that made this user: so a repeated one finds what it has done, and no other user of this name."""
    tokens: _Count
    """How many of scope `user` there are."""
    run_tokens: _Count


class UidRow(msgspec.Struct, frozen=True):
    name: _Name


class TokenRow(msgspec.Struct, frozen=True):
    id: Annotated[str, msgspec.Meta(max_length=64)]
    user: _Name
    sha256: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    label: Annotated[str, msgspec.Meta(max_length=80)]
    created_s: _Seconds
    expires_s: _Seconds | None
    scope: Scope


def user_key(name: str) -> bytes:
    return USERS + name.encode()


def uid_key(uid: int) -> bytes:
    return UIDS + uid.to_bytes(4, "big")


def uid_in(key: bytes) -> int:
    """Raises `DataCorruption`."""
    if len(key) != len(UIDS) + 4 or not key.startswith(UIDS):
        raise damaged(key, "its key is none of a uid")
    return int.from_bytes(key[len(UIDS) :], "big")


def token_key(token_id: str) -> bytes:
    return TOKENS + token_id.encode()


def owned_range(name: str, scope: Scope | None = None) -> KeyRange:
    """Where the tokens of a user are listed, those of one scope or all."""
    return prefix_range(OWNED + name.encode() + b"\0" + (_SCOPES[scope] if scope is not None else b""))


def end_of_owned(name: str, scope: Scope, now_s: int) -> bytes:
    """Tokens that are listed before this key have expired."""
    return owned_range(name, scope).begin + (now_s + 1).to_bytes(8, "big")


def owned_key(token: TokenRow) -> bytes:
    expires_s = _NEVER if token.expires_s is None else token.expires_s
    return owned_range(token.user, token.scope).begin + expires_s.to_bytes(8, "big") + token.id.encode()


def token_id_in(key: bytes, name: str) -> str:
    """Of a key of `owned_range`. Raises `DataCorruption`."""
    found = key[len(owned_range(name).begin) + 9 :]
    if not found or not found.isascii():
        raise damaged(key, "its key names no token")
    return found.decode()


def decode_named(key: bytes, value: bytes, row_type: type[R], *, field: str, prefix: bytes) -> R:
    """A row whose `field` says what its key does. Raises `DataCorruption`."""
    row = decode_row(key, value, row_type)
    named: Any = getattr(row, field)
    if key != prefix + str(named).encode():
        raise damaged(key, f"it is the row of {named[:64]!r}")
    return row


def damaged(key: bytes, what: str) -> DataCorruption:
    return DataCorruption(f"row {key.hex()} of the key-value store is damaged: {what}; restore the store")
