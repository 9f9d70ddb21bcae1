"""Where a rank lets the others in, after the group has met: connections from rank to rank are made when first needed.

Every rank listens on a TCP port and on a Unix socket, publishes both addresses before the group meets, and rank 0
publishes the list of all of them. A thread answers connections, also while the program computes. It never waits for a
single one: there are at most `MAX_PENDING_HANDSHAKES` (then the oldest, most likely a silent one, is closed), and each
has `PENDING_HANDSHAKE_TIMEOUT_NS`. Nothing is believed of a peer before it has proven to hold the secret.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import threading
import time
from contextlib import ExitStack
from typing import Final, Protocol

import msgspec

from fireflyer.base.errors import FireflyerError, PermissionDenied, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.p2p.acceptor import ACCEPT_PAUSE_S
from fireflyer.identity.handshake import (
    LENGTH_BYTES,
    NONCE_BYTES,
    Accepts,
    HandshakeRefused,
    ServerHandshake,
    message_length,
    pack_message,
)
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.sockets import authenticate_client
from fireflyer.runtime.store import Store

__all__ = ["MAX_PENDING_HANDSHAKES", "PENDING_HANDSHAKE_TIMEOUT_NS", "ListenAddress", "PeerListener", "listen"]

MAX_PENDING_HANDSHAKES: Final = 128
PENDING_HANDSHAKE_TIMEOUT_NS: Final = 10 * SECOND
_BACKLOG: Final = 256
_LIST_GRACE_NS: Final = 5 * SECOND


_log = logging.getLogger(__name__)


class ListenAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank listens."""

    host: str
    port: int
    unix: str


def listen(host: str, stack: ExitStack, *, backlog: int) -> tuple[socket.socket, socket.socket, ListenAddress]:
    """A Unix socket with a random name and a TCP socket with a free port at `host`, closed with `stack`.

    Raises `UsageError` when `host` is no address of this machine, `Busy` when the process may open no more files."""
    name = f"fireflyer-{secrets.token_hex(16)}"
    try:
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(f"\0{name}")
        unix.listen(backlog)
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        tcp = stack.enter_context(socket.create_server((host, 0), family=family, backlog=backlog))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise translate_os_error(error, f"listen on host {host!r}") from error
        raise UsageError(f"cannot listen on host {host!r}: {error}; pass an address of this machine") from error
    return unix, tcp, ListenAddress(host, tcp.getsockname()[1], name)


class OnPeer(Protocol):
    def __call__(self, rank: int, fd: int) -> None:
        """Takes over the descriptor of a connection that leads to `rank`, also when it raises."""


class _PendingHandshake:
    """A handshake under way."""

    def __init__(self, sock: socket.socket, handshake: ServerHandshake) -> None:
        self.sock = sock
        self.handshake = handshake
        self.deadline_ns = time.monotonic_ns() + PENDING_HANDSHAKE_TIMEOUT_NS
        self._data = b""
        self._greeted = False

    def advance(self) -> str | None:
        """Reads what is there, and not a byte too much; the peer's name once it has proven it. Raises
        `PermissionDenied` or `OSError` when this is no rank."""
        while True:
            missing = LENGTH_BYTES - len(self._data)
            if missing <= 0:
                missing += message_length(self._data[:LENGTH_BYTES])
            if missing > 0:
                try:
                    piece = self.sock.recv(missing)
                except BlockingIOError:
                    return None
                if not piece:
                    raise PermissionDenied("the peer closed the connection during the handshake")
                self._data += piece
                continue
            message, self._data = self._data[LENGTH_BYTES:], b""
            if not self._greeted:
                self._greeted = True
                self._say(self.handshake.on_hello(message))
            else:
                session, verdict = self.handshake.on_proof(message)
                self._say(verdict)
                return session.peer

    def refuse(self, refusal: HandshakeRefused) -> None:
        try:
            self._say(refusal.reply)
        except (OSError, PermissionDenied):
            pass  # it has gone

    def _say(self, message: bytes) -> None:
        data = pack_message(message)
        if self.sock.send(data) != len(data):  # a fresh connection takes a few hundred bytes at once
            raise PermissionDenied("the peer does not read the messages of the handshake")


