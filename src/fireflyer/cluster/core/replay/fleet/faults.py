"""Faults of every node over the whole time, from a seed, whatever runs and whatever is done about them.

*Kinds.* 70 % are what table VII of the Fire-Flyer paper (arXiv:2408.14158) counts of half a year: main memory, the
network, and Xids 63, 64, 79, 94 and 95, in its numbers; 15 % are errors of NVLink (Xid 74), which are over as soon as
they have ended a run; 15 % no check sees. Of network faults 30 % last (the rest are flash cuts, table VIII), of unseen
faults half, of all other kinds all. Xid 63 is seen before it ends a run. These shares, and all times, are assumed.

*A fault that lasts* ends runs on its node again and again, until a remedy cures it: the first of its cause's ladder
that is more than a test cures 80 % of them, the next one 15 %, the last one the others.

*A lemon* has faults of the same kinds, more often. No remedy but another node changes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fireflyer.base.health_event import Severity
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.health.remedies import Remedy, ladder_of
from fireflyer.cluster.core.replay.fleet.settings import DAY_NS, FleetSettings
from fireflyer.cluster.core.replay.streams import Stream, cumulated

__all__ = ["KINDS", "SEEN_SHARE", "Fault", "FaultKind", "Plan", "draw_plan", "faults_of_new_node", "finding_of"]


class FaultKind(NamedTuple):
    check: str
    """Empty: no check sees it."""
    cause: str
    severity: Severity
    weight: float
    lasts: float
    """Share of its faults that last."""
    warned: bool = False
    """It is seen before it ends a run."""
    at_once: bool = True


SEEN_SHARE: Final = 0.85
_COUNTED: Final = 0.70 / 292
KINDS: Final = (
    FaultKind("", "", "high", 0.15, 0.5),
    FaultKind("gpu_xid", "xid_74", "high", 0.15, 0.0),
    FaultKind("memory_errors", "uncorrected", "high", 54 * _COUNTED, 1.0),
    FaultKind("infiniband", "down", "high", 89 * _COUNTED, 0.3),
    FaultKind("gpu_xid", "xid_63", "low", 120 * _COUNTED, 1.0, warned=True, at_once=False),
    FaultKind("gpu_xid", "xid_64", "high", 1 * _COUNTED, 1.0),
    FaultKind("gpu_xid", "xid_79", "high", 15 * _COUNTED, 1.0),
    FaultKind("gpu_xid", "xid_94", "high", 7 * _COUNTED, 1.0),
    FaultKind("gpu_xid", "xid_95", "high", 6 * _COUNTED, 1.0),
)
FLAP: Final = FaultKind("gpu_temperature", "hot", "low", 0.0, 0.0, at_once=False)
_WEIGHTS: Final = cumulated([kind.weight for kind in KINDS])
_CURES: Final = (0.80, 0.15)
_SPREAD: Final = 1.0
"""Of lognormal times, in natural logarithms."""
_FAULTS, _FLAPS, _NEW_NODE = 2_000_000, 3_000_000, 4_000_000
"""Numbers of streams, beside that of the node."""
_LEMONS: Final = 6


class Fault(NamedTuple):
    """One fault, and what it would take."""

    at_ns: int
    """Its first sign."""
    kind: FaultKind
    part: str
    ends_runs: bool
    """Not so a flap."""
    warned_ns: int
    """From the first sign until it ends a run."""
    lasts: bool
    cured_by: Remedy
    report_share: float
    """When it is reported, as a share of the time between two checks."""
    noticed_ns: int
    """From the first run that it ended until a person takes the node out, where no check sees it."""
    again: int
    """Seed of the times after which it ends runs again."""


class Plan(NamedTuple):
    lemons: frozenset[int]
    faults: tuple[tuple[Fault, ...], ...]
    """Of each node, in the order of time."""


def draw_plan(settings: FleetSettings, seed: int) -> Plan:
    stream = Stream(seed, _LEMONS)
    order = sorted((stream.bits(), node) for node in range(settings.nodes))
    lemons = frozenset(node for _, node in order[: settings.lemons])
    faults = []
    for node in range(settings.nodes):
        per_day = settings.sound_per_day * (settings.lemon_factor if node in lemons else 1.0)
        faults.append(_drawn(settings, per_day, 0, Stream(seed, _FAULTS + node), Stream(seed, _FLAPS + node)))
    return Plan(lemons, tuple(faults))


def faults_of_new_node(settings: FleetSettings, seed: int, node: int, since_ns: int) -> tuple[Fault, ...]:
    """Of the one that takes the place of `node`."""
    stream = Stream(seed, _NEW_NODE + node)
    return _drawn(settings, settings.sound_per_day, since_ns, stream, Stream(stream.bits()))


def _drawn(settings: FleetSettings, per_day: float, since_ns: int, faults: Stream, flaps: Stream) -> tuple[Fault, ...]:
    found = [_fault(settings, at_ns, faults) for at_ns in _times(settings, per_day, since_ns, faults)]
    flaps_per_day = settings.flaps_per_1000_node_days / 1000
    found += [_flap(at_ns, flaps) for at_ns in _times(settings, flaps_per_day, since_ns, flaps)]
    return tuple(sorted(found, key=lambda fault: fault.at_ns))


def _times(settings: FleetSettings, per_day: float, since_ns: int, stream: Stream) -> list[int]:
    found: list[int] = []
    at_ns = since_ns
    while per_day > 0:
        at_ns += 1 + round(stream.exponential(DAY_NS / per_day))
        if at_ns >= settings.end_ns:
            break
        found.append(at_ns)
    return found


def _fault(settings: FleetSettings, at_ns: int, stream: Stream) -> Fault:
    kind = KINDS[stream.index(_WEIGHTS)]
    part = int(stream.uniform() * 8)
    lasts = stream.uniform() < kind.lasts
    warned_ns = round(stream.exponential(settings.warned_ns))
    return Fault(
        at_ns=at_ns,
        kind=kind,
        part=f"gpu:{part}" if kind.check == "gpu_xid" else f"{kind.check}:{part}",
        ends_runs=True,
        warned_ns=warned_ns if kind.warned else 0,
        lasts=lasts,
        cured_by=_cure(kind, stream.uniform()),
        report_share=stream.uniform(),
        noticed_ns=SECOND + round(stream.lognormal(settings.noticed_ns, _SPREAD)),
        again=stream.bits(),
    )


def _flap(at_ns: int, stream: Stream) -> Fault:
    part = int(stream.uniform() * 8)
    return Fault(at_ns, FLAP, f"gpu:{part}", False, 0, False, Remedy.TEST, stream.uniform(), SECOND, 0)


def _cure(kind: FaultKind, drawn: float) -> Remedy:
    ladder: Sequence[Remedy] = [remedy for remedy in ladder_of(finding_of(kind, "", 0)) if remedy is not Remedy.TEST]
    place = 0 if drawn < _CURES[0] else 1 if drawn < sum(_CURES) else 2
    return ladder[min(place, len(ladder) - 1)]


def finding_of(kind: FaultKind, part: str, now_ns: int) -> Finding:
    """What its check says. An unseen kind has none; its finding stands for what a person records."""
    return Finding(
        check=kind.check or "unseen", severity=kind.severity, part=part, cause=kind.cause, seen_ns=now_ns,
        at_once=kind.at_once,
    )  # fmt: skip
