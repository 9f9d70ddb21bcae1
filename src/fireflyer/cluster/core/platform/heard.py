"""What this leader has heard of the nodes, and since when: kept in memory alone, on its own monotonic clock.

A new leader has heard nothing, and counts every silence from its own beginning, so it takes no node's lease for ended
too early: agents heard the leader before it until then at the latest.
"""

from __future__ import annotations

from dataclasses import dataclass

from fireflyer.cluster.core.platform.life.costs import RunCosts
from fireflyer.cluster.schema.sync import RunStatus, Sync

__all__ = ["Heard", "HeardNode"]


@dataclass(slots=True)
class HeardNode:
    sync: Sync
    at_ns: int


class Heard:
    def __init__(self, now_ns: int) -> None:
        self._since_ns = now_ns
        """Nothing that was silent before counts as silent for longer."""
        self._nodes: dict[str, HeardNode] = {}
        self.costs = RunCosts()
        self._lead_ends: dict[tuple[int, int], int] = {}
        """When the launchers of runs had ended for certain."""

    def hear(self, node: str, sync: Sync, now_ns: int, *, ended_after_ns: int) -> bool:
        """False for what was said before something that is known. An agent whose directory was lost may begin again
        with lower numbers; it is believed once the one before it has been silent for `ended_after_ns`."""
        known = self._nodes.get(node)
        if known is not None:
            before = known.sync
            older = (sync.incarnation, sync.sequence) <= (before.incarnation, before.sequence)
            if older and (sync.incarnation == before.incarnation or now_ns - known.at_ns < ended_after_ns):
                return False
        self._nodes[node] = HeardNode(sync, now_ns)
        return True

    def sync(self, node: str) -> Sync | None:
        known = self._nodes.get(node)
        return known.sync if known is not None else None

    def status(self, node: str, token: str) -> RunStatus | None:
        """Of a run, as the node last said."""
        sync = self.sync(node)
        return next((run for run in sync.runs if run.token == token), None) if sync is not None else None

    def silent_ns(self, node: str, now_ns: int) -> int:
        known = self._nodes.get(node)
        return now_ns - max(self._since_ns, known.at_ns if known is not None else self._since_ns)

    def ever(self, node: str) -> bool:
        return node in self._nodes

    def is_up(self, node: str, now_ns: int, lost_ns: int) -> bool:
        return node in self._nodes and self.silent_ns(node, now_ns) < lost_ns

    def forget(self, node: str) -> None:
        self._nodes.pop(node, None)

    def restart_clocks(self, now_ns: int) -> None:
        """This process stood still: silence counts from now."""
        self._since_ns = now_ns

    def lead_ended(self, run: tuple[int, int], now_ns: int) -> None:
        self._lead_ends.setdefault(run, now_ns)

    def since_lead_ended_ns(self, run: tuple[int, int], now_ns: int) -> int:
        return now_ns - self._lead_ends.setdefault(run, now_ns)

    def run_over(self, run: tuple[int, int]) -> None:
        self._lead_ends.pop(run, None)
        self.costs.forget(run)
