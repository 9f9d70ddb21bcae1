"""Lemon nodes, week by week: incidents are counted, nodes proposed by `analytics.reliability.lemons`, and an operator
replaces those that are proposed twice, a week apart.

Incidents are what `ff reliability lemons` would count: what checks report of severity low or high, and runs of one node
that a fault ended. A run of several nodes that failed without a report blames none of them. Within an hour all is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from fireflyer.analytics.reliability.lemons import WINDOW_DAYS, LemonReport, NodeSignals, find_lemons
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.replay.fleet.health_loop import HealthLoop
from fireflyer.cluster.core.replay.fleet.nodes import ActiveFault, FleetNodes
from fireflyer.cluster.core.replay.fleet.settings import DAY_NS, HOUR_NS

__all__ = ["Detector", "Loop"]

WEEK_NS: Final = 7 * DAY_NS
WINDOW_NS: Final = WINDOW_DAYS * DAY_NS
_CLOSED: Final = "lemon"

Detector: TypeAlias = Callable[[Sequence[NodeSignals]], LemonReport]


class Loop:
    """Checks, repairs and lemon nodes: a `nodes.Watch`."""

    def __init__(self, policy: HealthPolicy | None = None, detector: Detector = find_lemons) -> None:
        self._policy, self._detector = policy or HealthPolicy(), detector
        self._proposed: frozenset[int] = frozenset()
        self._incidents: dict[int, list[int]] = {}
        """When each began, of the last `WINDOW_NS`."""
        self._last_ns: dict[int, int] = {}
        self._since_ns: dict[int, int] = {}
        self._leaves: dict[int, None] = {}
        self.accused: list[tuple[int, bool]] = []
        """Nodes that were replaced, then those that are proposed at the end; and whether they are lemons."""
        self.replaced = 0

    @property
    def drains(self) -> int:
        """By checks."""
        return self._health.drains

    def begin(self, fleet: FleetNodes) -> None:
        self._fleet, self._health = fleet, HealthLoop(fleet, self._policy)
        for at_ns in range(WEEK_NS, fleet.settings.end_ns, WEEK_NS):
            fleet.agenda.at(at_ns, self._weekly)
        fleet.agenda.at(fleet.settings.end_ns, self._last)

    def fault(self, now_ns: int, active: ActiveFault) -> None:
        reported_ns = self._health.fault(now_ns, active)
        self._fleet.agenda.at(reported_ns, partial(self._incident, active.node))

    def run_failed(self, now_ns: int, active: ActiveFault, nodes: Sequence[int]) -> None:
        self._health.run_failed(now_ns, nodes)
        if len(nodes) == 1 and not active.fault.kind.check:
            self._incident(active.node, now_ns)

    def _incident(self, node: int, now_ns: int) -> None:
        last_ns = self._last_ns.get(node)
        if last_ns is None or now_ns - last_ns > HOUR_NS:
            self._incidents.setdefault(node, []).append(now_ns)
        self._last_ns[node] = now_ns

    def _propose(self, now_ns: int) -> frozenset[int]:
        nodes = [node for node in range(self._fleet.settings.nodes) if node not in self._leaves]
        report = self._detector([self._signals(node, now_ns) for node in nodes])
        return frozenset(int(one.signals.node) for one in report.proposals)

    def _signals(self, node: int, now_ns: int) -> NodeSignals:
        since_ns = max(now_ns - WINDOW_NS, self._since_ns.get(node, 0))
        incidents = self._incidents.get(node, [])
        while incidents and incidents[0] < since_ns:
            incidents.pop(0)
        days = max(now_ns - since_ns, HOUR_NS) / DAY_NS
        return NodeSignals(node=str(node), days=days, incidents=len(incidents))

    def _weekly(self, now_ns: int) -> None:
        proposed = self._propose(now_ns)
        for node in sorted(proposed & self._proposed):
            self.accused.append((node, node in self._fleet.lemons))
            self._leaves[node] = None
            self.replaced += 1
            self._fleet.close(now_ns, node, _CLOSED)
            self._fleet.when_free(now_ns, node, partial(self._leaves_fleet, node))
        self._proposed = proposed

    def _last(self, now_ns: int) -> None:
        for node in sorted(self._propose(now_ns)):
            self.accused.append((node, node in self._fleet.lemons))

    def _leaves_fleet(self, node: int, now_ns: int) -> None:
        self._fleet.agenda.at(now_ns + self._fleet.repair_ns(Remedy.RMA), partial(self._replaced, node))

    def _replaced(self, node: int, now_ns: int) -> None:
        self._fleet.replace(now_ns, node)
        self._health.removed(now_ns, node)
        self._incidents.pop(node, None)
        self._last_ns.pop(node, None)
        self._since_ns[node] = now_ns
        self._leaves.pop(node, None)
        self._fleet.open(now_ns, node, _CLOSED)
