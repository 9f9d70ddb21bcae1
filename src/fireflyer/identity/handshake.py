"""Mutual authentication of a connection, without IO: nonces come in as arguments, messages go in and out as bytes.

    client                                      server
      | -- Hello(version, role, identity,          |   says who it is and what it wants the connection for
      |          purpose, nonce) ----------------> |
      | <- Challenge(version, identity, nonce,     |   proves that it holds the key
      |              proof) ---------------------- |
      | -- Proof(proof) -------------------------> |   proves that it holds the key
      | <- Verdict(proof) ------------------------ |   accepted; `Refused(code, message)` at either turn of the server

The key is the node secret, or for a user the SHA-256 of the token: the server keeps only that hash. The hash therefore
*is* what logs in (it is password-equivalent): a stolen token file lets the thief act as those users and pose as the
server to them, though it does not reveal the tokens. The file is kept as a secret is, mode 0600.

Why it is safe. Each proof is an HMAC-SHA256 under the key over a label, the version, the role, both identities, the
purpose and both nonces, every field with its length. The labels differ by direction, so that a proof sent back to its
author proves nothing; the nonces are 32 fresh bytes from both sides, so that an old conversation proves nothing; the
purpose is covered, so that a connection made for one service cannot be carried to another. Comparison takes constant
time. An unknown token gets a challenge too, under a random key, so that a stranger cannot find out which tokens exist.
Both ends derive the same session key, which the frames of `fireflyer.runtime.rpc` are authenticated with.

What it is not: it hides nothing (a tunnel does that), and there is no forward secrecy: who records a connection and
later learns the key can compute its session key.

Every message is msgpack, at most `MAX_MESSAGE_BYTES`, and travels behind a two-byte big-endian length.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import Busy, FireflyerError, PermissionDenied, UsageError
from fireflyer.identity.account import Account, Scope
from fireflyer.identity.secrets import Secret

__all__ = [
    "BEARER_MARK",
    "HANDSHAKE_VERSION",
    "LENGTH_BYTES",
    "MAX_IDENTITY_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_PURPOSE_BYTES",
    "NONCE_BYTES",
    "Accepts",
    "ClientHandshake",
    "Credential",
    "DerivedCredential",
    "FindUser",
    "HandshakeRefused",
    "NodeCredential",
    "Role",
    "ServerHandshake",
    "Session",
    "TokenRefused",
    "UserCredential",
    "UserKey",
    "message_length",
    "pack_message",
    "refusal_message",
    "token_id_of",
    "token_key",
]

HANDSHAKE_VERSION: Final = 1
NONCE_BYTES: Final = 32
MAX_IDENTITY_BYTES: Final = 256
MAX_PURPOSE_BYTES: Final = 128
MAX_MESSAGE_BYTES: Final = 1024
LENGTH_BYTES: Final = 2
_PROOF_BYTES: Final = 32
BEARER_MARK: Final = "fft1"

Role = Literal["node", "user"]

_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_ProofBytes = Annotated[bytes, msgspec.Meta(min_length=_PROOF_BYTES, max_length=_PROOF_BYTES)]
_Identity = Annotated[str, msgspec.Meta(max_length=MAX_IDENTITY_BYTES)]
_Purpose = Annotated[str, msgspec.Meta(max_length=MAX_PURPOSE_BYTES)]


class _Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    role: Role
    identity: _Identity
    purpose: _Purpose
    nonce: _Nonce


class _Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    version: int
    identity: _Identity
    nonce: _Nonce
    proof: _ProofBytes


class _Proof(msgspec.Struct, frozen=True, tag="proof"):
    proof: _ProofBytes


class _Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    proof: _ProofBytes


class _Refused(msgspec.Struct, frozen=True, tag="refused"):
    version: int
    code: Annotated[str, msgspec.Meta(max_length=32)]
    message: Annotated[str, msgspec.Meta(max_length=400)]


class _Versioned(msgspec.Struct, frozen=True):
    version: int


@dataclass(frozen=True, slots=True)
class NodeCredential:
    """A node (launcher, supervisor, rank, service) that holds the node secret and names itself `identity`."""

    secret: Secret
    identity: str


@dataclass(frozen=True, slots=True)
class UserCredential:
    """A user's token as `TokenStore.issue` gave it out; the server knows whose it is."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class DerivedCredential:
    """A key that was computed from a credential for one purpose, which `identity` states: the server computes the same
    key from its credential and `identity`, and keeps nothing."""

    identity: str
    key: bytes = field(repr=False)


