"""When nodes fail and when they are back. It does not depend on what runs: all policies meet the same failures."""

from __future__ import annotations

import heapq

import msgspec

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay.node_driver import Nodes, PlacedRun, RunEnd
from fireflyer.cluster.core.replay.streams import Stream

__all__ = ["FailAndRepair", "FailureSettings", "Failures"]

DAY_NS = 86400 * SECOND
HOUR_NS = 3600 * SECOND
_FAILED, _REPAIRED = range(2)


class FailureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """6.5 failures for 1,000 node-days (Kokolis et al. 2024, section III); 1.2 % of the nodes are *lemons* (section
    IV-A), whose rate is so many times that of the others that they meet 13 % of the jobs. Repair times are assumed."""

    per_1000_node_days: float = 6.5
    """Of all nodes together."""
    lemon_share: float = 0.012
    lemon_factor: float = 12.0
    repair_median_ns: int = 6 * HOUR_NS
    repair_sigma: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.per_1000_node_days <= 1_000_000:
            raise UsageError(f"per_1000_node_days must be between 0 and 1,000,000, not {self.per_1000_node_days}")
        if not 0 <= self.lemon_share <= 1 or self.lemon_factor < 1:
            raise UsageError("lemon_share must be between 0 and 1, and lemon_factor 1 or more")
        if self.repair_median_ns < SECOND or not 0 <= self.repair_sigma <= 5:
            raise UsageError("repair_median_ns must be a second or more, and repair_sigma between 0 and 5")


class Failures:
    """Of each node an endless row of failures and repairs."""

    def __init__(self, settings: FailureSettings, nodes: int, seed: int) -> None:
        self._settings = settings
        self._streams = [Stream(seed, 1_000_000 + node) for node in range(nodes)]
        lemon, share = settings.lemon_factor, settings.lemon_share
        rate = settings.per_1000_node_days / 1000 / DAY_NS / (1 + share * (lemon - 1))
        self._rates = [rate * (lemon if stream.uniform() < share else 1.0) for stream in self._streams]

    def next_failure_ns(self, node: int, from_ns: int) -> int | None:
        """Of a node that is well from then on. None where it never fails."""
        rate = self._rates[node]
        return None if rate <= 0 else from_ns + 1 + round(self._streams[node].exponential(1 / rate))

    def repaired_ns(self, node: int, failed_ns: int) -> int:
        drawn = self._streams[node].lognormal(self._settings.repair_median_ns, self._settings.repair_sigma)
        return failed_ns + SECOND + round(drawn)


class FailAndRepair:
    """A driver: a node that fails ends its run, takes no task while it is repaired, and is as good as before."""

    def __init__(self, failures: Failures, nodes: int) -> None:
        self._failures, self._count = failures, nodes
        self._agenda: list[tuple[int, int, int]] = []
        self._nodes: Nodes | None = None

    def begin(self, nodes: Nodes) -> None:
        self._nodes = nodes
        for node in range(self._count):
            self._plan_failure(node, 0)

    def next_ns(self) -> int | None:
        return self._agenda[0][0] if self._agenda else None

    def happen(self, now_ns: int) -> None:
        nodes = self._nodes
        if nodes is None:
            raise InvariantViolation("a driver of nodes was asked before it began")
        while self._agenda and self._agenda[0][0] <= now_ns:
            _, kind, node = heapq.heappop(self._agenda)
            if kind == _FAILED:
                heapq.heappush(self._agenda, (self._failures.repaired_ns(node, now_ns), _REPAIRED, node))
                nodes.close(now_ns, node)
                nodes.fail_run(now_ns, node)
            else:
                self._plan_failure(node, now_ns)
                nodes.open(now_ns, node)

    def started(self, now_ns: int, run: PlacedRun) -> None:
        pass

    def ended(self, now_ns: int, run: PlacedRun, end: RunEnd) -> None:
        pass

    def _plan_failure(self, node: int, from_ns: int) -> None:
        fails_ns = self._failures.next_failure_ns(node, from_ns)
        if fails_ns is not None:
            heapq.heappush(self._agenda, (fails_ns, _FAILED, node))
