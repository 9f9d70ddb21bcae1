"""The other end of a data connection, by hand: frames as storage/wire/wire.hpp says, and what a node tells."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fireflyer.native import ChunkNode, ChunkTarget, crc32c

__all__ = ["CHAIN", "CHAIN_VERSION", "FOREVER_NS", "MESSAGE", "READS", "REPLY", "Events"]
__all__ += ["connected", "frame", "publish", "put", "received", "sending"]

MAGIC = 0x31434646
READS, REPLY, MESSAGE = 1, 2, 3
PATIENCE_S = 20.0
FOREVER_NS = (1 << 63) - 1
CHAIN, CHAIN_VERSION = 3, 9

Event = tuple[Any, ...]


def frame(
    kind: int, body: bytes, payload: bytes = b"", *, magic: int = MAGIC, body_bytes: int = -1, payload_bytes: int = -1
) -> bytes:
    """`body_bytes`, `payload_bytes`: what it says of itself, where that is not true."""
    says = (len(body) if body_bytes < 0 else body_bytes, len(payload) if payload_bytes < 0 else payload_bytes)
    rest = struct.pack("<HHIII", kind, 0, *says, 0)
    return struct.pack("<II", magic, crc32c(body, crc32c(rest))) + rest + body + payload


def exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        assert piece, f"the connection ended after {len(data)} of {count} bytes"
        data += piece
    return bytes(data)


def received(sock: socket.socket) -> tuple[int, bytes, bytes]:
    """Kind, body and payload of the next frame."""
    prefix = exactly(sock, 24)
    magic, crc, kind, _, body_bytes, payload_bytes, _ = struct.unpack("<IIHHIII", prefix)
    body = exactly(sock, body_bytes)
    assert magic == MAGIC
    assert crc == crc32c(body, crc32c(prefix[8:]))
    return kind, body, exactly(sock, payload_bytes)


def connected(tcp: bool = False) -> tuple[socket.socket, socket.socket]:
    """Two ends, with patience."""
    if not tcp:
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine = socket.create_connection(listener.getsockname())
            ends = (mine, listener.accept()[0])
    ends[0].settimeout(PATIENCE_S)
    return ends


@contextmanager
def sending(sock: socket.socket, data: bytes) -> Iterator[None]:
    """Sends meanwhile; how much of it went is not asked."""

    def send() -> None:
        try:
            sock.sendall(data)
        except OSError:
            pass  # the other end may end it: that is what is tested

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Events:
    """What a node tells, in order, looked for by kind."""

    def __init__(self, node: ChunkNode) -> None:
        self._node = node
        self._kept: list[Event] = []

    def next(self, kind: str, fits: Callable[[Event], bool] = lambda event: True) -> Event:
        while True:
            for at, event in enumerate(self._kept):
                if event[0] == kind and fits(event):
                    return self._kept.pop(at)
            ready = select.select([self._node.event_fd], [], [], PATIENCE_S)[0]
            assert ready, f"no {kind} came; there are {[event[:3] for event in self._kept]}"
            self._kept += self._node.take(1000)

    def none_of(self, kind: str) -> bool:
        self._kept += self._node.take(1000)
        return all(event[0] != kind for event in self._kept)


def publish(node: ChunkNode, target: int, *, fence_until_ns: int = FOREVER_NS, answers_committed: bool = False) -> None:
    node.publish([(target, CHAIN, CHAIN_VERSION, True, fence_until_ns, 77, answers_committed)])


def put(events: Events, target: ChunkTarget, chunk: tuple[int, int], version: int, data: bytes, handle: int) -> None:
    """Stages and commits `data`, which has this handle, as the whole chunk."""
    job = 1000 + version
    target.stage(job, chunk, (1, version), None, "replace", 0, len(data), crc32c(data), handle, None)
    assert events.next("staged")[2] == job
    target.commit(chunk, (1, version))
