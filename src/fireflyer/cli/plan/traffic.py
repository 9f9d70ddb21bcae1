"""Traffic of `ff plan network`: the rates that nodes get, or when transfers end on a network that changes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.cli.plan.vertices import vertex_name, vertex_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fireflyer.netsim import LatencyName, LinkFailure, Pattern, Routing
    from fireflyer.topology.fabrics import Fabric
    from fireflyer.topology.traffic import Transfer

__all__ = ["Traffic", "TrafficOptions", "show_traffic"]

Traffic = Literal["ring", "shuffled-ring", "permutation", "incast", "storage-reads", "storage-writes"]

MAX_NODES: Final = 1 << 14
MAX_FAILURES: Final = 1024
MOST_PAIRS: Final = 8
"""That are named."""
_FAILURE = re.compile(r"(\D.*?)([0-9]{1,9})-(\D.*?)([0-9]{1,9})(?:@([0-9.]{1,12})(?:-([0-9.]{1,12}))?)?")
_LOST_PLANE = re.compile(r"([0-9]{1,9})(?:@([0-9.]{1,12})(?:-([0-9.]{1,12}))?)?")
STORAGE: Final = "storage"
TRAINING_LANE, STORAGE_LANE = 0, 1


_ACCESS: Final[Mapping[str, Literal["read", "write"]]] = {"storage-reads": "read", "storage-writes": "write"}


class TrafficOptions(NamedTuple):
    pattern: Traffic
    routing: Routing
    queue_pairs: int
    seed: int
    size: str
    """Of a transfer, as in 64MiB."""
    fail_links: tuple[str, ...] = ()
    lanes: str | None = None
    level_lanes: str | None = None
    """Lanes of training and of storage, as in 0:0."""
    back_pressure: bool = False
    window: int = 0
    replicas: int = 3
    fail_planes: tuple[str, ...] = ()
    latency: LatencyName | None = None
    proxy_us: float = 0.0
    """That a CPU proxy adds to each message."""
    nvlink_gb_per_s: float | None = None
    """Of a GPU, which forwards between planes over it; None: ports of a node are alike."""

    @property
    def simulated(self) -> bool:
        """To the end of all transfers, not their first rates alone."""
        timed = self.latency is not None or self.proxy_us > 0
        return self.fails or timed or self.lanes is not None or self.back_pressure or self.access is not None

    @property
    def fails(self) -> bool:
        return bool(self.fail_links or self.fail_planes)

    @property
    def access(self) -> Literal["read", "write"] | None:
        """Of storage; None: nodes send to each other."""
        return _ACCESS.get(self.pattern)


def show_traffic(fabric: Fabric, given: TrafficOptions) -> dict[str, Any]:
    """Raises `UsageError`."""
    _check_size(fabric, "nodes")
    if given.level_lanes is not None:
        _level_lanes(given.level_lanes)
        if given.lanes is None:
            raise UsageError("--level-lanes needs --lanes W:W, the weights of both lanes")
    if given.window and not given.back_pressure:
        raise UsageError("--window needs --back-pressure: fluid rates know no requests")
    if given.fails and given.back_pressure:
        raise UsageError("--fail-link and --fail-plane do not go together with --back-pressure; use one of them")
    if given.nvlink_gb_per_s is not None:
        fabric = _opened(fabric, given)
        _check_size(fabric, "GPUs and nodes with one port")
    if given.access is not None and given.lanes is not None:
        raise UsageError(f"--lanes adds reads to traffic between nodes; --traffic {given.pattern} has none")
    return _ends(fabric, given) if given.simulated else _rates(fabric, given)


def _check_size(fabric: Fabric, what: str) -> None:
    if fabric.nodes > MAX_NODES:
        raise UsageError(f"--traffic is for networks of up to {MAX_NODES} {what}; this one has {fabric.nodes}")


def _opened(fabric: Fabric, given: TrafficOptions) -> Fabric:
    """With the GPUs of its nodes. Raises `UsageError`."""
    from fireflyer.topology.fabrics import open_nodes

    if given.latency is not None:
        raise UsageError("--latency knows the switches of a network, not those of nodes; leave out --nvlink")
    kinds = [group.kind for group in fabric.groups if group.ports > 1 and group.kind != STORAGE]
    if not kinds:
        raise UsageError(f"--nvlink is of nodes with several ports, and {fabric.name} has none")
    return open_nodes(fabric, kinds, nvlink_bytes_per_s=(given.nvlink_gb_per_s or 0.0) * 1e9)


def _rates(fabric: Fabric, given: TrafficOptions) -> dict[str, Any]:
    """Of all nodes, with the rates of a transfer over that of a link."""
    from fireflyer.netsim import Settings, first_rates, pattern_transfers

    transfers = pattern_transfers(_pattern(given), range(fabric.nodes), 1, seed=given.seed)
    settings = Settings(routing=given.routing, queue_pairs=given.queue_pairs, seed=given.seed)
    shares = first_rates(fabric, transfers, settings) / fabric.link_bytes_per_s
    return {
        "pattern": given.pattern,
        "routing": given.routing,
        "transfers": len(transfers),
        "mean share of a link": round(float(shares.mean()), 4),
        "slowest share of a link": round(float(shares.min()), 4),
    }


def _ends(fabric: Fabric, given: TrafficOptions) -> dict[str, Any]:
    """When the transfers of each lane end."""
    from fireflyer.base.units import parse_bytes

    nbytes = parse_bytes(given.size)
    if not nbytes:
        raise UsageError("--size 0 leaves nothing to send; give 1 or more bytes")
    if given.access is not None and not _clients(fabric):
        raise UsageError(
            f"--traffic {given.pattern} is of nodes that read and write, and {fabric.name} has storage only"
        )
    weights = (1.0,) if given.lanes is None else _weights(given.lanes)
    transfers = _transfers(fabric, given, nbytes, reads=given.lanes is not None)
    finish_s, cut_off = _simulated(fabric, given, transfers, weights)
    shown: dict[str, Any] = {
        "pattern": given.pattern,
        "routing": given.routing,
        "model": "packets with back-pressure" if given.back_pressure else "fluid",
        "bytes of a transfer" if given.access is None else "bytes of a node": nbytes,
        "milliseconds alone on a link": nbytes / fabric.link_bytes_per_s * 1e3,
    }
    for lane in range(len(weights)):
        ends = [float(end) for one, end in zip(transfers, finish_s, strict=True) if one.lane == lane]
        shown["storage reads" if lane == STORAGE_LANE else "transfers"] = _summary(ends)
    if given.access is not None:
        shown["gigabytes per second of all nodes"] = _storage_rate(fabric, given.access, transfers, finish_s) / 1e9
    if given.fails:
        cut = [one for one in transfers if one.id in set(cut_off)]
        shown["cut off"] = len(cut)
        shown["cut off pairs"] = _pairs(fabric, cut)
    return shown


def _storage_rate(fabric: Fabric, access: str, transfers: Sequence[Transfer], finish_s: NDArray[Any]) -> float:
    """Bytes per second that nodes read, or send to be written, until all has ended that does; 0: nothing does."""
    clients = {node for node in range(fabric.nodes) if fabric.layer_of(node) != STORAGE}
    moved, last_s = 0, 0.0
    for one, end in zip(transfers, finish_s.tolist(), strict=True):
        if end < float("inf"):
            last_s = max(last_s, end)
            moved += one.nbytes if (one.target if access == "read" else one.source) in clients else 0
    return moved / last_s if moved else 0.0


def _pairs(fabric: Fabric, cut: Sequence[Transfer]) -> str:
    """Of nodes between which something was sent that never arrived, by kinds and numbers, the first few of them."""
    pairs = list(dict.fromkeys((one.source, one.target) for one in cut))
    words = [f"{vertex_name(fabric, source)} to {vertex_name(fabric, target)}" for source, target in pairs[:MOST_PAIRS]]
    if len(pairs) > MOST_PAIRS:
        words.append(f"{len(pairs) - MOST_PAIRS} more")
    return ", ".join(words) or "none"


def _summary(ends_s: Sequence[float]) -> dict[str, Any]:
    ended = [end for end in ends_s if end < float("inf")]
    return {
        "count": len(ends_s),
        "mean milliseconds": sum(ended) / len(ended) * 1e3 if ended else None,
        "last milliseconds": max(ended) * 1e3 if ended else None,
    }


def _transfers(fabric: Fabric, given: TrafficOptions, nbytes: int, *, reads: bool) -> list[Transfer]:
    """Of the pattern; with `reads` among nodes that are no storage, each of which also reads from a storage server."""
    from fireflyer.netsim import pattern_transfers
    from fireflyer.topology.traffic import Transfer

    kinds = [fabric.layer_of(node) for node in range(fabric.nodes)]
    servers = [node for node, kind in enumerate(kinds) if kind == STORAGE]
    others = [node for node, kind in enumerate(kinds) if kind != STORAGE]
    if given.access is not None:
        from fireflyer.planning.traffic import StorageLoad, storage_traffic

        load = StorageLoad(access=given.access, nbytes=nbytes, replicas=given.replicas)
        return storage_traffic(fabric, others, load, seed=given.seed)
    if not reads:
        return pattern_transfers(_pattern(given), range(fabric.nodes), nbytes, seed=given.seed)
    if not servers:
        raise UsageError(f'--lanes needs nodes of kind "{STORAGE}", and {fabric.name} has none')
    training = pattern_transfers(_pattern(given), others, nbytes, seed=given.seed)
    return training + [
        Transfer(
            id=len(training) + place,
            source=servers[place % len(servers)],
            target=node,
            nbytes=nbytes,
            lane=STORAGE_LANE,
        )
        for place, node in enumerate(others)
    ]


def _pattern(given: TrafficOptions) -> Pattern:
    if given.pattern == "storage-reads" or given.pattern == "storage-writes":
        raise UsageError(f"--traffic {given.pattern} is no traffic between all nodes")
    return given.pattern


def _clients(fabric: Fabric) -> int:
    return sum(group.count for group in fabric.groups if group.kind != STORAGE)


def _simulated(
    fabric: Fabric, given: TrafficOptions, transfers: Sequence[Transfer], weights: tuple[float, ...]
) -> tuple[NDArray[Any], tuple[int, ...]]:
    import msgspec

    from fireflyer.netsim import LATENCIES, BackPressure, Settings, simulate, simulate_back_pressure

    settings: Settings | BackPressure
    common = {"routing": given.routing, "queue_pairs": given.queue_pairs, "seed": given.seed, "lane_weights": weights}
    if given.level_lanes is not None:
        common["level_lanes"] = _level_lanes(given.level_lanes)
    settings = BackPressure(window=given.window) if given.back_pressure else Settings()
    settings = msgspec.structs.replace(settings, **common)
    if given.latency is not None:
        one = LATENCIES[given.latency]
        settings = msgspec.structs.replace(settings, message_latency_ns=one.message_ns, switch_latency_ns=one.switch_ns)
    proxy_ns = round(given.proxy_us * 1000)
    settings = msgspec.structs.replace(settings, message_latency_ns=settings.message_latency_ns + proxy_ns)
    if isinstance(settings, BackPressure):
        return simulate_back_pressure(fabric, transfers, settings).finish_s, ()
    failures = _failures(fabric, given.fail_links) + _lost_planes(fabric, given.fail_planes)
    run = simulate(fabric, transfers, settings, failures=failures)
    return run.finish_s, run.cut_off


def _weights(text: str) -> tuple[float, ...]:
    """Of lane 0, the training, and lane 1, the storage."""
    found = re.fullmatch(r"([0-9.]{1,9}):([0-9.]{1,9})", text)
    try:
        weights = tuple(float(one) for one in found.groups()) if found else ()
    except ValueError:
        weights = ()
    if len(weights) != 2 or not all(weight > 0 for weight in weights):
        raise UsageError(f"--lanes {text}: write two weights above 0, of training and of storage, as in 3:1")
    return weights


def _level_lanes(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"[01]:[01]", text) is None:
        raise UsageError(f"--level-lanes {text}: write the lanes of training and of storage, 0 or 1, as in 0:0")
    return tuple(int(lane) for lane in text.split(":"))


def _failures(fabric: Fabric, texts: Sequence[str]) -> list[LinkFailure]:
    from fireflyer.netsim import LinkFailure, Links

    if len(texts) > MAX_FAILURES:
        raise UsageError(f"{len(texts)} options --fail-link; use at most {MAX_FAILURES}")
    links = Links(fabric)
    found = []
    for text in texts:
        match = _FAILURE.fullmatch(text)
        if match is None:
            raise UsageError(f"--fail-link {text}: write two ends, and when in seconds, as in leaf0-spine3@0.5-2")
        low, low_number, high, high_number, begin, end = match.groups()
        option = f"--fail-link {text}"
        ends = vertex_number(fabric, option, low, low_number), vertex_number(fabric, option, high, high_number)
        between = links.between(*ends)
        if not between:
            raise UsageError(f"--fail-link {text}: no link joins {low}{low_number} and {high}{high_number}")
        at_ns, repaired_ns = _nanoseconds(text, begin or "0"), None if end is None else _nanoseconds(text, end)
        found += [LinkFailure(link=link, at_ns=at_ns, repaired_ns=repaired_ns) for link in between]
    return found


def _lost_planes(fabric: Fabric, texts: Sequence[str]) -> list[LinkFailure]:
    """All links between nodes, or their NICs, and a plane."""
    from fireflyer.netsim import LinkFailure, Links
    from fireflyer.topology.fabrics import planes_of

    planes, links = planes_of(fabric), Links(fabric)
    found = []
    for text in texts:
        match = _LOST_PLANE.fullmatch(text)
        if match is None:
            raise UsageError(f"--fail-plane {text}: write a number, and when in seconds, as in 0@0.5-2")
        number, begin, end = match.groups()
        if int(number) >= len(planes):
            raise UsageError(f"--fail-plane {text}: there is no plane {number}; {fabric.name} has {len(planes)}")
        option = "--fail-plane"
        at_ns = _nanoseconds(text, begin or "0", option)
        repaired_ns = None if end is None else _nanoseconds(text, end, option)
        switches = set(planes[int(number)])
        below = [vertex for vertex in range(fabric.nodes + fabric.switches) if vertex not in switches]
        ways = [hop.link for vertex in below for hop in links.hops[vertex] if hop.to in switches]
        found += [LinkFailure(link=link, at_ns=at_ns, repaired_ns=repaired_ns) for link in ways]
    return found


def _nanoseconds(text: str, seconds: str, option: str = "--fail-link") -> int:
    try:
        return round(float(seconds) * 1e9)
    except ValueError:
        raise UsageError(f"{option} {text}: {seconds} is no number of seconds") from None
