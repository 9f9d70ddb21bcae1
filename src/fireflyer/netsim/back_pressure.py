"""Packets in finite buffers that hold back their senders: head-of-line blocking, which fluid rates cannot show. Pure.

    run = simulate_back_pressure(fabric, transfers, BackPressure(routing="adaptive", window=1))
    run.finish_s, run.blocked_s

Each link has a buffer for each lane at its far end, and sends a packet only when it has room there: credits of
InfiniBand, or priority flow control that acts at once. Where an output is congested, waiting packets fill the buffers
of all links that lead to it, and other packets behind them wait, too. Nodes request transfers where `window` is set: a
target grants that many at a time (request-to-send, Fire-Flyer paper, VI-B3).

Shown beside a packet simulator are mean times of permutations, and that incast slows bystanders, more so with adaptive
routing than with ECMP, and not with a small window. Other figures are not claimed: congestion control, the delay of
credits, and reordering are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.native import PacketRun
from fireflyer.netsim.arrays import NO_ROUTE, Latency, Route, transfer_arrays
from fireflyer.netsim.links import Links
from fireflyer.netsim.routing import Router, Routing, flow_key
from fireflyer.netsim.simulate import check_lanes, lane_of
from fireflyer.topology.fabrics import Fabric
from fireflyer.topology.traffic import Transfer, check_transfers

__all__ = ["BackPressure", "BackPressureRun", "simulate_back_pressure"]

MAX_NODES: Final = 512
MAX_PACKETS: Final = 20_000_000
MAX_BUFFER_BYTES: Final = 1 << 30


class BackPressure(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a network with back-pressure. With `adaptive` routing each packet takes the link with the shortest
    queue."""

    routing: Routing = "ecmp"
    queue_pairs: int = 1
    seed: int = 0
    message_latency_ns: int = 1000
    """Latency before the first link, for a request, a grant and the transfer itself."""
    switch_latency_ns: int = 500
    packet_bytes: int = 4096
    buffer_bytes: int = 1 << 18
    """Buffer of each lane at the end of each link, bytes."""
    window: int = 0
    """Transfers that a target grants at a time; 0: all, without a request."""
    lane_weights: tuple[float, ...] = (1.0,)
    """Shares of a link for lanes that have packets, whatever the number of their transfers."""
    level_lanes: tuple[int, ...] = ()
    """Lane of each service level, as in `Settings`."""


class BackPressureRun(NamedTuple):
    """Result of a simulation. Arrays of the transfers are in their order; times in seconds from the beginning."""

    start_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    blocked_s: NDArray[np.float64]
    """Time for which each directed link had something to send, and no room for it at its end."""
    events: int

    @property
    def makespan_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))


def simulate_back_pressure(
    fabric: Fabric, transfers: Sequence[Transfer], settings: BackPressure | None = None
) -> BackPressureRun:
    """Raises `UsageError` as `simulate` does, for more than 512 nodes or 20 million packets, and where buffers wait for
    each other in a circle, which trees do not have."""
    given = settings or BackPressure()
    _check(fabric, transfers, given)
    links = Links(fabric)
    ends = np.array(links.ends, np.int64)
    engine = PacketRun(
        links.capacities,
        ends[:, 0].copy(),
        ends[:, 1].copy(),
        nodes=fabric.nodes,
        packet_bytes=given.packet_bytes,
        buffer_bytes=given.buffer_bytes,
        window=given.window,
        hop_s=given.switch_latency_ns / 1e9,
        lane_weights=list(given.lane_weights),
    )
    engine.add_transfers(*transfer_arrays(transfers, *_routes(links, engine, transfers, given)))
    engine.run()
    if not np.isfinite(engine.finish_s).all():
        raise UsageError(
            f"buffers of {fabric.name} wait for each other in a circle with {given.routing} routing; use a tree"
        )
    return BackPressureRun(engine.start_s, engine.finish_s, engine.blocked_s, engine.events)


def _check(fabric: Fabric, transfers: Sequence[Transfer], given: BackPressure) -> None:
    if fabric.nodes > MAX_NODES:
        raise UsageError(f"back-pressure is simulated for up to {MAX_NODES} nodes; {fabric.name} has {fabric.nodes}")
    check_transfers(transfers, fabric.nodes)
    check_lanes(transfers, given.lane_weights, given.level_lanes)
    if not 1 <= given.packet_bytes <= given.buffer_bytes <= MAX_BUFFER_BYTES:
        raise UsageError(
            f"packets of {given.packet_bytes} bytes, buffers of {given.buffer_bytes}; use 1 to {MAX_BUFFER_BYTES}, and "
            "a buffer for a packet at least"
        )
    if not 0 <= given.window <= MAX_NODES or given.message_latency_ns < 0 or given.switch_latency_ns < 0:
        raise UsageError(f"a window of {given.window}; use 0 to {MAX_NODES}, and latencies of 0 or more")
    packets = sum(-(-one.nbytes // given.packet_bytes) for one in transfers)
    if packets > MAX_PACKETS:
        raise UsageError(f"{packets} packets; use at most {MAX_PACKETS}: fewer bytes, or larger packets")


def _routes(
    links: Links, engine: PacketRun, transfers: Sequence[Transfer], given: BackPressure
) -> tuple[list[Route], list[int]]:
    """Routes of all transfers, and their latency in ns before the first packet, that of switches being in the run."""
    router = Router(links, given.routing, queue_pairs=given.queue_pairs, seed=given.seed)
    latency = Latency(links, message_ns=given.message_latency_ns, switch_ns=0)
    routes = []
    for one in transfers:
        flows = router.flows(flow_key(one), one.source, one.target)
        if not one.nbytes:
            routes.append(NO_ROUTE)
            continue
        paths = tuple(
            engine.add_path(np.array(flow.links, np.uint32), lane_of(one, given.level_lanes)) for flow in flows
        )
        routes.append(Route(paths, tuple(flow.share for flow in flows)))
    return routes, [latency.of(one) for one in transfers]
