"""Identity: node secrets, users and tokens, and the handshake by which both ends of a connection prove themselves.

`handshake` is pure and says what it protects against; `users` says what is known of users and tokens; `secrets` and
`tokens` keep their files.

Names are imported when they are first used: a process that needs one of the modules does not pay for the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.identity.account import Account
    from fireflyer.identity.handshake import (
        Accepts,
        ClientHandshake,
        Credential,
        HandshakeRefused,
        NodeCredential,
        Role,
        ServerHandshake,
        Session,
        UserCredential,
        UserKey,
    )
    from fireflyer.identity.secrets import Secret, load_secret, new_secret, save_secret
    from fireflyer.identity.token_file import TokenFile
    from fireflyer.identity.tokens import TokenStore
    from fireflyer.identity.users import Identity, IdentityStore, TokenInfo, UserInfo

__all__ = [
    "Accepts",
    "Account",
    "ClientHandshake",
    "Credential",
    "HandshakeRefused",
    "Identity",
    "IdentityStore",
    "NodeCredential",
    "Role",
    "Secret",
    "ServerHandshake",
    "Session",
    "TokenFile",
    "TokenInfo",
    "TokenStore",
    "UserCredential",
    "UserInfo",
    "UserKey",
    "load_secret",
    "new_secret",
    "save_secret",
]

_HOME = {
    "Accepts": "fireflyer.identity.handshake",
    "Account": "fireflyer.identity.account",
    "ClientHandshake": "fireflyer.identity.handshake",
    "Credential": "fireflyer.identity.handshake",
    "HandshakeRefused": "fireflyer.identity.handshake",
    "Identity": "fireflyer.identity.users",
    "IdentityStore": "fireflyer.identity.users",
    "NodeCredential": "fireflyer.identity.handshake",
    "Role": "fireflyer.identity.handshake",
    "Secret": "fireflyer.identity.secrets",
    "ServerHandshake": "fireflyer.identity.handshake",
    "Session": "fireflyer.identity.handshake",
    "TokenFile": "fireflyer.identity.token_file",
    "TokenInfo": "fireflyer.identity.users",
    "TokenStore": "fireflyer.identity.tokens",
    "UserCredential": "fireflyer.identity.handshake",
    "UserInfo": "fireflyer.identity.users",
    "UserKey": "fireflyer.identity.handshake",
    "load_secret": "fireflyer.identity.secrets",
    "new_secret": "fireflyer.identity.secrets",
    "save_secret": "fireflyer.identity.secrets",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
