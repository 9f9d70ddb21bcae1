"""Authentication of any connected stream socket, TCP or Unix, that is handed on afterwards: the connecting end.

The collectives connect ranks with plain sockets which native code then drives. `authenticate_client` performs the
handshake of `fireflyer.identity.handshake` on such a socket, reads exactly its bytes and not one more, and leaves the
socket as it was (its timeout included). On an error the socket is of no further use: close it. The accepting end is
`fireflyer.runtime.accept_thread`.

The handshake proves who is at the other end. It does not protect what is sent later: the bytes that follow carry no
tags. Where somebody may sit on the path, isolate or tunnel that network.
"""

from __future__ import annotations

import secrets
import socket
import time

from fireflyer.base.errors import FireflyerError, Timeout
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND, format_duration
from fireflyer.identity.conversation import ClientConversation
from fireflyer.identity.handshake import NONCE_BYTES, NodeCredential
from fireflyer.identity.secrets import Secret

__all__ = ["authenticate_client", "receive_exactly"]


def authenticate_client(sock: socket.socket, secret: Secret, identity: str, purpose: str, timeout_ns: int) -> str:
    """The connecting side; returns the identity that the server has proven. Blocks for at most `timeout_ns`.

    `identity` (at most 256 bytes) is this side's name, `purpose` (at most 128) must be the server's. Raises
    `PermissionDenied` when the secrets or purposes differ, `Timeout`, `Unreachable`.
    """
    conversation = ClientConversation(
        NodeCredential(secret, identity), purpose=purpose, nonce=secrets.token_bytes(NONCE_BYTES)
    )
    deadline_ns, previous = time.monotonic_ns() + timeout_ns, sock.gettimeout()
    reply = conversation.hello()
    try:
        while conversation.session is None:
            _limit(sock, deadline_ns)
            if reply:
                sock.sendall(reply)
                _limit(sock, deadline_ns)
            reply = conversation.receive(sock.recv(conversation.wanted))
    except FireflyerError:
        raise
    except TimeoutError:
        limit = format_duration(timeout_ns)
        raise Timeout(f"the peer did not authenticate within {limit}; is it alive?") from None
    except OSError as error:
        raise translate_os_error(error, "authenticate the peer") from error
    finally:
        if sock.fileno() >= 0:
            sock.settimeout(previous)
    return conversation.session.peer


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes from a blocking socket. Raises `EOFError` where it ends before, and `OSError`."""
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError("the peer closed the connection")
        data += more
    return bytes(data)


def _limit(sock: socket.socket, deadline_ns: int) -> None:
    left_ns = deadline_ns - time.monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError
    sock.settimeout(left_ns / SECOND)
