"""Secrets that cross a network without being sent: the connections of `identity.handshake` hide nothing.

A machine's credential is computed by both ends from the join token, which both have, and a nonce. The secret of a job
is sent *sealed*: combined by XOR with HMAC-SHA256 of the machine's credential over a nonce. That is a one-time pad from
a pseudorandom function: a nonce is never used twice, since it is 32 random bytes. Sealing does not authenticate; the
frames of the connection do.
"""

from __future__ import annotations

import base64
import hmac
from typing import Final

from fireflyer.base.errors import DataCorruption
from fireflyer.identity.handshake import BEARER_MARK, NONCE_BYTES, token_key
from fireflyer.identity.secrets import SECRET_BYTES, Secret

__all__ = ["derive_credential", "seal", "unseal"]

_CREDENTIAL_LABEL: Final = b"fireflyer machine credential"
_SEAL_LABEL: Final = b"fireflyer sealed secret"


def derive_credential(join_key: bytes, *, token_id: str, nonce: bytes) -> str:
    """The credential that a join token buys, in the form of a token. `join_key`: `token_key` of the join token;
    `token_id`: the public part of the credential."""
    secret = hmac.digest(join_key, _CREDENTIAL_LABEL + _checked(nonce), "sha256")
    return f"{BEARER_MARK}.{token_id}.{base64.urlsafe_b64encode(secret).decode().rstrip('=')}"


def seal(secret: Secret, credential: str, nonce: bytes) -> bytes:
    """32 bytes that only who has the credential can open. `nonce`: 32 bytes that were never used with it."""
    return _xor(secret.reveal(), _pad(credential, nonce))


def unseal(sealed: bytes, credential: str, nonce: bytes) -> Secret:
    """Raises `DataCorruption` where the lengths are wrong."""
    if len(sealed) != SECRET_BYTES:
        raise DataCorruption(f"a sealed secret has {SECRET_BYTES} bytes, not {len(sealed)}")
    return Secret(_xor(sealed, _pad(credential, nonce)))


def _pad(credential: str, nonce: bytes) -> bytes:
    return hmac.digest(token_key(credential), _SEAL_LABEL + _checked(nonce), "sha256")


def _checked(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise DataCorruption(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    return nonce


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
