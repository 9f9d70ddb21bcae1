"""A switch that delivers every Ethernet frame a fixed time after it came, in order, and limits nothing else.

Run as `python -m tests.support.network.delaying_switch JSON` by `namespaces.delayed_network_of`: it makes an interface
(TAP) in each of the namespaces, says "ready", and passes frames on until its standard input ends. Port n has the
address 02:00:00:00:00:n. Whoever talks through it has the same delay, whatever the protocol.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from tests.support.network.namespaces import enter_namespace

__all__ = ["Switch", "new_port"]

_TUNSETIFF: Final = 0x400454CA
_TAP_WITHOUT_HEADER: Final = 0x0002 | 0x1000
_MOST_FRAME_BYTES: Final = 1 << 16
_MOST_WAITING: Final = 1 << 14
"""Frames under way; more than windows of TCP let be."""
_MOST_IN_A_ROW: Final = 32


class Switch:
    def __init__(self, ports: Sequence[int], delay_ns: int) -> None:
        """`ports` are non-blocking descriptors of TAP interfaces; the n-th has an address that ends in n."""
        self._ports = list(ports)
        self._delay_ns = delay_ns
        self._waiting: deque[tuple[int, int, bytes]] = deque()

    def run(self, until: int) -> None:
        """Until there is something to read, or an end, at the descriptor `until`."""
        watched = [*self._ports, until]
        while True:
            left_s = None
            if self._waiting:
                left_s = max(0, self._waiting[0][0] - time.monotonic_ns()) / 1e9
            ready, _, _ = select.select(watched, [], [], left_s)
            if until in ready:
                return
            for port in ready:
                self._take(port)
            self._deliver()

    def _take(self, port: int) -> None:
        for _ in range(_MOST_IN_A_ROW):
            try:
                frame = os.read(port, _MOST_FRAME_BYTES)
            except BlockingIOError:
                return
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append((time.monotonic_ns() + self._delay_ns, port, frame))

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic_ns():
            _, source, frame = self._waiting.popleft()
            for port in self._targets(source, frame):
                try:
                    os.write(port, frame)
                except OSError:
                    continue  # an interface that is not up: the frame is lost, as on a cable

    def _targets(self, source: int, frame: bytes) -> list[int]:
        if frame[0] & 1:  # to several
            return [port for port in self._ports if port != source]
        return [self._ports[frame[5]]] if frame[5] < len(self._ports) else []


def new_port(namespace: str, interface: str) -> int:
    """A TAP interface in a namespace, without the large packets that offloads would make. Moves the calling
    thread there."""
    enter_namespace(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _TAP_WITHOUT_HEADER))
    return fd


def main() -> None:
    order = json.loads(sys.argv[1])
    ports = [new_port(namespace, order["interface"]) for namespace in order["namespaces"]]
    switch = Switch(ports, int(order["delay_us"] * 1000))
    print("ready", flush=True)
    switch.run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
