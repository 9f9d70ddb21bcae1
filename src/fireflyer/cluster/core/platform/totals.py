"""How much node-time there was, was healthy, and was given to runs: the denominators of utilisation and goodput."""

from __future__ import annotations

from typing import Final

from fireflyer.cluster.core.platform.store.history import ClusterTotals
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import ClusterRow

__all__ = ["Totals"]


LARGEST_NS: Final = 1 << 62
"""2,000 nodes reach it in 26 days. Then all sums are halved: their ratios stay, and they fit into 64 bits."""


class Totals:
    """Sums since the cluster began: each stretch of time counts with the nodes at its beginning, also the stretch in
    which nobody led."""

    def __init__(self, state: ClusterRow) -> None:
        self._at_ns = state.totals_at_ns
        self._sums = [state.node_ns, state.healthy_ns, state.allocated_ns]
        self.counts: tuple[int, int, int] | None = None
        """Nodes that are known, heard, and given to runs; None before anybody has counted."""

    def pass_time(self, time_ns: int, nodes: int, healthy: int, allocated: int) -> None:
        """From now on there are so many."""
        counts = self.counts if self.counts is not None else (nodes, allocated, allocated)
        if time_ns > self._at_ns:
            self._sums = [
                value + count * (time_ns - self._at_ns) for value, count in zip(self._sums, counts, strict=True)
            ]
            self._at_ns = time_ns
        self.counts = (nodes, healthy, allocated)

    def now(self, time_ns: int, productive_ns: int) -> ClusterTotals:
        """As if time passed until then."""
        counts = self.counts if self.counts is not None else (0, 0, 0)
        passed_ns = max(0, time_ns - self._at_ns)
        sums = [value + count * passed_ns for value, count in zip(self._sums, counts, strict=True)]
        node_ns, healthy_ns, allocated_ns = sums
        return ClusterTotals(self._at_ns + passed_ns, node_ns, healthy_ns, allocated_ns, productive_ns)

    def put(self, ledger: Ledger) -> None:
        if max(self._sums) > LARGEST_NS:
            self._sums = [value // 2 for value in self._sums]
            ledger.add_productive(ledger.draft_state.productive_ns // 2 - ledger.draft_state.productive_ns)
        node_ns, healthy_ns, allocated_ns = self._sums
        ledger.put_totals(at_ns=self._at_ns, node_ns=node_ns, healthy_ns=healthy_ns, allocated_ns=allocated_ns)
