"""Traffic that all nodes of a network begin at once: the rates that they get, or when their transfers end. Pure.

    traffic_rates(fabric, "permutation", queue_pairs=4).slowest_share
    lost = (PlaneFailure(plane=0), LinksFailure(between=("leaf0", "spine3"), at_ns=1_000_000))
    simulate_traffic(fabric, NetworkTraffic(pattern="permutation", failures=lost)).lanes[0].last_s

`netsim` simulates transfers; here are those of a planner who has a network and no program yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, cast, get_args

import msgspec
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB
from fireflyer.netsim import (
    LATENCIES,
    BackPressure,
    LatencyName,
    LinkFailure,
    Links,
    Pattern,
    Routing,
    Settings,
    first_rates,
    pattern_transfers,
    simulate,
    simulate_back_pressure,
)
from fireflyer.planning.traffic import STORAGE_KIND, StorageLoad, storage_traffic
from fireflyer.topology.fabrics import Fabric, open_nodes, planes_of, vertex_name, vertex_named
from fireflyer.topology.traffic import Transfer

__all__ = ["LaneTimes", "LinksFailure", "NetworkTraffic", "PlaneFailure", "TrafficPattern", "TrafficRates"]
__all__ += ["TrafficTimes", "simulate_traffic", "traffic_rates"]

TrafficPattern = Literal["ring", "shuffled-ring", "permutation", "incast", "storage-reads", "storage-writes"]

MAX_NODES: Final = 1 << 14
MAX_FAILURES: Final = 1024
STORAGE_LANE: Final = 1
_ACCESS: Final[dict[str, Literal["read", "write"]]] = {"storage-reads": "read", "storage-writes": "write"}


class LinksFailure(msgspec.Struct, frozen=True, kw_only=True):
    """All links between two vertices carry nothing from `at_ns` until `repaired_ns`; None: to the end."""

    between: tuple[str, str]
    """Names of the vertices, as `topology.fabrics.vertex_name` gives them: `("leaf0", "spine3")`."""
    at_ns: int = 0
    repaired_ns: int | None = None


class PlaneFailure(msgspec.Struct, frozen=True, kw_only=True):
    """All links between nodes, or the NICs of their GPUs, and a plane carry nothing from `at_ns` until `repaired_ns`;
    None: to the end."""

    plane: int
    """Number of the plane, from 0, in the order of `topology.fabrics.planes_of`."""
    at_ns: int = 0
    repaired_ns: int | None = None


class NetworkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic: what all nodes begin to send, read or write at once, and how the network carries it. Raises `UsageError`
    for values that do not go together."""

    pattern: TrafficPattern
    """Pattern between all nodes (`netsim.pattern_transfers`); or each node that is no storage reads a file from the
    storage nodes (`storage-reads`), or writes one to them (`storage-writes`)."""
    nbytes: int = 64 * MIB
    """Bytes of a transfer; with storage patterns, of the file of each node."""
    routing: Routing = "ecmp"
    queue_pairs: int = 1
    """Flows of a transfer under `ecmp`."""
    seed: int = 0
    """Seed of hashes and random orders."""
    replicas: int = 3
    """Replicas of a chunk on storage nodes."""
    failures: tuple[LinksFailure | PlaneFailure, ...] = ()
    lane_weights: tuple[float, float] | None = None
    """Weights of the lanes of training and of storage. With them each node that is no storage also reads `nbytes` from
    a storage node, on a lane of its own. None: one lane, no such reads."""
    level_lanes: tuple[int, int] | None = None
    """Lanes of training and of storage, 0 or 1, as a subnet manager maps service levels; None: (0, 1)."""
    back_pressure: bool = False
    """Packets in finite buffers instead of fluid rates: up to 512 nodes."""
    window: int = 0
    """Transfers that a target grants at a time, with `back_pressure`; 0: all."""
    latency: LatencyName | None = None
    """Latency of messages and switches, a name of `netsim.LATENCIES`; None: fluid rates have none, packets those of
    `netsim.BackPressure`."""
    proxy_ns: int = 0
    """Latency that a CPU proxy adds to each message, ns."""
    nvlink_bytes_per_s: float | None = None
    """NVLink bandwidth of a GPU: nodes with several ports are opened up into GPUs with a NIC each, which send over
    NVLink to other planes or rails. None: nodes send, over any of their ports."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("pattern", self.pattern, get_args(TrafficPattern)),
            ("routing", self.routing, get_args(Routing)),
            ("latency", self.latency, (*get_args(LatencyName), None)),
        ):
            if value not in known:
                raise UsageError(f"no {name} {value!r}; use {', '.join(map(str, known))}")
        if self.proxy_ns < 0:
            raise UsageError(f"a proxy adds {self.proxy_ns} ns to a message; give 0 or more ns")
        if self.nbytes < 1:
            raise UsageError(f"transfers of {self.nbytes} bytes leave nothing to send; give 1 or more bytes")
        if self.level_lanes is not None and self.lane_weights is None:
            raise UsageError("level lanes need the weights of both lanes, of training and of storage")
        if self.window and not self.back_pressure:
            raise UsageError("a window needs back-pressure: fluid rates know no requests")
        if self.failures and self.back_pressure:
            raise UsageError("links that fail and back-pressure do not go together; use one of them")
        if len(self.failures) > MAX_FAILURES:
            raise UsageError(f"{len(self.failures)} failures of links; use at most {MAX_FAILURES}")
        if self.pattern in _ACCESS and self.lane_weights is not None:
            raise UsageError(f"lanes add reads to traffic between nodes; {self.pattern} has none")


class TrafficRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of transfers while all of them send."""

    transfers: int
    mean_share: float
    """Mean rate of the transfers, over the rate of a link."""
    slowest_share: float
    """Rate of the slowest transfer, over the rate of a link: a ring is as fast as it."""


class LaneTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times at which transfers of a lane end, in seconds from the beginning. Those that never end count in `transfers`
    alone."""

    transfers: int
    mean_s: float | None
    """None: none ends."""
    last_s: float | None


class TrafficTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `simulate_traffic`."""

    alone_s: float
    """Time of `nbytes` over a link of their own, without latency, seconds."""
    lanes: tuple[LaneTimes, ...]
    """Times of the pattern; with `lane_weights` a second entry has those of the reads beside it."""
    storage_bytes_per_s: float | None
    """Bandwidth at which all nodes together read from storage or write to it, until their last transfer has ended;
    None: the pattern is none of storage."""
    cut_off: tuple[tuple[str, str], ...]
    """Source and target, by name, of each transfer that began and never ended: links that failed had left no path."""


def traffic_rates(
    fabric: Fabric,
    pattern: Pattern,
    *,
    routing: Routing = "ecmp",
    queue_pairs: int = 1,
    seed: int = 0,
    nvlink_bytes_per_s: float | None = None,
) -> TrafficRates:
    """Max-min fair rates of a pattern between all nodes; arguments as in `NetworkTraffic`. Raises `UsageError` for a
    network of over 16,384 nodes, and where a node cannot reach another."""
    fabric = _of_size(fabric, nvlink_bytes_per_s)
    transfers = pattern_transfers(pattern, range(fabric.nodes), 1, seed=seed)
    settings = Settings(routing=routing, queue_pairs=queue_pairs, seed=seed)
    shares = first_rates(fabric, transfers, settings) / fabric.link_bytes_per_s
    return TrafficRates(transfers=len(transfers), mean_share=float(shares.mean()), slowest_share=float(shares.min()))


def simulate_traffic(fabric: Fabric, traffic: NetworkTraffic) -> TrafficTimes:
    """Simulate all transfers to their end. Raises `UsageError` for a network of over 16,384 nodes, for vertices or
    planes that it has not, without storage nodes where the traffic needs them, and where a node cannot reach another
    although no link has failed."""
    if traffic.nvlink_bytes_per_s is not None and traffic.latency is not None:
        raise UsageError("a latency is of the switches of a network, not of those of nodes; leave out NVLink")
    fabric = _of_size(fabric, traffic.nvlink_bytes_per_s)
    transfers = _transfers(fabric, traffic)
    finish_s, cut_off = _run(fabric, traffic, transfers)
    lanes = []
    for lane in range(1 if traffic.lane_weights is None else 2):
        ends = [float(end) for one, end in zip(transfers, finish_s, strict=True) if one.lane == lane]
        lanes.append(_lane_times(ends))
    never = set(cut_off)
    pairs = [(one.source, one.target) for one in transfers if one.id in never]
    return TrafficTimes(
        alone_s=traffic.nbytes / fabric.link_bytes_per_s,
        lanes=tuple(lanes),
        storage_bytes_per_s=_storage_rate(fabric, traffic, transfers, finish_s),
        cut_off=tuple((vertex_name(fabric, source), vertex_name(fabric, target)) for source, target in pairs),
    )


def _of_size(fabric: Fabric, nvlink_bytes_per_s: float | None) -> Fabric:
    """The network, with the GPUs of its nodes where they have NVLink. Raises `UsageError`."""
    _check_size(fabric, "nodes")
    if nvlink_bytes_per_s is None:
        return fabric
    kinds = [group.kind for group in fabric.groups if group.ports > 1 and group.kind != STORAGE_KIND]
    if not kinds:
        raise UsageError(f"NVLink joins the ports of a node, and {fabric.name} has no nodes with several ports")
    opened = open_nodes(fabric, kinds, nvlink_bytes_per_s=nvlink_bytes_per_s)
    _check_size(opened, "GPUs and nodes with one port")
    return opened


def _check_size(fabric: Fabric, what: str) -> None:
    if fabric.nodes > MAX_NODES:
        raise UsageError(f"traffic is simulated for up to {MAX_NODES} {what}; {fabric.name} has {fabric.nodes}")


