"""Who is who: node secrets, users and tokens, and the handshake by which both ends of a connection prove themselves.

`handshake` is pure and says what it protects against; `users` says what is known of users and tokens; `secrets` and
`tokens` keep their files.
"""

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
from fireflyer.identity.users import Account, Identity, IdentityStore, TokenInfo, UserInfo

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
