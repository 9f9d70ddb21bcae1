"""Where a rank lets the others in, after the group has met: connections from rank to rank are made when first needed.

Every rank listens on a TCP port and on a Unix socket, publishes both addresses before the group meets, and rank 0
publishes the list of all of them. A thread answers connections, also while the program computes
(`fireflyer.runtime.accept_thread`). Nothing is believed of a peer before it has proven to hold the secret.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Final, Protocol

import msgspec

from fireflyer.base.decoding import decode_published
from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.port_range import PortRange
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.planning.programs import MAX_NETWORKS
from fireflyer.identity.handshake import Accepts, Session
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.accept_thread import AcceptThread
from fireflyer.runtime.port_search import listen_in_range
from fireflyer.runtime.sockets import authenticate_client
from fireflyer.runtime.store import Store

__all__ = ["ListenAddress", "PeerListener", "listen"]

_BACKLOG: Final = 256
_LIST_GRACE_NS: Final = 5 * SECOND


class ListenAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank listens."""

    host: str
    port: int
    unix: str
    more_networks: Annotated[tuple[tuple[str, int], ...], msgspec.Meta(max_length=MAX_NETWORKS - 1)] = ()
    """Host and port in each other network that the group uses beside the first."""

    @property
    def networks(self) -> tuple[tuple[str, int], ...]:
        """Host and port in each network."""
        return ((self.host, self.port), *self.more_networks)


def listen(
    hosts: Sequence[str], stack: ExitStack, *, backlog: int, ports: PortRange | None
) -> tuple[socket.socket, list[socket.socket], ListenAddress]:
    """A Unix socket with a random name, and for each of `hosts` a TCP socket with a free port, closed with `stack`.

    Raises `UsageError` when one is no address of this machine or no port of `ports` is free, `Busy` when the process
    may open no more files."""
    name = f"fireflyer-{secrets.token_hex(16)}"
    host = hosts[0]
    servers: list[socket.socket] = []
    try:
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(f"\0{name}")
        unix.listen(backlog)
        for host in hosts:
            servers.append(stack.enter_context(_server(host, backlog, ports)))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise translate_os_error(error, f"listen on host {host!r}") from error
        raise UsageError(f"cannot listen on host {host!r}: {error}; pass an address of this machine") from error
    first, *more = [(host, server.getsockname()[1]) for host, server in zip(hosts, servers, strict=True)]
    return unix, servers, ListenAddress(*first, name, tuple(more))


def _server(host: str, backlog: int, ports: PortRange | None) -> socket.socket:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return listen_in_range(ports, lambda port: socket.create_server((host, port), family=family, backlog=backlog))


class OnPeer(Protocol):
    def __call__(self, rank: int, fd: int) -> None:
        """Takes over the descriptor of a connection that leads to `rank`, also when it raises."""


class PeerListener:
    """The listeners of one rank. `publish`, then (when the group has met) `open`, then `dial`; `close` at the end."""

    def __init__(
        self, *, rank: int, world_size: int, host: str, secret: Secret, prefix: str, ports: PortRange | None = None
    ) -> None:
        """Raises as `listen` does."""
        self._rank = rank
        self._world_size = world_size
        self._secret = secret
        self._prefix = prefix
        self._addresses: list[ListenAddress] = []
        self._admit: OnPeer | None = None
        with ExitStack() as undo:
            self._unix, (self._tcp,), self.own = listen([host], undo, backlog=_BACKLOG, ports=ports)
            self._accepting = AcceptThread(
                [self._unix, self._tcp],
                Accepts(secret),
                identity=f"rank {rank}",
                purpose=self._purpose,
                on_connection=self._on_connection,
            )
            undo.pop_all()

    def publish(self, store: Store) -> None:
        """To be called before the group meets."""
        store.set(f"{self._prefix}/door/{self._rank}", msgspec.json.encode(self.own))

    def open(self, store: Store, admit: OnPeer, join_timeout_ns: int) -> None:
        """Learns the others' addresses, all of which have been published, and begins to accept connections."""
        if self._rank == 0:
            raw = [store.get(f"{self._prefix}/door/{rank}", join_timeout_ns) for rank in range(self._world_size)]
            self._addresses = [
                decode_published(address, ListenAddress, f"rank {rank}") for rank, address in enumerate(raw)
            ]
            store.set(f"{self._prefix}/doors", msgspec.json.encode(self._addresses))
        else:
            data = store.get(f"{self._prefix}/doors", join_timeout_ns + _LIST_GRACE_NS)
            self._addresses = decode_published(data, list[ListenAddress], "rank 0")
        if len(self._addresses) != self._world_size:
            raise UsageError("rank 0 published an invalid list of peer listeners; do all ranks run the same version?")
        self._admit = admit
        self._accepting.start()

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
        self._accepting.settle()

    def close(self) -> None:
        """Idempotent."""
        self._accepting.close()
        self.abandon()

    def abandon(self) -> None:
        """Gives up this process's descriptors; in the child of a fork, where the thread does not exist. Idempotent."""
        self._accepting.abandon()
        self._unix.close()
        self._tcp.close()

    @property
    def _purpose(self) -> str:
        return f"{self._prefix}/rank"

    def _on_connection(self, sock: socket.socket, session: Session) -> None:
        """In the thread."""
        rank = self._rank_named(session.peer)
        if rank is None or self._admit is None:
            return sock.close()
        try:
            self._admit(rank, sock.detach())
        except (RuntimeError, ValueError):
            return None  # the communicator is being closed, or that rank has come too often
        return None

    def _rank_named(self, name: str) -> int | None:
        word, _, number = name.partition(" ")
        if word != "rank" or not number.isascii() or not number.isdigit() or len(number) > 9:
            return None
        rank = int(number)
        return rank if rank < self._world_size and rank != self._rank else None
