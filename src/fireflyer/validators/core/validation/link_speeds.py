"""Links of nodes, each measured with several others: which node is slow, and which pair alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from fireflyer.validators.core.validation.records import MIN_PEERS, NORMAL_DEVIATIONS, Tolerance

__all__ = ["Pair", "SlowLink", "least_speed", "slow_links"]

Pair = tuple[str, str]
_BLAMED_SHARE: Final = 0.5


class SlowLink(NamedTuple):
    """`nodes`: one node, most of whose links are slow, or the two of a link that alone is."""

    nodes: tuple[str, ...]
    bytes_per_s: float
    """Median of its slow links."""
    usual_bytes_per_s: float
    """Of all links that were measured."""
    slow: int
    measured: int


def least_speed(speeds: Mapping[Pair, float], tolerance: Tolerance | None = None) -> float:
    """What is below it is slow: the usual speed without the share or the deviations of `tolerance`. 0: too few links to
    say."""
    limits = tolerance if tolerance is not None else Tolerance()
    if len(speeds) < MIN_PEERS:
        return 0.0
    usual, deviation = _usual(speeds)
    return usual - max(limits.share * usual, limits.deviations * deviation)


def slow_links(
    speeds: Mapping[Pair, float], tolerance: Tolerance | None = None, *, first: Mapping[Pair, float] | None = None
) -> Sequence[SlowLink]:
    """Nodes and pairs at fault, by name; `speeds`: bytes per second of the links below one leaf. A node is blamed for
    more than half of its links, of two or more: a bad cable slows all links of its node, and one link of each other
    node. `first`: the speeds that say what is usual, where some of `speeds` were measured again."""
    usual_of = first if first is not None else speeds
    least = least_speed(usual_of, tolerance)
    if not least:
        return []
    usual, _ = _usual(usual_of)
    slow = {pair: speed for pair, speed in speeds.items() if speed < least}
    found = []
    blamed = set()
    for node in _nodes(slow):
        own = [speed for pair, speed in slow.items() if node in pair]
        measured = sum(node in pair for pair in speeds)
        if len(own) > 1 and len(own) > _BLAMED_SHARE * measured:
            blamed.add(node)
            found.append(SlowLink((node,), statistics.median(own), usual, len(own), measured))
    for pair, speed in sorted(slow.items()):
        if not blamed.intersection(pair):
            found.append(SlowLink(pair, speed, usual, 1, 1))
    return found


def _usual(speeds: Mapping[Pair, float]) -> tuple[float, float]:
    """Speed and its standard deviation. One bad node of four has half of all links, so the median is taken of the
    nodes' medians; and slow links say nothing of noise, which is taken from those that are faster than usual."""
    medians = [statistics.median(speed for pair, speed in speeds.items() if node in pair) for node in _nodes(speeds)]
    usual = statistics.median(medians)
    above = [speed - usual for speed in speeds.values() if speed >= usual]
    return usual, NORMAL_DEVIATIONS * statistics.median(above) if above else 0.0


def _nodes(pairs: Iterable[Pair]) -> list[str]:
    return sorted({node for pair in pairs for node in pair})
