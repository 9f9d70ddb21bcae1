"""Authentication of any connected stream socket, TCP or Unix, that is handed on afterwards.

The collectives connect ranks with plain sockets which native code then drives. These functions perform the handshake
of `fireflyer.identity.handshake` on such a socket, read exactly its bytes and not one more, and leave the socket as it
was (its timeout included). On an error the socket is of no further use: close it.

The handshake proves who is at the other end. It does not protect what is sent later: the bytes that follow carry no
tags. Where somebody may sit on the path, isolate or tunnel that network.
"""

from __future__ import annotations

import secrets
import socket
import time
from typing import Self

from fireflyer.base.errors import FireflyerError, PermissionDenied, Timeout, Unreachable
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND, format_duration
from fireflyer.identity.handshake import (
    LENGTH_BYTES,
    NONCE_BYTES,
    Accepts,
    ClientHandshake,
    HandshakeRefused,
    NodeCredential,
    ServerHandshake,
    message_length,
    pack_message,
)
from fireflyer.identity.secrets import Secret

__all__ = ["authenticate_client", "authenticate_server", "receive_exactly"]


def authenticate_client(sock: socket.socket, secret: Secret, identity: str, purpose: str, timeout_ns: int) -> str:
    """The connecting side; returns the identity that the server has proven. Blocks for at most `timeout_ns`.

    `identity` (at most 256 bytes) is this side's name, `purpose` (at most 128) must be the server's. Raises
    `PermissionDenied` when the secrets or purposes differ, `Timeout`, `Unreachable`.
    """
    with _Conversation(sock, timeout_ns) as peer:
        handshake = ClientHandshake(
            NodeCredential(secret, identity), purpose=purpose, nonce=secrets.token_bytes(NONCE_BYTES)
        )
        left = Unreachable("the peer closed the connection during the handshake; it has ended, see its log")
        peer.send(handshake.hello())
        peer.send(handshake.on_challenge(peer.receive(left)))
        return handshake.on_verdict(peer.receive(left)).peer


def authenticate_server(
    sock: socket.socket, secret: Secret, purpose: str, timeout_ns: int, *, identity: str = ""
) -> str:
    """The accepting side; returns the identity that the client has proven. `identity` is this side's name.

    Raises as `authenticate_client` does.
    """
    with _Conversation(sock, timeout_ns) as peer:
        handshake = ServerHandshake(
            Accepts(secret), identity=identity, purpose=purpose, nonce=secrets.token_bytes(NONCE_BYTES)
        )
        left = PermissionDenied(
            "the peer closed the connection during the handshake; check that both use the same secret file"
        )
        try:
            peer.send(handshake.on_hello(peer.receive(left)))
            session, verdict = handshake.on_proof(peer.receive(left))
        except HandshakeRefused as refusal:
            peer.send(refusal.reply)
            raise
        peer.send(verdict)
        return session.peer


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes from a blocking socket. Raises `EOFError` where it ends before, and `OSError`."""
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError("the peer closed the connection")
        data += more
    return bytes(data)


class _Conversation:
    """Handshake messages on a blocking socket under one deadline for all of them."""

    def __init__(self, sock: socket.socket, timeout_ns: int) -> None:
        self._sock = sock
        self._timeout_ns = timeout_ns
        self._deadline_ns = time.monotonic_ns() + timeout_ns
        self._previous = sock.gettimeout()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sock.fileno() >= 0:
            self._sock.settimeout(self._previous)

    def send(self, message: bytes) -> None:
        self._limit()
        try:
            self._sock.sendall(pack_message(message))
        except OSError as error:
            raise self._translated(error) from error

    def receive(self, left: FireflyerError) -> bytes:
        """The next message; raises `left` when the peer has closed the connection instead."""
        return self._exactly(message_length(self._exactly(LENGTH_BYTES, left)), left)

    def _exactly(self, length: int, left: FireflyerError) -> bytes:
        data = b""
        while len(data) < length:
            self._limit()
            try:
                piece = self._sock.recv(length - len(data))
            except OSError as error:
                raise self._translated(error) from error
            if not piece:
                raise left
            data += piece
        return data

    def _limit(self) -> None:
        left_ns = self._deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise self._late()
        self._sock.settimeout(left_ns / SECOND)

    def _late(self) -> Timeout:
        return Timeout(f"the peer did not authenticate within {format_duration(self._timeout_ns)}; is it alive?")

    def _translated(self, error: OSError) -> Exception:
        if isinstance(error, TimeoutError):
            return self._late()
        return translate_os_error(error, "authenticate the peer")
