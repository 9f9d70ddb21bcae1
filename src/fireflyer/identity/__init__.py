"""Who is who: node secrets, users and tokens, and the handshake by which both ends of a connection prove themselves.

`handshake` is pure and says what it protects against; `secrets` and `tokens` keep their files.
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
from fireflyer.identity.tokens import Account, TokenInfo, TokenStore

__all__ = [
    "Accepts",
    "Account",
    "ClientHandshake",
    "Credential",
    "HandshakeRefused",
    "NodeCredential",
    "Role",
    "Secret",
    "ServerHandshake",
    "Session",
    "TokenInfo",
    "TokenStore",
    "UserCredential",
    "UserKey",
    "load_secret",
    "new_secret",
    "save_secret",
]
