"""Simulates transfers over a fabric to their end, at max-min fair rates between events. Pure.

    result = simulate(fabric, transfers, Settings(routing="ecmp", queue_pairs=4))
    result.finish_s, result.link_bytes

A fluid model: no packets, queues or acknowledgements. It is right where senders share links fairly and buffers do not
fill; it cannot show head-of-line blocking, incast with loss, or the start of a connection.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.netsim.fair import Incidence, max_min_rates
from fireflyer.netsim.links import Links
from fireflyer.netsim.routing import Router, Routing
from fireflyer.topology.fabrics import Fabric
from fireflyer.topology.traffic import Transfer, check_transfers

__all__ = ["NetworkRun", "Settings", "simulate"]

_DONE = 1e-6
"""Bytes that count as none: less than one, more than what rounding leaves."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`latency_ns`: of the first byte through one switch, and before its first link."""

    routing: Routing = "ecmp"
    queue_pairs: int = 1
    seed: int = 0
    message_latency_ns: int = 0
    switch_latency_ns: int = 0


class NetworkRun(NamedTuple):
    """What came out. Arrays are in the order of the transfers; times in seconds from the beginning."""

    start_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    link_bytes: NDArray[np.float64]
    """Over each directed link, numbered as in `Links`."""
    events: int

    @property
    def makespan_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))


def simulate(
    fabric: Fabric,
    transfers: Sequence[Transfer],
    settings: Settings | None = None,
    *,
    capacities: NDArray[np.float64] | None = None,
) -> NetworkRun:
    """`capacities`: bytes per second of each directed link, by default those of the fabric: a degraded link has less.
    Raises `UsageError` as `check_transfers` does, and where a node cannot reach another."""
    given = settings or Settings()
    check_transfers(transfers, fabric.nodes)
    if any(transfer.lane for transfer in transfers):
        raise UsageError("lanes other than 0 are not simulated yet; leave out `lane`")
    links = Links(fabric)
    rates = links.capacities if capacities is None else capacities
    if rates.shape != links.capacities.shape or not (rates > 0).all() or not np.isfinite(rates).all():
        raise UsageError(f"capacities are one rate above 0 for each of the {len(links.ends)} directed links")
    return _Run(links, rates, transfers, given).to_end()


class _Run:
    def __init__(
        self, links: Links, capacities: NDArray[np.float64], transfers: Sequence[Transfer], settings: Settings
    ) -> None:
        self._links, self._capacities = links, capacities
        self._router = Router(self._links, settings.routing, queue_pairs=settings.queue_pairs, seed=settings.seed)
        self._settings = settings
        self._transfers = transfers
        place_of = {transfer.id: place for place, transfer in enumerate(transfers)}
        self._waits = [len(set(transfer.after)) for transfer in transfers]
        self._followers: list[list[int]] = [[] for _ in transfers]
        for place, transfer in enumerate(transfers):
            for other in set(transfer.after):
                self._followers[place_of[other]].append(place)
        self._start_s = np.zeros(len(transfers))
        self._finish_s = np.zeros(len(transfers))
        self._open = [0] * len(transfers)  # flows of each transfer that still send
        self._starts: list[tuple[float, int]] = []
        self._flow_transfer: list[int] = []
        self._flow_rows: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        self._remaining = np.zeros(0)
        self._link_bytes = np.zeros(len(self._capacities))
        self._now_s = 0.0
        self._events = 0

    def to_end(self) -> NetworkRun:
        for place, waits in enumerate(self._waits):
            if waits == 0:
                self._begin(place)
        while self._starts or self._flow_rows:
            self._events += 1
            self._advance()
        return NetworkRun(self._start_s, self._finish_s, self._link_bytes, self._events)

    def _begin(self, place: int) -> None:
        """All that it waits for has arrived: its first byte arrives after the delays."""
        transfer = self._transfers[place]
        self._start_s[place] = self._now_s + transfer.delay_ns / 1e9
        hops = self._links.hop_count(transfer.source, transfer.target)
        if hops is None:
            raise UsageError(f"node {transfer.source} cannot reach node {transfer.target} in {self._links.fabric.name}")
        switches = max(0, hops - 1)
        latency_ns = self._settings.message_latency_ns + switches * self._settings.switch_latency_ns if hops else 0
        heapq.heappush(self._starts, (float(self._start_s[place]) + latency_ns / 1e9, place))

    def _advance(self) -> None:
        """To the next event: a transfer begins, or a flow ends."""
        if self._flow_rows:
            incidence = Incidence.of(self._flow_rows)
            rates = max_min_rates(self._capacities, incidence)
            lasts = float((self._remaining / rates).min())
            until_s = self._now_s + lasts
            if self._starts and self._starts[0][0] < until_s:
                until_s = self._starts[0][0]
                lasts = until_s - self._now_s
            moved = np.minimum(rates * lasts, self._remaining)
            self._remaining -= moved
            per_link = np.repeat(moved, np.diff(incidence.starts)) * incidence.weights
            self._link_bytes += np.bincount(incidence.links, per_link, minlength=len(self._link_bytes))
            self._now_s = until_s
            self._end_flows(rates)
        else:
            self._now_s = self._starts[0][0]
        while self._starts and self._starts[0][0] <= self._now_s:
            self._open_flows(heapq.heappop(self._starts)[1])

    def _open_flows(self, place: int) -> None:
        transfer = self._transfers[place]
        flows = self._router.flows(transfer.id, transfer.source, transfer.target) if transfer.nbytes else ()
        if not flows:
            self._finish(place)
            return
        self._open[place] = len(flows)
        for flow in flows:
            self._flow_transfer.append(place)
            self._flow_rows.append((flow.links, flow.weights))
        sizes = [transfer.nbytes * flow.share for flow in flows]
        self._remaining = np.concatenate((self._remaining, sizes))

    def _end_flows(self, rates: NDArray[np.float64]) -> None:
        """Flows that end within rounding of now end together."""
        ended = self._remaining <= np.maximum(_DONE, rates * self._now_s * 1e-15)
        if not ended.any():
            return
        places = [place for place, over in zip(self._flow_transfer, ended, strict=True) if over]
        keep = ~ended
        self._flow_transfer = [one for one, kept in zip(self._flow_transfer, keep, strict=True) if kept]
        self._flow_rows = [one for one, kept in zip(self._flow_rows, keep, strict=True) if kept]
        self._remaining = self._remaining[keep]
        for place in places:
            self._open[place] -= 1
            if self._open[place] == 0:
                self._finish(place)

    def _finish(self, place: int) -> None:
        self._finish_s[place] = self._now_s
        for follower in self._followers[place]:
            self._waits[follower] -= 1
            if self._waits[follower] == 0:
                self._begin(follower)
