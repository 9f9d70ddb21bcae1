"""What the validators of one node found, and the comparison with nodes of the same model."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from fireflyer.base.units import counted
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.paths import is_path

__all__ = [
    "AGREE",
    "HEALTHY_FLAGGED",
    "MAX_RECORDS",
    "MIN_PEERS",
    "MIN_PEERS_OF_PATHS",
    "NORMAL_DEVIATIONS",
    "Found",
    "NodeRecord",
    "Tolerance",
    "Usual",
    "as_written",
    "compare_digests",
    "compare_figures",
    "counted_value",
    "deviations_for",
    "figures_of_models",
    "is_decided",
    "low_findings",
    "peers_of",
    "usual_figures",
]

MAX_RECORDS: Final = 100_000
"""Of peers."""
MIN_PEERS: Final = 4
"""Fewer say nothing of what is usual."""
MIN_PEERS_OF_PATHS: Final = 16
"""A node has a hundred paths and more: with fewer peers only a figure near zero would stand out."""
HEALTHY_FLAGGED: Final = 0.01
"""Share of healthy nodes, at most, of which some figure is called too low by chance."""
NORMAL_DEVIATIONS: Final = 1.4826
"""Times the median absolute deviation is the standard deviation, where values are normally distributed."""
AGREE: Final = 2
"""Measurements of a figure that was low at first, which decide."""
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_Value = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_Values = Annotated[tuple[_Value, ...], msgspec.Meta(max_length=16)]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """By one validator."""

    validator: str
    figures: dict[str, float] = {}
    """What was measured; the larger the better. The end of a name is the unit."""
    measured: dict[str, tuple[float, ...]] = {}
    """All measurements of figures that were low at first; of these `figures` has the value that counts."""
    digests: dict[str, str] = {}
    """Of results that are the same bits on every node."""
    faults: tuple[Finding, ...] = ()
    could_not_run: str = ""
    words: str = ""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the file of records: of a node, or of a link, whose two nodes `node` names."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    node: Annotated[str, msgspec.Meta(min_length=1, max_length=160)]
    model: Annotated[str, msgspec.Meta(max_length=200)]
    """Nodes are compared with those of the same model."""
    seen_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    figures: Annotated[dict[_Name, _Value], msgspec.Meta(max_length=2048)] = {}
    """16 GPUs and 16 NUMA nodes have 1,248 paths."""
    digests: Annotated[dict[_Name, Annotated[str, msgspec.Meta(max_length=128)]], msgspec.Meta(max_length=256)] = {}
    repeated: Annotated[dict[_Name, _Values], msgspec.Meta(max_length=2048)] = {}
    """All measurements, in their order, of figures that were too low at first; of these `figures` has the value that
    counts."""
    fewer_gpus: bool = False
    """It had fewer GPUs than its peers, of which a warning was told: that it is meant so is not known."""


def as_written(record: NodeRecord) -> dict[str, Any]:
    """Without `repeated` and `fewer_gpus` where they say nothing: releases that do not know them refuse them."""
    written: dict[str, Any] = msgspec.to_builtins(record)
    for name in ("repeated", "fewer_gpus"):
        if not written[name]:
            del written[name]
    return written


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    deviations: float = 5.0
    """A figure is a fault that lies at least so many standard deviations below the median, estimated from the median
    absolute deviation, which a few slow peers do not move, more where `deviations_for` asks for more, ..."""
    share: float = 0.05
    """... and at least this share below it: peers that are nearly equal have nearly no deviation."""


class Usual(NamedTuple):
    """Of a figure, by its peers."""

    median: float
    deviation: float
    """Estimated standard deviation."""
    peers: int
    least: float
    """What is below it is too low."""


def peers_of(record: NodeRecord, records: Sequence[NodeRecord]) -> list[NodeRecord]:
    """The newest record of each other node of the same model."""
    newest: dict[str, NodeRecord] = {}
    for one in records:
        known = newest.get(one.node)
        if one.model == record.model and one.node != record.node and (known is None or one.seen_ns >= known.seen_ns):
            newest[one.node] = one
    return list(newest.values())


def deviations_for(figures: int, peers: int, healthy_flagged: float = HEALTHY_FLAGGED) -> float:
    """How many estimated deviations below the median of `peers` values (2 or more) one of `figures` must lie, so that
    at most the share `healthy_flagged` of healthy nodes has such a figure by chance: normal noise, bound of Bonferroni.
    The difference in estimated deviations has nearly Student's distribution, of few degrees of freedom: a median
    absolute deviation of n values says as much as a standard deviation of 0.37 n. An odd number counts as the even one
    below: one of its deviations is zero."""
    peers -= peers % 2
    correction = peers / (peers - 0.8) if peers > 9 else _SMALL_SAMPLES[max(0, peers - 2)]
    return correction * math.sqrt(1 + math.pi / (2 * peers)) * _student(0.37 * peers + 0.6, healthy_flagged / figures)


_SMALL_SAMPLES: Final = (1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107)
"""Of 2 to 9 values, by which the median absolute deviation is too small on average (Croux and Rousseeuw, 1992)."""
_STEPS: Final = 200


@functools.lru_cache(maxsize=1024)
def _student(freedom: float, beyond: float) -> float:
    """Which value of Student's distribution the share `beyond` exceeds."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2  # of the angle whose cotangent is the value, over the root of the freedom
    for _ in range(40):
        angle = (low + high) / 2
        step = angle / _STEPS
        share = scale * step * sum(math.sin((number + 0.5) * step) ** (freedom - 1) for number in range(_STEPS))
        low, high = (angle, high) if share < beyond else (low, angle)
    return math.sqrt(freedom) / math.tan(low)