class PeerListener:
    """The listeners of one rank. `publish`, then (when the group has met) `open`, then `dial`; `close` at the end."""

    def __init__(self, *, rank: int, world_size: int, host: str, secret: Secret, prefix: str) -> None:
        """Raises as `listen` does."""
        self._rank = rank
        self._world_size = world_size
        self._secret = secret
        self._prefix = prefix
        self._addresses: list[ListenAddress] = []
        self._pending: dict[int, _PendingHandshake] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._hearing = threading.Lock()
        with ExitStack() as undo:
            self._unix, self._tcp, self.own = listen(host, undo, backlog=_BACKLOG)
            try:
                self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            except OSError as error:
                raise translate_os_error(error, f"start the peer listener of rank {rank}") from error
            undo.pop_all()
        self._unix.setblocking(False)
        self._tcp.setblocking(False)

    def publish(self, store: Store) -> None:
        """To be called before the group meets."""
        store.set(f"{self._prefix}/door/{self._rank}", msgspec.json.encode(self.own))

    def open(self, store: Store, admit: OnPeer, join_timeout_ns: int) -> None:
        """Learns the others' addresses, all of which have been published, and begins to accept connections."""
        if self._rank == 0:
            raw = [store.get(f"{self._prefix}/door/{rank}", join_timeout_ns) for rank in range(self._world_size)]
            self._addresses = [msgspec.json.decode(address, type=ListenAddress) for address in raw]
            store.set(f"{self._prefix}/doors", msgspec.json.encode(self._addresses))
        else:
            data = store.get(f"{self._prefix}/doors", join_timeout_ns + _LIST_GRACE_NS)
            self._addresses = msgspec.json.decode(data, type=list[ListenAddress])
        if len(self._addresses) != self._world_size:
            raise UsageError("rank 0 published an invalid list of peer listeners; do all ranks run the same version?")
        # A daemon, because the interpreter joins other threads before it runs what closes a forgotten communicator.
        self._thread = threading.Thread(target=self._receive, args=(admit,), name="ff-peer-listener", daemon=True)
        self._thread.start()

    def dial(self, rank: int, *, local: bool, timeout_ns: int) -> int:
        """The descriptor of a new, authenticated connection to that rank. Never waits for its program, only for its
        listener. Raises `OSError` and what `authenticate_client` raises."""
        address = self._addresses[rank]
        deadline_ns = time.monotonic_ns() + timeout_ns
        if local:
            sock = socket.socket(socket.AF_UNIX)
        else:
            sock = socket.create_connection((address.host, address.port), timeout=timeout_ns / SECOND)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if local:
                sock.settimeout(timeout_ns / SECOND)
                sock.connect(f"\0{address.unix}")
            left_ns = max(MS, deadline_ns - time.monotonic_ns())
            peer = authenticate_client(sock, self._secret, f"rank {self._rank}", self._purpose, left_ns)
            if peer != f"rank {rank}":
                raise PermissionDenied(f"expected rank {rank} at its peer listener, found {peer!r}")
            return sock.detach()
        except BaseException:
            sock.close()
            raise

    def settle(self) -> None:
        """Returns when every peer whose handshake was confirmed has been admitted."""
        with self._hearing:
            pass

    def close(self) -> None:
        """Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._alarm, 1)
        if self._thread is not None:
            self._thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Gives up this process's descriptors; in the child of a fork, where the thread does not exist. Idempotent, and
        may find them closed half: the parent may have been closing them when it forked."""
        self._closing = True
        for pending in self._pending.values():
            pending.sock.close()
        self._pending.clear()
        self._unix.close()
        self._tcp.close()
        # forgotten first: a number that was closed may be somebody else's by now
        alarm, self._alarm = self._alarm, -1
        if alarm >= 0:
            os.close(alarm)

    @property
    def _purpose(self) -> str:
        return f"{self._prefix}/rank"

    # --- the thread ---

    def _receive(self, admit: OnPeer) -> None:
        poll = select.poll()
        for listener in (self._unix, self._tcp):
            poll.register(listener, select.POLLIN)
        poll.register(self._alarm, select.POLLIN)
        listeners = {sock.fileno(): sock for sock in (self._unix, self._tcp)}
        while not self._closing:
            for fd, _ in poll.poll(self._patience_ms()):
                if fd in listeners:
                    self._accept(listeners[fd], poll)
                elif fd in self._pending:
                    self._hear(fd, poll, admit)
            now_ns = time.monotonic_ns()
            for fd in [fd for fd, pending in self._pending.items() if pending.deadline_ns <= now_ns]:
                self._turn_away(fd, poll)

    def _patience_ms(self) -> int | None:
        if not self._pending:
            return None
        first_ns = min(pending.deadline_ns for pending in self._pending.values())
        return max(1, (first_ns - time.monotonic_ns()) // MS + 1)

    def _accept(self, listener: socket.socket, poll: select.poll) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left for it
            time.sleep(ACCEPT_PAUSE_S)  # the listener stays readable while there is none: no spinning
            return
        if len(self._pending) >= MAX_PENDING_HANDSHAKES:
            self._turn_away(next(iter(self._pending)), poll)
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = ServerHandshake(
            Accepts(self._secret),
            identity=f"rank {self._rank}",
            purpose=self._purpose,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        self._pending[sock.fileno()] = _PendingHandshake(sock, handshake)
        poll.register(sock, select.POLLIN)

    def _hear(self, fd: int, poll: select.poll, admit: OnPeer) -> None:
        with self._hearing:
            self._answer(fd, poll, admit)

    def _answer(self, fd: int, poll: select.poll, admit: OnPeer) -> None:
        pending = self._pending[fd]
        try:
            name = pending.advance()
        except HandshakeRefused as refusal:
            pending.refuse(refusal)
            return self._turn_away(fd, poll)
        except (FireflyerError, OSError):
            return self._turn_away(fd, poll)
        except Exception:  # a fault of ours: without this no rank could connect any more
            _log.exception("handshake failed on an unexpected error rank=%d", self._rank)
            return self._turn_away(fd, poll)
        if name is None:
            return None
        poll.unregister(fd)
        del self._pending[fd]
        rank = self._rank_named(name)
        if rank is None:
            return pending.sock.close()
        try:
            admit(rank, pending.sock.detach())
        except (RuntimeError, ValueError):
            return None  # the communicator is being closed, or that rank has come too often
        return None

    def _turn_away(self, fd: int, poll: select.poll) -> None:
        poll.unregister(fd)
        self._pending.pop(fd).sock.close()

    def _rank_named(self, name: str) -> int | None:
        word, _, number = name.partition(" ")
        if word != "rank" or not number.isascii() or not number.isdigit() or len(number) > 9:
            return None
        rank = int(number)
        return rank if rank < self._world_size and rank != self._rank else None
