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
from fireflyer.identity.handshake import BEARER_MARK, NONCE_BYTES
from fireflyer.identity.secrets import SECRET_BYTES, Secret

__all__ = ["apply_pad", "derive_credential", "derive_key", "seal", "unseal"]

_CREDENTIAL_LABEL: Final = b"fireflyer machine credential"
_SEAL_LABEL: Final = b"fireflyer sealed secret"
_PAD_LABEL: Final = b"fireflyer sealed text"
_KEY_LABEL: Final = b"fireflyer derived key"


def derive_credential(join_key: bytes, *, token_id: str, nonce: bytes) -> str:
    """The credential that a join token buys, in the form of a token. `join_key`: `token_key` of the join token;
    `token_id`: the public part of the credential."""
    secret = hmac.digest(join_key, _CREDENTIAL_LABEL + _checked(nonce), "sha256")
    return f"{BEARER_MARK}.{token_id}.{base64.urlsafe_b64encode(secret).decode().rstrip('=')}"


def derive_key(key: bytes, purpose: str) -> bytes:
    """The key of a `DerivedCredential` whose identity is `purpose`, from `token_key` of a credential."""
    return hmac.digest(key, _KEY_LABEL + purpose.encode(), "sha256")


def seal(secret: Secret, key: bytes, nonce: bytes) -> bytes:
    """32 bytes that only who has the key can open: `token_key` of a machine's credential, or one derived from it.
    `nonce`: 32 bytes that were never used with it."""
    return _xor(secret.reveal(), _pad(key, nonce))


def unseal(sealed: bytes, key: bytes, nonce: bytes) -> Secret:
    """Raises `DataCorruption` where the lengths are wrong."""
    if len(sealed) != SECRET_BYTES:
        raise DataCorruption(f"a sealed secret has {SECRET_BYTES} bytes, not {len(sealed)}")
    return Secret(_xor(sealed, _pad(key, nonce)))


def apply_pad(data: bytes, key: bytes, nonce: bytes) -> bytes:
    """Seals bytes of any length, or opens what was sealed so. `nonce`: 32 bytes, used with this key once."""
    blocks = range(0, len(data), SECRET_BYTES)
    pad = b"".join(hmac.digest(key, _PAD_LABEL + _checked(nonce) + at.to_bytes(8, "big"), "sha256") for at in blocks)
    return _xor(data, pad[: len(data)])


def _pad(key: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, _SEAL_LABEL + _checked(nonce), "sha256")


def _checked(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise DataCorruption(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    return nonce


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
