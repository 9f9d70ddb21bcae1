"""Traffic of `ff plan network`: options of the command line, and what is printed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.cli.numbers import bytes_with_unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fireflyer.netsim import LatencyName, Routing
    from fireflyer.planning import LaneTimes, LinksFailure, NetworkTraffic, PlaneFailure, TrafficPattern, TrafficTimes
    from fireflyer.topology.fabrics import Fabric

__all__ = ["TrafficOptions", "show_traffic"]

MOST_PAIRS: Final = 8
"""That are named."""
_FAILURE = re.compile(r"(\D.*?[0-9]{1,9})-(\D.*?[0-9]{1,9})(?:@([0-9.]{1,12})(?:-([0-9.]{1,12}))?)?")
_LOST_PLANE = re.compile(r"([0-9]{1,9})(?:@([0-9.]{1,12})(?:-([0-9.]{1,12}))?)?")


class TrafficOptions(NamedTuple):
    pattern: TrafficPattern
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
    def fails(self) -> bool:
        return bool(self.fail_links or self.fail_planes)

    @property
    def nvlink_bytes_per_s(self) -> float | None:
        return None if self.nvlink_gb_per_s is None else self.nvlink_gb_per_s * 1e9

    @property
    def timed(self) -> bool:
        """An option is given for which transfers are simulated to their end."""
        others = (self.latency, self.proxy_us, self.lanes, self.level_lanes, self.back_pressure, self.window)
        return self.fails or any(others)


def show_traffic(fabric: Fabric, given: TrafficOptions) -> dict[str, Any]:
    """Raises `UsageError`."""
    if not given.timed and given.pattern != "storage-reads" and given.pattern != "storage-writes":
        from fireflyer.planning import traffic_rates

        rates = traffic_rates(
            fabric,
            given.pattern,
            routing=given.routing,
            queue_pairs=given.queue_pairs,
            seed=given.seed,
            nvlink_bytes_per_s=given.nvlink_bytes_per_s,
        )
        return {
            "pattern": given.pattern,
            "routing": given.routing,
            "transfers": rates.transfers,
            "mean share of a link": round(rates.mean_share, 4),
            "slowest share of a link": round(rates.slowest_share, 4),
        }
    from fireflyer.planning import simulate_traffic

    traffic = _traffic(given)
    return _times(given, traffic, simulate_traffic(fabric, traffic))


def _traffic(given: TrafficOptions) -> NetworkTraffic:
    from fireflyer.planning import NetworkTraffic

    return NetworkTraffic(
        pattern=given.pattern,
        nbytes=bytes_with_unit("--size", given.size),
        routing=given.routing,
        queue_pairs=given.queue_pairs,
        seed=given.seed,
        replicas=given.replicas,
        failures=(*_links(given.fail_links), *_planes(given.fail_planes)),
        lane_weights=None if given.lanes is None else _weights(given.lanes),
        level_lanes=None if given.level_lanes is None else _level_lanes(given.level_lanes),
        back_pressure=given.back_pressure,
        window=given.window,
        latency=given.latency,
        proxy_ns=round(given.proxy_us * 1000),
        nvlink_bytes_per_s=given.nvlink_bytes_per_s,
    )


def _times(given: TrafficOptions, traffic: NetworkTraffic, times: TrafficTimes) -> dict[str, Any]:
    of_storage = times.storage_bytes_per_s is not None
    shown: dict[str, Any] = {
        "pattern": given.pattern,
        "routing": given.routing,
        "model": "packets with back-pressure" if given.back_pressure else "fluid",
        "bytes of a node" if of_storage else "bytes of a transfer": traffic.nbytes,
        "milliseconds alone on a link": times.alone_s * 1e3,
    }
    shown |= {name: _lane(lane) for name, lane in zip(("transfers", "storage reads"), times.lanes, strict=False)}
    if times.storage_bytes_per_s is not None:
        shown["gigabytes per second of all nodes"] = times.storage_bytes_per_s / 1e9
    if given.fails:
        shown["cut off"] = len(times.cut_off)
        shown["cut off pairs"] = _pairs(times)
    return shown


def _lane(times: LaneTimes) -> dict[str, Any]:
    return {
        "count": times.transfers,
        "mean milliseconds": None if times.mean_s is None else times.mean_s * 1e3,
        "last milliseconds": None if times.last_s is None else times.last_s * 1e3,
    }


def _pairs(times: TrafficTimes) -> str:
    """The first few of them."""
    pairs = list(dict.fromkeys(times.cut_off))
    words = [f"{source} to {target}" for source, target in pairs[:MOST_PAIRS]]
    if len(pairs) > MOST_PAIRS:
        words.append(f"{len(pairs) - MOST_PAIRS} more")
    return ", ".join(words) or "none"


def _weights(text: str) -> tuple[float, float]:
    """Of lane 0, the training, and lane 1, the storage."""
    found = re.fullmatch(r"([0-9.]{1,9}):([0-9.]{1,9})", text)
    try:
        first, second = (float(one) for one in found.groups()) if found else (0.0, 0.0)
    except ValueError:
        first = second = 0.0
    if not (first > 0 and second > 0):
        raise UsageError(f"--lanes {text}: write two weights above 0, of training and of storage, as in 3:1")
    return first, second


def _level_lanes(text: str) -> tuple[int, int]:
    if re.fullmatch(r"[01]:[01]", text) is None:
        raise UsageError(f"--level-lanes {text}: write the lanes of training and of storage, 0 or 1, as in 0:0")
    return int(text[0]), int(text[2])


def _links(texts: tuple[str, ...]) -> Iterator[LinksFailure]:
    from fireflyer.planning import LinksFailure

    for text in texts:
        match = _FAILURE.fullmatch(text)
        if match is None:
            raise UsageError(f"--fail-link {text}: write two ends, and when in seconds, as in leaf0-spine3@0.5-2")
        low, high, begin, end = match.groups()
        at_ns, repaired_ns = _times_ns(f"--fail-link {text}", begin, end)
        yield LinksFailure(between=(low, high), at_ns=at_ns, repaired_ns=repaired_ns)


def _planes(texts: tuple[str, ...]) -> Iterator[PlaneFailure]:
    from fireflyer.planning import PlaneFailure

    for text in texts:
        match = _LOST_PLANE.fullmatch(text)
        if match is None:
            raise UsageError(f"--fail-plane {text}: write a number, and when in seconds, as in 0@0.5-2")
        number, begin, end = match.groups()
        at_ns, repaired_ns = _times_ns(f"--fail-plane {text}", begin, end)
        yield PlaneFailure(plane=int(number), at_ns=at_ns, repaired_ns=repaired_ns)


def _times_ns(option: str, begin: str | None, end: str | None) -> tuple[int, int | None]:
    """Of a failure and its repair, given in seconds or not at all."""
    found = []
    for seconds in (begin or "0", end):
        try:
            found.append(None if seconds is None else round(float(seconds) * 1e9))
        except ValueError:
            raise UsageError(f"{option}: {seconds} is no number of seconds") from None
    at_ns, repaired_ns = found
    return at_ns or 0, repaired_ns