def usual_figures(
    record: NodeRecord, peers: Sequence[NodeRecord], tolerance: Tolerance | None = None, *, figures: int = 0
) -> dict[str, Usual]:
    """Of each figure of `record` that enough peers have, by name. `peers`: one record of each node. `figures`: how many
    are compared of this node, where `record` has a part of them."""
    limits = tolerance if tolerance is not None else Tolerance()
    found = {}
    for name in sorted(record.figures):
        values = [peer.figures[name] for peer in peers if name in peer.figures]
        if len(values) < (MIN_PEERS_OF_PATHS if is_path(name) else MIN_PEERS):
            continue
        median = statistics.median(values)
        if median <= 0:
            continue
        deviation = NORMAL_DEVIATIONS * statistics.median(abs(one - median) for one in values)
        deviations = max(limits.deviations, deviations_for(max(figures, len(record.figures)), len(values)))
        least = median - max(limits.share * median, deviations * deviation)
        found[name] = Usual(median, deviation, len(values), least)
    return found


def compare_figures(
    record: NodeRecord, peers: Sequence[NodeRecord], tolerance: Tolerance | None = None, *, figures: int = 0,
    measured: Mapping[str, Sequence[float]] | None = None,
) -> Iterator[Finding]:  # fmt: skip
    """A finding for each figure that is too low: which, by how much, against how many peers. `peers`, `figures`: as for
    `usual_figures`; `measured`: as for `low_findings`."""
    return low_findings(record.figures, usual_figures(record, peers, tolerance, figures=figures), measured)


def low_findings(
    figures: Mapping[str, float], usual: Mapping[str, Usual], measured: Mapping[str, Sequence[float]] | None = None
) -> Iterator[Finding]:
    """`measured`: all measurements of figures that were low at first (`core.validation.repetition`): most of them
    decide; one on which they do not agree yet, or which is good after all, is a warning. None: each figure counts as it
    is."""
    for name, one in usual.items():
        values = (measured or {}).get(name, (figures[name],))
        low = [value for value in values if value < one.least]
        if not low:
            continue
        value = max(low)
        words = (
            f"{name} is {_rounded(value)}, {(one.median - value) / one.median:.1%} below the median of {one.peers} "
            f"peers, {_rounded(one.median)}"
        )
        words += f", {_rounded((one.median - value) / one.deviation)} deviations" if one.deviation else ""
        if len(values) > 1:
            words += f"; {len(low)} of {counted(len(values), 'measurement')} {'is' if len(low) == 1 else 'are'} too low"
        is_open = measured is not None and not is_decided(values, one.least)
        words += "; it could not be measured again" if is_open else ""
        is_fault = measured is None or len(low) >= AGREE
        yield Finding(severity="low" if is_fault else "warn", cause=name[:64], words=words)


def counted_value(values: Sequence[float]) -> float:
    """Of a figure's measurements: the median, the larger of two. It is low where most of them are, both of two."""
    return statistics.median_high(values)


def is_decided(values: Sequence[float], least: float) -> bool:
    """Of measurements of a figure that was low at first: enough of them agree."""
    low = sum(value < least for value in values)
    return max(low, len(values) - low) >= AGREE


def figures_of_models(records: Sequence[NodeRecord]) -> dict[str, set[str]]:
    """By model: names of figures that at least `MIN_PEERS` nodes have by their newest records."""
    newest: dict[tuple[str, str], NodeRecord] = {}
    for record in records:
        known = newest.get((record.model, record.node))
        if known is None or record.seen_ns >= known.seen_ns:
            newest[record.model, record.node] = record
    counts: dict[str, Counter[str]] = {}
    for (model, _), record in newest.items():
        counts.setdefault(model, Counter()).update(record.figures.keys())
    return {model: {name for name, nodes in names.items() if nodes >= MIN_PEERS} for model, names in counts.items()}


def compare_digests(record: NodeRecord, peers: Sequence[NodeRecord]) -> Iterator[Finding]:
    """A result that most peers have otherwise is silent corruption: the same computation gives the same bits
    everywhere. Where no result has a majority, nobody is blamed."""
    for name, digest in sorted(record.digests.items()):
        values = [peer.digests[name] for peer in peers if name in peer.digests]
        if len(values) < 2:
            continue
        usual, count = Counter(values).most_common(1)[0]
        if digest != usual and count * 2 > len(values):
            words = f"{name}: the result differs from that of {count} of {len(values)} peers"
            yield Finding(severity="high", cause="corruption", words=words, at_once=True)


def _rounded(value: float) -> str:
    """With three digits that count."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 12)}f}"
