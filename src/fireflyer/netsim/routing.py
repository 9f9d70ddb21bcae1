"""Routing: the links that a transfer uses, by one of three rules. Pure.

- `static`: each switch chooses by the destination alone, the n-th of m links for node n mod m, as subnet managers of
  InfiniBand do. Without collisions where nodes in order send in order (Fire-Flyer paper, VI-A).
- `ecmp`: each switch chooses by a hash of the flow; a transfer over several queue pairs is as many flows.
- `adaptive`: each switch divides a transfer evenly over all links. The ideal that packet-wise adaptive routing comes
  near to without congestion; with back-pressure it does not, so its figures are upper bounds.

When links fail or are repaired, each rule applies to the links that are left: static routing as a subnet manager
computes it anew, hashes modulo fewer links (without resilient hashing, so that other flows move, too).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.netsim.links import Links
from fireflyer.topology.traffic import Transfer

__all__ = ["Flow", "Router", "Routing", "flow_key", "hashed"]

Routing = Literal["static", "ecmp", "adaptive"]
MAX_PAIRS: Final = 256
_MASK: Final = (1 << 64) - 1


class Flow(NamedTuple):
    """A part of a transfer with one rate: the links that it uses, and the share of its bytes on each."""

    share: float
    """Share of the bytes of the transfer, 0 to 1."""
    links: tuple[int, ...]
    weights: tuple[float, ...]


class Router:
    """Raises `UsageError` for no or too many queue pairs."""

    def __init__(self, links: Links, routing: Routing, *, queue_pairs: int = 1, seed: int = 0) -> None:
        if not 1 <= queue_pairs <= MAX_PAIRS:
            raise UsageError(f"{queue_pairs} queue pairs of a transfer; use 1 to {MAX_PAIRS}")
        self._links, self._routing, self._pairs, self._seed = links, routing, queue_pairs, seed
        self._known: dict[tuple[int, int], Flow] = {}
        self._middles: dict[tuple[tuple[tuple[int, float], ...], tuple[int, ...]], _Part] = {}

    @property
    def flows_of_transfer(self) -> int:
        """Number of flows that `flows` gives."""
        return self._pairs if self._routing == "ecmp" else 1

    def flows(self, key: int, source: int, target: int) -> tuple[Flow, ...]:
        """Route a transfer with that `flow_key`; no flow from a node to itself. Raises `UsageError` where no path
        is."""
        if source == target:
            return ()
        if self._links.hop_count(source, target) is None:
            raise UsageError(f"node {source} cannot reach node {target} in {self._links.fabric.name}")
        if self._routing == "ecmp":
            return tuple(
                Flow(1 / self._pairs, links, (1.0,) * len(links))
                for links in (self._hashed(key, pair, source, target) for pair in range(self._pairs))
            )
        if (source, target) not in self._known:
            found = self._static(source, target) if self._routing == "static" else self._divided(source, target)
            self._known[source, target] = found
        return (self._known[source, target],)

    def _static(self, source: int, target: int) -> Flow:
        at, links = source, []
        while at != target:
            hops = self._links.next_hops(at, target)
            link, at = hops[target % len(hops)]
            links.append(link)
        return Flow(1.0, tuple(links), (1.0,) * len(links))

    def _hashed(self, key: int, pair: int, source: int, target: int) -> tuple[int, ...]:
        at, links = source, []
        while at != target:
            hops = self._links.next_hops(at, target)
            choice = hashed(self._seed, key, pair, at) % len(hops)
            link, at = hops[choice]
            links.append(link)
        return tuple(links)

    def _divided(self, source: int, target: int) -> Flow:
        """By its first links, those between switches, which many pairs of nodes have in common, and its last links."""
        first = self._spread({source: 1.0}, target, switches=False)
        ends = self._links.switches_of(target)
        key = (tuple(first.arrived.items()), ends)
        middle = self._middles.get(key)
        if middle is None:
            middle = self._middles[key] = self._spread(first.arrived, target, switches=True)
        last = self._spread(middle.arrived, target, switches=False)
        parts = (first, middle, last)
        return Flow(1.0, sum((one.links for one in parts), ()), sum((one.shares for one in parts), ()))

    def _spread(self, shares: dict[int, float], target: int, *, switches: bool) -> _Part:
        """From vertices with so much of a transfer each over one link, or with `switches` to those at the target."""
        ends = self._links.switches_of(target)
        used: dict[int, float] = {}
        arrived: dict[int, float] = {}
        while shares:
            after: dict[int, float] = {}
            for at, share in shares.items():
                if switches and at in ends:
                    arrived[at] = arrived.get(at, 0.0) + share
                    continue
                hops = self._links.next_hops(at, target)
                for link, to in hops:
                    used[link] = used.get(link, 0.0) + share / len(hops)
                    after[to] = after.get(to, 0.0) + share / len(hops)
            shares = after if switches else {}
            if not switches:
                arrived = after
        return _Part(tuple(used), tuple(used.values()), arrived)


class _Part(NamedTuple):
    """Of a flow: links with its shares, and where it has arrived."""

    links: tuple[int, ...]
    shares: tuple[float, ...]
    arrived: dict[int, float]


def flow_key(transfer: Transfer) -> int:
    """What switches hash of a transfer: its connection with both ends, since many pairs of nodes use one number of a
    connection, or its own number."""
    if transfer.connection is None:
        return transfer.id
    return hashed(transfer.connection, transfer.source, transfer.target)


def hashed(*values: int) -> int:
    """Of small integers, the same everywhere (SplitMix64 by Steele et al. over each)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
