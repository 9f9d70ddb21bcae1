"""Simulates transfers over a fabric to their end, at max-min fair rates between events. Pure.

    result = simulate(fabric, transfers, Settings(routing="ecmp", queue_pairs=4))
    result.finish_s, result.link_bytes

A fluid model: no packets, queues or acknowledgements. It is right where senders share links fairly and buffers do not
fill; it cannot show head-of-line blocking, incast with loss, or the start of a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.native import FlowRun
from fireflyer.netsim.arrays import NO_ROUTE, Latency, Route, transfer_arrays
from fireflyer.netsim.failures import LinkFailure, Outage, outages
from fireflyer.netsim.fair import Incidence
from fireflyer.netsim.limits import limiting_hops
from fireflyer.netsim.links import Links
from fireflyer.netsim.numpy_run import FlowEngine, NumpyFlowRun
from fireflyer.netsim.routing import Router, Routing, flow_key
from fireflyer.topology.fabrics import Fabric
from fireflyer.topology.traffic import Transfer, check_transfers

__all__ = ["Engine", "NetworkRun", "Settings", "check_lanes", "lane_of", "simulate"]

Engine = Literal["native", "numpy"]
MAX_LANES: Final = 16
ENGINES: Final[dict[Engine, Callable[[NDArray[np.float64]], FlowEngine]]] = {"native": FlowRun, "numpy": NumpyFlowRun}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a network. A flow of lane n has `lane_weights[n]`: on a full link it gets that many times what a flow
    of weight 1 gets which is limited there. Lanes of InfiniBand share by lane, not by flow: see the design note."""

    routing: Routing = "ecmp"
    queue_pairs: int = 1
    seed: int = 0
    message_latency_ns: int = 0
    """Latency of a message before the first link, ns."""
    switch_latency_ns: int = 0
    """Latency of the first byte through one switch, ns."""
    lane_weights: tuple[float, ...] = (1.0,)
    level_lanes: tuple[int, ...] = ()
    """The SL to VL map of a subnet manager: `lane` of a transfer is a service level, and this the lane of each level;
    (): level n has lane n."""
    reroute_ns: int = 0
    """Delay from a failure until routing avoids the link, and from a repair until routing uses it, ns; meanwhile flows
    over a link that has failed wait."""
    engine: Engine = "native"


class NetworkRun(NamedTuple):
    """Result of a simulation. Arrays are in the order of the transfers; times in seconds from the beginning."""

    start_s: NDArray[np.float64]
    """Infinite for what has not begun."""
    finish_s: NDArray[np.float64]
    """Infinite for what has not ended."""
    link_bytes: NDArray[np.float64]
    """Bytes over each directed link, numbered as in `Links`."""
    events: int
    cut_off: tuple[int, ...] = ()
    """Numbers of transfers that began and never ended: links that failed had left no path."""

    @property
    def makespan_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))


def simulate(
    fabric: Fabric,
    transfers: Sequence[Transfer],
    settings: Settings | None = None,
    *,
    capacities: NDArray[np.float64] | None = None,
    failures: Sequence[LinkFailure] = (),
) -> NetworkRun:
    """`capacities`: bytes per second of each directed link, by default those of the fabric: a degraded link has less.
    What failures cut off waits for a repair. Raises `UsageError` as `check_transfers` does, and where a node cannot
    reach another before any failure."""
    given = settings or Settings()
    check_transfers(transfers, fabric.nodes)
    check_lanes(transfers, given.lane_weights, given.level_lanes)
    links = Links(fabric)
    rates = links.capacities if capacities is None else capacities
    if rates.shape != links.capacities.shape or not (rates > 0).all() or not np.isfinite(rates).all():
        raise UsageError(f"capacities are one rate above 0 for each of the {len(links.ends)} directed links")
    moments = outages(failures, links, given.reroute_ns)
    run = _Run(links, ENGINES[given.engine](rates), transfers, given)
    run.begin(rates, reroutes=bool(moments))
    for moment in moments:
        run.change(moment)
    return run.to_end()


def lane_of(transfer: Transfer, level_lanes: Sequence[int]) -> int:
    """Virtual lane of a transfer by the map of service levels; () maps each to the lane of its number."""
    return level_lanes[transfer.lane] if level_lanes else transfer.lane


def check_lanes(transfers: Sequence[Transfer], weights: Sequence[float], level_lanes: Sequence[int] = ()) -> None:
    """Raises `UsageError` for weights that are none, a lane without a weight, or a service level without a lane."""
    if not 1 <= len(weights) <= MAX_LANES or not all(0 < weight < float("inf") for weight in weights):
        raise UsageError(f"lanes have the weights {weights}; use 1 to {MAX_LANES} numbers above 0")
    if level_lanes:
        _check_levels(transfers, weights, level_lanes)
        return
    beyond = next((one for one in transfers if one.lane >= len(weights)), None)
    if beyond is not None:
        raise UsageError(
            f"transfer {beyond.id} is on lane {beyond.lane}, and lanes 0 to {len(weights) - 1} have weights; "
            "add to `lane_weights`"
        )


