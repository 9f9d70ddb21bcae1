"""What the ranks of one node tell each other about their memory, over their authenticated Unix sockets.

Every rank hands its arena (a descriptor) and a memory probe (process, address, a random number that lies there) to the
leader, and gets those of all others back with the window. Then each tries to read and write every other process; only
if all of them can reach all others is reading foreign memory used on this node, since all must go the same way.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import Unreachable
from fireflyer.collectives.bootstrap.cpu_binding import MAX_MASK_TEXT
from fireflyer.native import can_access, memory_probe
from fireflyer.runtime.sockets import receive_exactly

__all__ = [
    "LocalPeer",
    "LocalPeerInfo",
    "agree",
    "decide",
    "local_peers",
    "own_peer_info",
    "receive",
    "receive_all",
    "send",
    "send_all",
]

MAX_MESSAGE_BYTES: Final = 64 * 1024
_LENGTH: Final = struct.Struct("<I")
_YES: Final = b"y"
_NO: Final = b"n"


class MemoryProbe(msgspec.Struct, frozen=True):
    """Where a process has a number by which it is known. `pid` 0: its memory is not to be read."""

    pid: Annotated[int, Meta(ge=0, lt=2**31)]
    address: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    number: Annotated[int, Meta(ge=0)]
    cpus: Annotated[str, Meta(max_length=MAX_MASK_TEXT)] = ""
    """The processors on which it may run, as `cpu_binding.mask_text`."""

    def __post_init__(self) -> None:
        if self.number >= 2**64:
            raise ValueError("the number of a memory probe has 64 bits")


class LocalPeerInfo(NamedTuple):
    probe: MemoryProbe
    arena_fd: int


class LocalPeer(NamedTuple):
    """A rank of the node, as native code and the choice of processors need it."""

    probe: MemoryProbe
    """`pid` 0: its memory is not to be read."""
    arena_fd: int
    cpus: str

    @property
    def native(self) -> tuple[int, int, int, int]:
        return self.probe.pid, self.probe.address, self.probe.number, self.arena_fd


def own_peer_info(arena_fd: int, *, peer_memory: bool, cpus: str = "") -> LocalPeerInfo:
    """This process, with its arena. With `peer_memory` it has an `OpenMemory` until the others have looked."""
    return LocalPeerInfo(MemoryProbe(*(memory_probe() if peer_memory else (0, 0, 0)), cpus), arena_fd)


def send(sock: socket.socket, own: LocalPeerInfo, peer: str) -> None:
    _send(sock, [own.probe], [own.arena_fd], peer)


def receive(sock: socket.socket, peer: str, stack: ExitStack) -> LocalPeerInfo:
    """What `peer` sent. Its descriptor is closed with `stack`. Raises `Unreachable`."""
    probes, fds = _receive(sock, 1, peer, stack)
    if len(probes) != 1 or len(fds) != 1:
        raise Unreachable(f"{peer} sent no file descriptor of its arena; see its log")
    return LocalPeerInfo(probes[0], fds[0])


def send_all(sock: socket.socket, window_fds: Sequence[int], peers: Sequence[LocalPeerInfo]) -> None:
    _send(sock, [one.probe for one in peers], [*window_fds, *(one.arena_fd for one in peers)], "a rank")


def receive_all(
    sock: socket.socket, leader: str, ranks: int, stack: ExitStack
) -> tuple[tuple[int, int], list[LocalPeerInfo]]:
    """The window, its doorbell, and all `ranks` of the node. Raises `Unreachable`."""
    probes, fds = _receive(sock, ranks + 2, leader, stack)
    if len(probes) != ranks or len(fds) != ranks + 2:
        raise Unreachable(f"{leader} sent no file descriptors of the shared memory; see its log")
    return (fds[0], fds[1]), [LocalPeerInfo(one, fd) for one, fd in zip(probes, fds[2:], strict=True)]


def agree(sock: socket.socket, leader: str, own: LocalPeerInfo, peers: Sequence[LocalPeerInfo]) -> bool:
    """Whether all ranks of the node see all others' memory."""
    try:
        sock.sendall(_YES if _sees_all(own, peers) else _NO)
        answer = sock.recv(1)
    except OSError as error:
        raise Unreachable(f"the connection to {leader} was lost: {error}; see its log") from error
    if not answer:
        raise Unreachable(f"{leader} closed the connection while the group was formed; see its log")
    return answer == _YES


def decide(others: Mapping[str, socket.socket], own: LocalPeerInfo, peers: Sequence[LocalPeerInfo]) -> bool:
    """The same, at the leader."""
    answers = []
    for name, sock in others.items():
        try:
            answers.append(sock.recv(1))
        except OSError as error:
            raise Unreachable(f"the connection to {name} was lost: {error}; see its log") from error
    verdict = _sees_all(own, peers) and all(answer == _YES for answer in answers)
    for name, sock in others.items():
        try:
            sock.sendall(_YES if verdict else _NO)
        except OSError as error:
            raise Unreachable(f"the connection to {name} was lost: {error}; see its log") from error
    return verdict


def local_peers(peers: Sequence[LocalPeerInfo], open_: bool) -> list[LocalPeer]:
    """Of each rank of the node."""
    closed = MemoryProbe(0, 0, 0)
    return [LocalPeer(one.probe if open_ else closed, one.arena_fd, one.probe.cpus) for one in peers]


def _sees_all(own: LocalPeerInfo, peers: Sequence[LocalPeerInfo]) -> bool:
    return own.probe.pid != 0 and all(
        one.probe.pid > 0 and can_access(one.probe.pid, one.probe.address, one.probe.number) for one in peers
    )


def _send(sock: socket.socket, probes: list[MemoryProbe], fds: list[int], peer: str) -> None:
    body = msgspec.json.encode(probes)
    try:
        socket.send_fds(sock, [_LENGTH.pack(len(body))], fds)
        sock.sendall(body)
    except OSError as error:
        raise Unreachable(f"the connection to {peer} was lost: {error}; see its log") from error


def _receive(sock: socket.socket, max_fds: int, peer: str, stack: ExitStack) -> tuple[list[MemoryProbe], list[int]]:
    try:
        head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, max_fds)
        for fd in fds:
            stack.callback(os.close, fd)
        if head:
            head += receive_exactly(sock, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise Unreachable(f"{peer} sent {length} bytes about its memory; do all ranks run the same version?")
        return decode_json(receive_exactly(sock, length), list[MemoryProbe]), fds
    except (*DECODE_ERRORS, OSError, EOFError, struct.error) as error:
        raise Unreachable(f"{peer} sent no valid description of its memory ({error}); see its log") from error
