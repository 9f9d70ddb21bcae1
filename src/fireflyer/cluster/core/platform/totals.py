"""How much node-time there was, was healthy, and was given to runs: the denominators of utilisation and goodput."""

from __future__ import annotations

from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import ClusterRow

__all__ = ["Totals"]


class Totals:
    """Sums since the cluster began: each stretch of time counts with the nodes at its beginning, also the stretch in
    which nobody led."""

    def __init__(self, state: ClusterRow) -> None:
        self._at_ns = state.totals_at_ns
        self._sums = [state.node_ns, state.healthy_ns, state.allocated_ns]
        self._counts: tuple[int, int, int] | None = None

    def pass_time(self, time_ns: int, nodes: int, healthy: int, allocated: int) -> None:
        """From now on there are so many."""
        counts = self._counts if self._counts is not None else (nodes, allocated, allocated)
        if time_ns > self._at_ns:
            self._sums = [
                value + count * (time_ns - self._at_ns) for value, count in zip(self._sums, counts, strict=True)
            ]
            self._at_ns = time_ns
        self._counts = (nodes, healthy, allocated)

    def put(self, ledger: Ledger) -> None:
        node_ns, healthy_ns, allocated_ns = self._sums
        ledger.put_totals(at_ns=self._at_ns, node_ns=node_ns, healthy_ns=healthy_ns, allocated_ns=allocated_ns)