def _check_levels(transfers: Sequence[Transfer], weights: Sequence[float], level_lanes: Sequence[int]) -> None:
    if len(level_lanes) > MAX_LANES or not all(0 <= lane < len(weights) for lane in level_lanes):
        raise UsageError(
            f"service levels have the lanes {tuple(level_lanes)}; give up to {MAX_LANES} of the lanes 0 to "
            f"{len(weights) - 1}, which have weights"
        )
    beyond = next((one for one in transfers if one.lane >= len(level_lanes)), None)
    if beyond is not None:
        raise UsageError(
            f"transfer {beyond.id} is of service level {beyond.lane}, and levels 0 to {len(level_lanes) - 1} have a "
            "lane; add to `level_lanes`"
        )


class _Run:
    """Gives routes to an engine."""

    def __init__(self, links: Links, engine: FlowEngine, transfers: Sequence[Transfer], settings: Settings) -> None:
        self._links, self._engine, self._transfers, self._settings = links, engine, transfers, settings
        self._paths: dict[tuple[tuple[int, ...], tuple[float, ...], float], int] = {}
        self._rows: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        """Links and shares of each path."""
        self._lane_weights: list[float] = []
        self._router = self._routed(links)
        self._known: dict[tuple[int, int, int, int], Route] = {}

    def begin(self, capacities: NDArray[np.float64], *, reroutes: bool) -> None:
        """`reroutes`: there will be calls of `change`. Without them all paths are known from the beginning, so that
        links that cannot limit any are left out; the engine in NumPy, as the twin of all this, gets every link."""
        settings = self._settings
        routes = [self._route(one) if one.nbytes else NO_ROUTE for one in self._transfers]
        latency = Latency(self._links, message_ns=settings.message_latency_ns, switch_ns=settings.switch_latency_ns)
        arrays = transfer_arrays(self._transfers, routes, [latency.of(one) for one in self._transfers])
        rows = Incidence.of(self._rows)
        counts = np.ones(len(rows.links), bool)
        if not reroutes and settings.engine == "native":
            counts = limiting_hops(rows, capacities)
        for path in range(len(self._rows)):
            hops = slice(rows.starts[path], rows.starts[path + 1])
            self._add_to_engine(path, rows.links[hops][counts[hops]], rows.weights[hops][counts[hops]])
        self._engine.add_transfers(*arrays)
        self._flow_starts = arrays.flow_starts

    def _add_to_engine(self, path: int, links: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
        """Paths have the numbers of their rows."""
        self._engine.add_path(links.astype(np.uint32), shares, self._lane_weights[path])

    def _routed(self, links: Links) -> Router:
        return Router(links, self._settings.routing, queue_pairs=self._settings.queue_pairs, seed=self._settings.seed)

    def _route(self, transfer: Transfer) -> Route:
        """Raises `UsageError` where no path is."""
        hashed_as = flow_key(transfer)
        key = (hashed_as, transfer.source, transfer.target, transfer.lane)
        found = self._known.get(key)
        if found is None:
            flows = self._router.flows(hashed_as, transfer.source, transfer.target)
            weight = self._settings.lane_weights[lane_of(transfer, self._settings.level_lanes)]
            numbers = tuple(self._path(flow.links, flow.weights, weight) for flow in flows)
            found = self._known[key] = Route(numbers, tuple(flow.share for flow in flows))
        return found

    def _path(self, links: tuple[int, ...], shares: tuple[float, ...], weight: float) -> int:
        found = self._paths.get((links, shares, weight))
        if found is None:
            found = self._paths[links, shares, weight] = len(self._rows)
            self._rows.append((links, shares))
            self._lane_weights.append(weight)
        return found

    def change(self, outage: Outage) -> None:
        """Runs to the time of the outage; then flows take the ways that are left."""
        self._engine.run_until(outage.at_ns / 1e9)
        self._router = self._routed(Links(self._links.fabric, outage.avoided))
        self._known = {}
        owners = np.searchsorted(self._flow_starts, self._engine.pending_flows(), side="right") - 1
        for place in np.unique(owners).tolist():
            before = len(self._rows)
            try:
                paths = self._route(self._transfers[place]).paths
            except UsageError:
                paths = (-1,) * self._router.flows_of_transfer
            for path in range(before, len(self._rows)):
                links, shares = self._rows[path]
                self._add_to_engine(path, np.array(links, np.int64), np.array(shares))
            for flow, path in enumerate(paths, int(self._flow_starts[place])):
                down = path < 0 or not outage.failed.isdisjoint(self._rows[path][0])
                self._engine.set_route(flow, -1 if down else path)

    def to_end(self) -> NetworkRun:
        run = self._engine
        run.run_until(float("inf"))
        start_s, finish_s = run.start_s, run.finish_s
        stuck = np.flatnonzero(np.isfinite(start_s) & ~np.isfinite(finish_s)).tolist()
        cut_off = tuple(self._transfers[place].id for place in stuck)
        link_bytes = Incidence.of(self._rows).loads(run.path_bytes, len(self._links.ends))
        return NetworkRun(start_s, finish_s, link_bytes, run.events, cut_off)