def _transfers(fabric: Fabric, traffic: NetworkTraffic) -> list[Transfer]:
    kinds = [group.kind for group in fabric.groups for _ in range(group.count)]
    servers = [node for node, kind in enumerate(kinds) if kind == STORAGE_KIND]
    others = [node for node, kind in enumerate(kinds) if kind != STORAGE_KIND]
    if traffic.pattern in _ACCESS:
        if not others:
            raise UsageError(f"{traffic.pattern} are of nodes that are no storage, and {fabric.name} has storage only")
        load = StorageLoad(access=_ACCESS[traffic.pattern], nbytes=traffic.nbytes, replicas=traffic.replicas)
        return storage_traffic(fabric, others, load, seed=traffic.seed)
    pattern = cast("Pattern", traffic.pattern)
    if traffic.lane_weights is None:
        return pattern_transfers(pattern, range(fabric.nodes), traffic.nbytes, seed=traffic.seed)
    if not servers:
        raise UsageError(f'lanes of training and storage need nodes of kind "{STORAGE_KIND}"; {fabric.name} has none')
    training = pattern_transfers(pattern, others, traffic.nbytes, seed=traffic.seed)
    reads = [
        Transfer(
            id=len(training) + place,
            source=servers[place % len(servers)],
            target=node,
            nbytes=traffic.nbytes,
            lane=STORAGE_LANE,
        )
        for place, node in enumerate(others)
    ]
    return training + reads


def _run(
    fabric: Fabric, traffic: NetworkTraffic, transfers: Sequence[Transfer]
) -> tuple[NDArray[Any], tuple[int, ...]]:
    """When each transfer ends, and the numbers of those that were cut off."""
    settings: Settings | BackPressure
    settings = BackPressure(window=traffic.window) if traffic.back_pressure else Settings()
    message_ns, switch_ns = settings.message_latency_ns, settings.switch_latency_ns
    if traffic.latency is not None:
        message_ns, switch_ns = LATENCIES[traffic.latency]
    settings = msgspec.structs.replace(
        settings,
        routing=traffic.routing,
        queue_pairs=traffic.queue_pairs,
        seed=traffic.seed,
        lane_weights=traffic.lane_weights or (1.0,),
        level_lanes=traffic.level_lanes or (),
        message_latency_ns=message_ns + traffic.proxy_ns,
        switch_latency_ns=switch_ns,
    )
    if isinstance(settings, BackPressure):
        return simulate_back_pressure(fabric, transfers, settings).finish_s, ()
    run = simulate(fabric, transfers, settings, failures=list(_link_failures(fabric, traffic.failures)))
    return run.finish_s, run.cut_off


def _link_failures(fabric: Fabric, failures: Sequence[LinksFailure | PlaneFailure]) -> Iterator[LinkFailure]:
    if not failures:
        return
    links, planes = Links(fabric), planes_of(fabric)
    for one in failures:
        if isinstance(one, LinksFailure):
            failed = _links_between(fabric, links, one)
        else:
            failed = _links_of_plane(fabric, links, planes, one.plane)
        for link in failed:
            yield LinkFailure(link=link, at_ns=one.at_ns, repaired_ns=one.repaired_ns)


def _links_between(fabric: Fabric, links: Links, failure: LinksFailure) -> list[int]:
    low, high = failure.between
    found = links.between(vertex_named(fabric, low), vertex_named(fabric, high))
    if not found:
        raise UsageError(f"no link joins {low} and {high}; name two vertices that a cable joins")
    return found


def _links_of_plane(fabric: Fabric, links: Links, planes: Sequence[Sequence[int]], plane: int) -> list[int]:
    if not 0 <= plane < len(planes):
        raise UsageError(f"there is no plane {plane}; {fabric.name} has {len(planes)}, numbered from 0")
    switches = set(planes[plane])
    below = [vertex for vertex in range(fabric.nodes + fabric.switches) if vertex not in switches]
    return [hop.link for vertex in below for hop in links.hops[vertex] if hop.to in switches]


def _lane_times(ends_s: Sequence[float]) -> LaneTimes:
    ended = [end for end in ends_s if end < float("inf")]
    return LaneTimes(
        transfers=len(ends_s),
        mean_s=sum(ended) / len(ended) if ended else None,
        last_s=max(ended) if ended else None,
    )


def _storage_rate(
    fabric: Fabric, traffic: NetworkTraffic, transfers: Sequence[Transfer], finish_s: NDArray[Any]
) -> float | None:
    access = _ACCESS.get(traffic.pattern)
    if access is None:
        return None
    kinds = [group.kind for group in fabric.groups for _ in range(group.count)]
    moved, last_s = 0, 0.0
    for one, end in zip(transfers, finish_s.tolist(), strict=True):
        if end < float("inf"):
            last_s = max(last_s, end)
            client = one.target if access == "read" else one.source  # replicas pass on what they were sent
            moved += one.nbytes if kinds[client] != STORAGE_KIND else 0
    return moved / last_s if moved else 0.0
