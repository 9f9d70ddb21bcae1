"""How the health loop stands, counted from its records for metrics.

Names of checks come from nodes. A node that makes names up must not make series without end: only so many are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from fireflyer.base.health_event import Severity
from fireflyer.cluster.core.health.records import NodeHealth, RepairTicket

__all__ = ["MAX_CHECKS", "OTHER_CHECKS", "HealthFigures", "health_figures"]

MAX_CHECKS: Final = 64
OTHER_CHECKS: Final = "other"


class HealthFigures(NamedTuple):
    findings: dict[tuple[str, Severity], int]
    """Nodes, by check and severity: faults that are not settled, and warnings of which a person was told."""
    open_tickets: int
    oldest_ticket_ns: int
    """Cluster time when the oldest of them was opened; 0: there is none."""


def health_figures(nodes: Iterable[NodeHealth], tickets: Iterable[RepairTicket]) -> HealthFigures:
    found: Counter[tuple[str, Severity]] = Counter()
    for row in nodes:
        if row.fault is not None:
            found[row.fault.check, row.fault.severity] += 1
        for check in {one.check for one in row.warned}:
            found[check, "warn"] += 1
    opened = [ticket.opened_ns for ticket in tickets if ticket.closed_ns is None]
    return HealthFigures(_bounded(found), len(opened), min(opened, default=0))


def _bounded(found: Counter[tuple[str, Severity]]) -> dict[tuple[str, Severity], int]:
    """The checks of most nodes by name, the others together."""
    nodes: Counter[str] = Counter()
    for (check, _), count in found.items():
        nodes[check] += count
    named = set(sorted(nodes, key=lambda check: (-nodes[check], check))[:MAX_CHECKS])
    bounded: Counter[tuple[str, Severity]] = Counter()
    for (check, severity), count in found.items():
        bounded[check if check in named else OTHER_CHECKS, severity] += count
    return dict(bounded)