Credential = NodeCredential | UserCredential | DerivedCredential


@dataclass(frozen=True, slots=True)
class UserKey:
    """Key that a server keeps of a token: whose it is, and `token_key(token)`; where users have accounts, also who that
    is in a file system, and the roles that the token carries."""

    user: str
    key: bytes = field(repr=False)
    account: Account | None = None
    roles: tuple[str, ...] = ()
    scope: Scope = "user"


FindUser = Callable[[str], Awaitable[UserKey | None]]
"""Whose token it is, by its public number; None when it does not count (any more)."""


@dataclass(frozen=True, slots=True)
class Accepts:
    """Peers that a server lets in: holders of `secret`, and users whose token `find_user(token_id)` knows. Each may be
    None. `find_user` is where expiry is looked at, with the caller's clock. It is the listener that awaits it; what is
    pure only looks whether there is one."""

    secret: Secret | None
    find_user: FindUser | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """An authenticated connection as one end sees it; `peer` is the other end's proven identity (a user's name for
    role "user" on the server), `key` 32 bytes known to both ends only."""

    role: Role
    peer: str
    purpose: str
    key: bytes = field(repr=False)
    token_id: str = ""
    """Id of the user's token, on the server, so that its revocation can end the connection; empty otherwise."""
    account: Account | None = None
    """Account of the user, on the server, as it was found for the handshake; so are `roles` and `scope`. None
    otherwise."""
    roles: tuple[str, ...] = ()
    scope: Scope = "user"


class HandshakeRefused(PermissionDenied):
    """The server turned the client away; `reply` are the bytes that tell it so, to be sent before closing."""

    def __init__(self, message: str, reply: bytes) -> None:
        super().__init__(message)
        self.reply = reply


class TokenRefused(PermissionDenied):
    """The server takes tokens, and not this one: it is unknown, revoked or expired."""


_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgpack_decoder(_Hello)
_version_decoder = msgpack_decoder(_Versioned)
_proof_decoder = msgpack_decoder(_Proof)
_challenge_decoder = msgpack_decoder(_Challenge | _Refused)
_verdict_decoder = msgpack_decoder(_Verdict | _Refused)

_M = TypeVar("_M")


