"""A network that delays, reorders, duplicates, loses and cuts, by seed.

Each directed link has a `Link` rule; a message's fate is decided when it is sent, whether it can pass is asked again
when it would arrive (a partition also kills what is in flight). Messages are never altered. A message to a node that is
dead, or that was restarted in the meantime, is lost: connections do not outlive a process.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, US
from fireflyer.sim.world import World

__all__ = ["Link", "SimNet"]

MAX_PAYLOAD_BYTES = 64 << 20


class Link(msgspec.Struct, frozen=True):
    """Delay uniform in [min, max] plus, with `slow_probability`, up to `slow_ns` more: a long tail. Chances are 0 to
    1."""

    min_delay_ns: int = 50 * US
    max_delay_ns: int = 2 * MS
    slow_probability: float = 0.0
    slow_ns: int = 0
    loss: float = 0.0
    duplication: float = 0.0
    ordered: bool = False
    """True: messages of this link arrive in the order in which they were sent, as in one TCP stream."""


class SimNet:
    """Messages between the nodes of a world, addressed by node name."""

    def __init__(self, world: World, *, default: Link | None = None) -> None:
        self._world = world
        self._random = world.fork_random("net")
        self._default = default or Link()
        self._links: dict[tuple[str, str], Link] = {}
        self._cut: dict[tuple[str, str], bool] = {}
        self._last_arrival_ns: dict[tuple[str, str], int] = {}
        self.sent = 0
        self.delivered = 0

    def set_link(self, source: str, target: str, link: Link) -> None:
        self._links[source, target] = link

    def set_default(self, link: Link) -> None:
        """The rule of all links that have none of their own."""
        self._default = link

    def partition(self, left: Iterable[str], right: Iterable[str], *, symmetric: bool = True) -> None:
        """Let nothing pass from `left` to `right`, nor back when `symmetric`."""
        others = list(right)
        for source in left:
            for target in others:
                self._cut[source, target] = True
                if symmetric:
                    self._cut[target, source] = True

    def heal(self) -> None:
        self._cut.clear()

    def send(self, source: str, target: str, payload: bytes) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise UsageError(f"payload of {len(payload)} bytes is above {MAX_PAYLOAD_BYTES}; split it")
        link = self._links.get((source, target), self._default)
        self.sent += 1
        if self._random.random() < link.loss:
            self._world.record("lost", source, target, payload)
            return
        copies = 2 if self._random.random() < link.duplication else 1
        for _ in range(copies):
            self._schedule(source, target, payload, link)

    def _schedule(self, source: str, target: str, payload: bytes, link: Link) -> None:
        delay_ns = self._random.randint(link.min_delay_ns, link.max_delay_ns)
        if self._random.random() < link.slow_probability:
            delay_ns += self._random.randint(0, link.slow_ns)
        arrival_ns = self._world.now_ns + delay_ns
        if link.ordered:
            arrival_ns = max(arrival_ns, self._last_arrival_ns.get((source, target), 0))
            self._last_arrival_ns[source, target] = arrival_ns
        receiver = self._world.nodes.get(target)
        incarnation = receiver.incarnation if receiver is not None else 0

        def arrive() -> None:
            node = self._world.nodes.get(target)
            passes = not self._cut.get((source, target), False)
            if passes and node is not None and node.incarnation == incarnation and node.alive:
                self._world.record("deliver", source, target, payload)
                self.delivered += node.deliver(source, payload)
            else:
                self._world.record("drop", source, target, payload)

        self._world.call_at(arrival_ns, arrive)
