"""Messages of a simulated platform: objects that cross a `SimNet`, which loses, delays and doubles them."""

from __future__ import annotations

from typing import Any, NamedTuple

from fireflyer.sim import SimNet

__all__ = ["Ask", "Post", "Tell"]


class Ask(NamedTuple):
    """`number`: of the caller's process, comes back with the answer."""

    number: int
    body: Any


class Tell(NamedTuple):
    number: int
    body: Any


class Post:
    """What is sent is frozen, so the object itself may travel."""

    def __init__(self, net: SimNet) -> None:
        self.net = net
        self._bodies: list[Ask | Tell] = []

    def send(self, source: str, target: str, body: Ask | Tell) -> None:
        self._bodies.append(body)
        self.net.send(source, target, str(len(self._bodies) - 1).encode())

    def opened(self, payload: bytes) -> Ask | Tell:
        return self._bodies[int(payload)]
