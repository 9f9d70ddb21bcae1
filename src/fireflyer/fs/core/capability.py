"""Capabilities: what a client that holds no secret may do to which files, signed with a key that only services hold.

    service   token = sign(Capability(key_id, user, client, first, last, rights, expires_s), derive_key(secret, key_id))
    client    presents the token on each data connection
    storage   capability = verify(token, keys, now_s)     of this user; then reads of these files are granted to the
              connection, and updates are compared with it

*Keys* are derived from the node secret, which every service has: so none is ever sent, and its number says which one
was used, so that they can be changed while old capabilities are still good. Who has a token cannot make another one.

*Whose it is.* The token names the user whom the connection must have proven to be: connections are not secret, and a
token that somebody overhears is of no use to anyone else. It names the client too, so that nobody numbers updates in
another one's channels.

*Time* is Unix time, of the service that signs and of the process that verifies. Monotonic clocks of two machines
cannot be compared, and no answer of anybody can be waited for where a request is checked. A wrong clock lengthens or
shortens a right, and that is all: whether an update is done twice or a role is kept does not depend on it. What says
that it is good for more than `MAX_LIFETIME_S` was not made by a service whose clock is right, and is refused.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.fs.schema.data import MAX_CAPABILITY_BYTES
from fireflyer.fs.schema.ids import ClientId

__all__ = [
    "LIFETIME_S",
    "MAX_FILES",
    "MAX_LIFETIME_S",
    "MAX_SKEW_S",
    "Capability",
    "Rights",
    "derive_key",
    "sign",
    "verify",
]

MAX_LIFETIME_S: Final = 3600
LIFETIME_S: Final = 900
"""Of those that are given out."""
MAX_SKEW_S: Final = 60
"""Between the clocks of two services."""
MAX_FILES: Final = 65536
"""That one capability names."""
MAX_USER_CHARS: Final = 64
_TAG_BYTES: Final = 32
_VERSION: Final = b"fireflyer fs capability 1"

_File = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2
    """Updates; to read what was written needs READ."""


class Capability(msgspec.Struct, frozen=True, array_like=True):
    """For `user`'s client `client`: what it may do to the files `first_file` to `last_file`, both included."""

    key_id: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    user: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_USER_CHARS)]
    client: ClientId
    first_file: _File
    last_file: _File
    rights: Annotated[int, msgspec.Meta(ge=1, le=3)]
    expires_s: Annotated[int, msgspec.Meta(ge=0, le=(1 << 40))]
    """Unix time from which it is of no use."""

    def allows(self, file: int, rights: Rights, now_s: float) -> bool:
        wanted = self.rights & rights == rights
        return wanted and self.first_file <= file <= self.last_file and now_s < self.expires_s


_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(Capability)


def derive_key(secret: bytes, key_id: int) -> bytes:
    """The key of this number. `secret`: the node secret of the cluster."""
    return hmac.digest(secret, b"fireflyer fs capability key" + key_id.to_bytes(4, "big"), "sha256")


def sign(capability: Capability, key: bytes) -> bytes:
    """The token. Raises `UsageError` for what `verify` would not take."""
    if not 0 <= capability.last_file - capability.first_file < MAX_FILES:
        raise UsageError(
            f"files {capability.first_file} to {capability.last_file}: a capability covers 1 to {MAX_FILES} files"
        )
    body = _encoder.encode(capability)
    if len(body) + _TAG_BYTES > MAX_CAPABILITY_BYTES:
        raise UsageError(f"user name {capability.user!r} is too long for a capability")
    return _tag(body, key) + body


def verify(token: bytes, keys: Mapping[int, bytes], user: str, now_s: float) -> Capability:
    """What it allows. `user`: whom the connection has proven to be. Raises `PermissionDenied`."""
    body = token[_TAG_BYTES:]
    try:
        capability = _decoder.decode(body)
    except DECODE_ERRORS:
        raise PermissionDenied("not a capability; request one from the manager or meta service") from None
    key = keys.get(capability.key_id)
    right = hmac.compare_digest(_tag(body, key or b""), token[:_TAG_BYTES])
    if key is None or not right:
        raise PermissionDenied("the capability is not signed with a valid key of this cluster; request a new one")
    if capability.user != user:
        raise PermissionDenied("the capability belongs to another user")
    if not 0 <= capability.last_file - capability.first_file < MAX_FILES:
        raise PermissionDenied("the capability covers no files, or too many")
    if now_s >= capability.expires_s:
        raise PermissionDenied("the capability has expired; request a new one")
    if capability.expires_s - now_s > MAX_LIFETIME_S + MAX_SKEW_S:
        raise PermissionDenied(
            "the capability is valid for too long: the clocks of the machines differ; synchronize them (NTP)"
        )
    return capability


def _tag(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _VERSION + body, "sha256")
