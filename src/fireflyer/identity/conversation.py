"""The bytes of a handshake on a stream, without IO: both ends read exactly `wanted` bytes and write what comes back.

A handshake message travels behind its length (`pack_message`). An end never asks for a byte beyond the handshake, so
the socket can be handed to other code afterwards with not a byte missing. At most one message is buffered, and none is
longer than `MAX_MESSAGE_BYTES`.
"""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import PermissionDenied, Unreachable, UsageError
from fireflyer.identity.handshake import (
    LENGTH_BYTES,
    Accepts,
    ClientHandshake,
    Credential,
    ServerHandshake,
    Session,
    UserKey,
    message_length,
    pack_message,
)

__all__ = ["ClientConversation", "ServerConversation"]

_SERVER_LEFT: Final = (
    "the server closed the connection during the handshake; it has ended, is overloaded, or is not a Fire-Flyer "
    "server: see its log"
)
_CLIENT_LEFT: Final = (
    "the client closed the connection during the handshake; does it use the same secret file or token?"
)


class _MessageReader:
    """Collects one message at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._length: int | None = None

    @property
    def wanted(self) -> int:
        """How many bytes of the message in hand are missing, as far as is known; never 0."""
        return (LENGTH_BYTES if self._length is None else self._length) - len(self._data)

    def receive(self, data: bytes) -> bytes | None:
        """The message, once it is whole. Raises `PermissionDenied` for a length that no message has."""
        if len(data) > self.wanted:
            raise UsageError(f"{len(data)} bytes were read where at most {self.wanted} were wanted")
        self._data += data
        if self.wanted > 0:
            return None
        whole = bytes(self._data)
        self._data.clear()
        if self._length is None:
            self._length = message_length(whole)
            return None
        self._length = None
        return whole


class ClientConversation:
    """The connecting end: send `hello()`, then give to `receive` what was read and send what it returns, until
    `session` is set."""

    def __init__(self, credential: Credential, *, purpose: str, nonce: bytes) -> None:
        """`nonce`: `NONCE_BYTES` fresh random bytes. Raises `UsageError` for a name that cannot be sent."""
        self._handshake = ClientHandshake(credential, purpose=purpose, nonce=nonce)
        self._reader = _MessageReader()
        self._challenged = False
        self.session: Session | None = None

    def hello(self) -> bytes:
        return pack_message(self._handshake.hello())

    @property
    def wanted(self) -> int:
        """How many bytes may be read now, at most; 0 once the session is open."""
        return 0 if self.session is not None else self._reader.wanted

    def receive(self, data: bytes) -> bytes:
        """`data`: 1 to `wanted` bytes, or none when the server has closed the connection. Raises `PermissionDenied`,
        `Busy`, `Unreachable`."""
        if not data:
            raise Unreachable(_SERVER_LEFT)
        message = self._reader.receive(data)
        if message is None:
            return b""
        if not self._challenged:
            proof = self._handshake.on_challenge(message)
            self._challenged = True
            return pack_message(proof)
        self.session = self._handshake.on_verdict(message)
        return b""


class ServerConversation:
    """The accepting end: give to `receive` what was read and send what it returns. While `asks_for` is the number of a
    token, nothing is read: `found` is to be told whose it is, and what it returns is sent. When `proven` is set the
    client has proven itself, and `verdict` is to be sent to tell it so."""

    def __init__(self, accepts: Accepts, *, identity: str, purpose: str, nonce: bytes, decoy_key: bytes) -> None:
        self._handshake = ServerHandshake(accepts, identity=identity, purpose=purpose, nonce=nonce, decoy_key=decoy_key)
        self._reader = _MessageReader()
        self._greeted = False
        self.proven: Session | None = None
        self.verdict = b""

    @property
    def wanted(self) -> int:
        """How many bytes may be read now, at most; 0 while it asks for a token, and once the client has proven
        itself."""
        return 0 if self.proven is not None or self.asks_for else self._reader.wanted

    @property
    def asks_for(self) -> str:
        return self._handshake.token_id

    def found(self, user: UserKey | None) -> bytes:
        """`user`: of the token `asks_for`, or None. Raises `HandshakeRefused`."""
        return pack_message(self._handshake.on_found(user))

    def receive(self, data: bytes) -> bytes:
        """`data`: 1 to `wanted` bytes, or none when the client has closed the connection. Raises `PermissionDenied`
        (`HandshakeRefused` with the reply that says so), `Unreachable`."""
        if not data:
            raise Unreachable(_CLIENT_LEFT) if not self._greeted else PermissionDenied(_CLIENT_LEFT)
        message = self._reader.receive(data)
        if message is None:
            return b""
        if not self._greeted:
            challenge = self._handshake.on_hello(message)
            self._greeted = True
            return b"" if challenge is None else pack_message(challenge)
        self.proven, verdict = self._handshake.on_proof(message)
        self.verdict = pack_message(verdict)
        return b""