def pack_message(message: bytes) -> bytes:
    """The message behind its length, as it travels."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def message_length(header: bytes) -> int:
    """The length that `LENGTH_BYTES` bytes announce. Raises `PermissionDenied` when no handshake message is so long
    (most often the peer does not speak this protocol at all)."""
    length = int.from_bytes(header, "big")
    if len(header) != LENGTH_BYTES or not 0 < length <= MAX_MESSAGE_BYTES:
        raise PermissionDenied(
            f"the peer announced a handshake message of {length} bytes (1 to {MAX_MESSAGE_BYTES} are allowed); "
            "it does not speak this protocol"
        )
    return length


def token_id_of(token: str) -> str:
    """The public part of a token, by which the server finds it. Raises `UsageError` if it is no token."""
    parts = token.split(".")
    if len(parts) != 3 or parts[0] != BEARER_MARK or not parts[1] or not parts[2] or len(token) > 256:
        raise UsageError(f"this is not a user token; a token looks like {BEARER_MARK}.<id>.<secret>")
    return parts[1]


def token_key(token: str) -> bytes:
    """SHA-256 of the token: what the server stores and what proofs are keyed with (password-equivalent)."""
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True, slots=True)
class _Transcript:
    """What every proof of one conversation covers."""

    role: Role
    client: str
    server: str
    purpose: str
    client_nonce: bytes
    server_nonce: bytes

    def proof(self, key: bytes, label: bytes) -> bytes:
        fields = (
            b"fireflyer handshake",
            label,
            HANDSHAKE_VERSION.to_bytes(2, "big"),
            self.role.encode(),
            self.client.encode(),
            self.server.encode(),
            self.purpose.encode(),
            self.client_nonce,
            self.server_nonce,
        )
        text = b"".join(len(part).to_bytes(4, "big") + part for part in fields)
        return hmac.digest(key, text, "sha256")


_SERVER_LABEL: Final = b"server proves"
_CLIENT_LABEL: Final = b"client proves"
_VERDICT_LABEL: Final = b"server accepts"
_SESSION_LABEL: Final = b"session key"


def _decode(decoder: msgspec.msgpack.Decoder[_M], data: bytes, what: str) -> _M:
    if len(data) > MAX_MESSAGE_BYTES:
        raise PermissionDenied(f"{what} has {len(data)} bytes, more than {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except DECODE_ERRORS as error:
        raise PermissionDenied(f"{what} is malformed ({error}); the peer does not speak this protocol") from None


def _check_text(what: str, text: str, limit: int) -> str:
    if len(text.encode()) > limit or not text.isprintable():
        raise UsageError(f"{what} {text[:40]!r} is not printable text of at most {limit} bytes")
    return text


class ClientHandshake:
    """The connecting side: send `hello()`, then for the server's two messages `on_challenge` (send what it returns)
    and `on_verdict`. Raises `PermissionDenied` whenever the server is not to be trusted or refuses."""

    def __init__(self, credential: Credential, *, purpose: str, nonce: bytes) -> None:
        self._purpose = _check_text("purpose", purpose, MAX_PURPOSE_BYTES)
        self._nonce = nonce
        self._role: Role
        if isinstance(credential, NodeCredential):
            self._role = "node"
            self._identity = _check_text("identity", credential.identity, MAX_IDENTITY_BYTES)
            self._key = credential.secret.reveal()
        elif isinstance(credential, DerivedCredential):
            self._role = "user"
            self._identity = _check_text("identity", credential.identity, MAX_IDENTITY_BYTES)
            self._key = credential.key
        else:
            self._role = "user"
            self._identity = token_id_of(credential.token)
            self._key = token_key(credential.token)
        self._transcript: _Transcript | None = None

    def hello(self) -> bytes:
        return _encoder.encode(
            _Hello(
                version=HANDSHAKE_VERSION,
                role=self._role,
                identity=self._identity,
                purpose=self._purpose,
                nonce=self._nonce,
            )
        )

    def on_challenge(self, data: bytes) -> bytes:
        """Checks the server's proof; returns the client's."""
        message = _decode(_challenge_decoder, data, "the server's challenge")
        if isinstance(message, _Refused):
            raise _refused(message)
        if message.version != HANDSHAKE_VERSION:
            raise PermissionDenied(_version_text(message.version))
        transcript = _Transcript(
            self._role, self._identity, message.identity, self._purpose, self._nonce, message.nonce
        )
        if not hmac.compare_digest(transcript.proof(self._key, _SERVER_LABEL), message.proof):
            if self._role == "node":
                raise PermissionDenied("the server has another node secret; give both sides the same secret file")
            raise TokenRefused(
                "the server does not accept this token: it is unknown, revoked or expired; ask an administrator for a "
                "new one"
            )
        self._transcript = transcript
        return _encoder.encode(_Proof(transcript.proof(self._key, _CLIENT_LABEL)))

    def on_verdict(self, data: bytes) -> Session:
        message = _decode(_verdict_decoder, data, "the server's verdict")
        if isinstance(message, _Refused):
            raise _refused(message)
        transcript = self._transcript
        if transcript is None:
            raise UsageError("on_verdict comes after on_challenge")
        if not hmac.compare_digest(transcript.proof(self._key, _VERDICT_LABEL), message.proof):
            raise PermissionDenied(
                "the answer of the server is forged; something between client and server alters the connection"
            )
        return Session(self._role, transcript.server, self._purpose, transcript.proof(self._key, _SESSION_LABEL))


class ServerHandshake:
    """The accepting side: `on_hello`, then `on_proof` (send the bytes, the session is open). `on_hello` returns the
    challenge to be sent, or None for a user: whose token `token_id` is must be found out, and `on_found`, which is told
    it, returns the challenge. Raises `HandshakeRefused` (send its `reply`, close) or `PermissionDenied` (just close).
    """

    def __init__(
        self, accepts: Accepts, *, identity: str, purpose: str, nonce: bytes, decoy_key: bytes | None = None
    ) -> None:
        """`decoy_key`: random bytes under which unknown tokens are challenged; without it they are refused at once."""
        self._accepts = accepts
        self._identity = _check_text("identity", identity, MAX_IDENTITY_BYTES)
        self._purpose = _check_text("purpose", purpose, MAX_PURPOSE_BYTES)
        self._nonce = nonce
        self._decoy_key = decoy_key
        self._transcript: _Transcript | None = None
        self._hello: _Hello | None = None
        self._found: UserKey | None = None
        self._key = b""

    @property
    def token_id(self) -> str:
        """Number of the token of which the user is to be found; empty where nothing is."""
        return "" if self._hello is None else self._hello.identity

    def on_hello(self, data: bytes) -> bytes | None:
        version = _decode(_version_decoder, data, "the client's hello").version
        if version != HANDSHAKE_VERSION:
            raise _handshake_refused(_version_text(version))
        hello = _decode(_hello_decoder, data, "the client's hello")
        if len(hello.identity.encode()) > MAX_IDENTITY_BYTES or not hello.identity.isprintable():
            raise _handshake_refused(
                f"the client's identity is not printable text of at most {MAX_IDENTITY_BYTES} bytes"
            )
        if hello.purpose != self._purpose:
            raise _handshake_refused(
                f"this port serves {self._purpose!r}, and the client asked for {hello.purpose[:40]!r}; check the "
                "address"
            )
        if hello.role == "node":
            if self._accepts.secret is None:
                raise _handshake_refused("this service does not accept the node secret; use a user token")
            return self._challenge(hello, self._accepts.secret.reveal())
        if self._accepts.find_user is None:
            raise _handshake_refused("this service accepts the node secret and no tokens; check the address")
        self._hello = hello
        return None

    def on_found(self, user: UserKey | None) -> bytes:
        """`user`: of the token `token_id`; None where it counts for nothing."""
        hello, self._hello = self._hello, None
        if hello is None:
            raise UsageError("on_found comes once, after an on_hello that returned None")
        self._found = user
        if user is not None:
            return self._challenge(hello, user.key)
        if self._decoy_key is None:
            raise _handshake_refused("the token is unknown or expired; ask an administrator for a new one")
        return self._challenge(hello, self._decoy_key)

    def _challenge(self, hello: _Hello, key: bytes) -> bytes:
        self._key = key
        self._transcript = _Transcript(
            hello.role, hello.identity, self._identity, self._purpose, hello.nonce, self._nonce
        )
        return _encoder.encode(
            _Challenge(
                version=HANDSHAKE_VERSION,
                identity=self._identity,
                nonce=self._nonce,
                proof=self._transcript.proof(self._key, _SERVER_LABEL),
            )
        )

    def on_proof(self, data: bytes) -> tuple[Session, bytes]:
        message = _decode(_proof_decoder, data, "the client's proof")
        transcript = self._transcript
        if transcript is None:
            raise UsageError("on_proof comes after on_hello")
        right = hmac.compare_digest(transcript.proof(self._key, _CLIENT_LABEL), message.proof)
        user = self._found
        if not right or (transcript.role == "user" and user is None):
            raise _handshake_refused("the proof of the client is wrong; check its secret file or token")
        key = transcript.proof(self._key, _SESSION_LABEL)
        if user is None:
            session = Session("node", transcript.client, self._purpose, key)
        else:
            session = Session(
                "user", user.user, self._purpose, key, transcript.client, user.account, user.roles, user.scope
            )
        return session, _encoder.encode(_Verdict(transcript.proof(self._key, _VERDICT_LABEL)))


def _version_text(version: int) -> str:
    return (
        f"the peer speaks handshake version {version}, this side {HANDSHAKE_VERSION}; "
        "install the same release of fireflyer on both"
    )


def refusal_message(error: FireflyerError) -> bytes:
    """The message that turns a client away at any turn of the server, also before its hello (a full server)."""
    return _encoder.encode(_Refused(version=HANDSHAKE_VERSION, code=error.code, message=error.message[:400]))


def _handshake_refused(message: str) -> HandshakeRefused:
    return HandshakeRefused(message, refusal_message(PermissionDenied(message)))


def _refused(message: _Refused) -> FireflyerError:
    # Nobody has proven anything yet, so only two classes may come out of it, and neither says that anything happened.
    if message.code == Busy.code:
        return Busy(f"refused by the server: {message.message}")
    return PermissionDenied(f"refused by the server: {message.message}")
