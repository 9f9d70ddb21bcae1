"""How one service asks another whose token it is.

The key of a token is as good as the token for a handshake, and connections hide nothing: it is sealed with a key that
is derived from the node secret, which both ends have. Who has that secret may ask; nobody else is answered.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fireflyer.identity.account import Account, Scope
from fireflyer.identity.derived import apply_pad, derive_key
from fireflyer.identity.handshake import MAX_IDENTITY_BYTES, NONCE_BYTES, UserKey
from fireflyer.identity.secrets import Secret
from fireflyer.identity.users import MAX_GROUPS, MAX_ID, MAX_ROLES
from fireflyer.runtime.rpc.messages import Method

__all__ = ["FIND_TOKEN", "FindToken", "FoundToken", "FoundUser", "sealed", "unsealed"]

_PURPOSE: Final = "fireflyer keys of tokens"
_Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class FindToken(msgspec.Struct, frozen=True):
    token_id: Annotated[str, msgspec.Meta(max_length=MAX_IDENTITY_BYTES)]


class FoundUser(msgspec.Struct, frozen=True, kw_only=True):
    name: _Name
    nonce: _Bytes32
    sealed_key: _Bytes32
    uid: _Id
    gid: _Id
    groups: Annotated[tuple[_Id, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    roles: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=65)], ...], msgspec.Meta(max_length=MAX_ROLES)]
    scope: Scope


class FoundToken(msgspec.Struct, frozen=True):
    """`user`: None where the token counts for nothing."""

    user: FoundUser | None


FIND_TOKEN: Final = Method("accounts.find_token", FindToken, FoundToken)


def sealed(user: UserKey, secret: Secret, nonce: bytes) -> FoundUser | None:
    """`nonce`: 32 random bytes. None for a user without an account."""
    account = user.account
    if account is None:
        return None
    return FoundUser(
        name=user.user,
        nonce=nonce,
        sealed_key=apply_pad(user.key, derive_key(secret.reveal(), _PURPOSE), nonce),
        uid=account.uid,
        gid=account.gid,
        groups=account.groups,
        roles=user.roles,
        scope=user.scope,
    )


def unsealed(found: FoundUser, secret: Secret) -> UserKey:
    key = apply_pad(found.sealed_key, derive_key(secret.reveal(), _PURPOSE), found.nonce)
    return UserKey(found.name, key, Account(found.name, found.uid, found.gid, found.groups), found.roles, found.scope)
