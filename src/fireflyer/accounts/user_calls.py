"""How commands change the users of a service over its own port: `accounts.users`.

A connection hides nothing, and the key of a token is as good as the token for a handshake. So who issues a token makes
it, and sends its key sealed with a key that is derived from the credential that the connection has proven: the node
secret, or the token of the user who asks, whose number the request has.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import msgspec

from fireflyer.identity.account import Account
from fireflyer.identity.derived import apply_pad, derive_key
from fireflyer.identity.handshake import NONCE_BYTES
from fireflyer.identity.users import MAX_GROUPS, MAX_ID, MAX_LIFETIME_S, TokenInfo, UserInfo
from fireflyer.runtime.rpc.messages import Method

__all__ = ["CHANGE_USERS", "AddToken", "AddUser", "ChangeRole", "Changed", "ExpireToken", "FoundUsers", "GetTokens"]
__all__ += [
    "GetUser",
    "GetUsers",
    "RemoveUser",
    "RevokeToken",
    "TokensOfUser",
    "UserAdded",
    "UserAnswer",
    "UserRequest",
]
__all__ += ["UserRequest", "sealed_key", "unsealed_key"]

_PURPOSE: Final = "fireflyer keys of new tokens"
_Text = Annotated[str, msgspec.Meta(max_length=128)]
"""Names, numbers of tokens, labels, roles: what is allowed is said by the store."""
_Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Seconds = Annotated[int, msgspec.Meta(ge=1, le=MAX_LIFETIME_S)]


class AddUser(msgspec.Struct, frozen=True, tag=True):
    name: _Text
    uid: _Id | None = None
    gid: _Id | None = None
    groups: Annotated[tuple[_Id, ...], msgspec.Meta(max_length=2 * MAX_GROUPS)] = ()


class RemoveUser(msgspec.Struct, frozen=True, tag=True):
    name: _Text


class GetUser(msgspec.Struct, frozen=True, tag=True):
    name: _Text


class GetUsers(msgspec.Struct, frozen=True, tag=True):
    after: _Text = ""


class ChangeRole(msgspec.Struct, frozen=True, tag=True):
    """`granted`: False revokes it."""

    name: _Text
    role: _Text
    granted: bool


class GetTokens(msgspec.Struct, frozen=True, tag=True):
    name: _Text


class AddToken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`sealed_by`: the number of the token of the user who asks; empty: the node secret."""

    name: _Text
    id: _Text
    nonce: _Bytes32
    sealed_key: _Bytes32
    sealed_by: _Text
    lifetime_s: _Seconds | None
    label: _Text


class RevokeToken(msgspec.Struct, frozen=True, tag=True):
    id: _Text


class ExpireToken(msgspec.Struct, frozen=True, tag=True):
    id: _Text
    after_s: _Seconds


UserRequest = AddUser | RemoveUser | GetUser | GetUsers | ChangeRole | GetTokens | AddToken | RevokeToken | ExpireToken


class UserAdded(msgspec.Struct, frozen=True, tag=True):
    account: Account


class FoundUsers(msgspec.Struct, frozen=True, tag=True):
    users: list[UserInfo]


class TokensOfUser(msgspec.Struct, frozen=True, tag=True):
    tokens: list[TokenInfo]


class Changed(msgspec.Struct, frozen=True, tag=True):
    """The change is durable."""


UserAnswer = UserAdded | FoundUsers | TokensOfUser | Changed
CHANGE_USERS: Final[Method[UserRequest, UserAnswer]] = Method(
    "accounts.users", cast("Any", UserRequest), cast("Any", UserAnswer)
)


def sealed_key(key: bytes, credential_key: bytes, nonce: bytes) -> bytes:
    """`credential_key`: the node secret, or `token_key` of the token that asks. `nonce`: 32 random bytes."""
    return apply_pad(key, derive_key(credential_key, _PURPOSE), nonce)


unsealed_key = sealed_key
"""The same again opens it."""
