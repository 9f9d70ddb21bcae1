"""What the primary hears: which nodes live, what their targets report, whom their neighbours cannot reach.

In memory only. A new primary knows nothing of it: it counts every node as heard at the moment when it begins, so that
it declares nobody dead for T, and every target as silent until its node has reported.

A node is *dead* when nothing was heard of it for T: its fence has ended (see `fence`). Its targets then count as gone,
as do those of a process that another one has replaced.

A *give-up order* asks one target of a chain to lay its role down. It is an invitation: the role is taken when the
target reports that it did. There is at most one order per chain and version, and none that would leave the chain
without a serving target that was heard lately. Reasons: the target is drained; or it and its neighbour in the chain
cannot reach each other: then it is the one of whose node more nodes complain, else the one behind. That one is not
synced again for a while: for `HOLD_OFF` T, or until another process of its node registers.

*What counts as a complaint.* A node is complained of because its path is broken, or because its process stood still or
has been replaced; the role is taken for the first alone. So a complaint counts only if

- who complains knows the routing since which the process of that node runs: it may have meant the one before;
- the node is not *excused*. A node of which nothing is heard for T / `QUIET` stands still, or is dead; it is excused
  until T after it was last heard, also when it is heard again before: who complained needs a moment to be answered.

A node is excused once in `HOLD_OFF` T, so for T of them at the most, whatever it does, and its hold-off ends by another
process just as often. A new primary knows of no excuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.schema.ids import ChainId, Incarnation, NodeId, RoutingVersion, TargetId
from fireflyer.fs.schema.manager import Condition, GiveUp, Heartbeat, TargetReport
from fireflyer.fs.schema.routing import Chain, Member, TargetState

__all__ = ["Health", "NodeHealth"]

HOLD_OFF: Final = 5
"""For so many T a target that gave up for a broken path is not synced again."""
QUIET: Final = 4
"""Of a node that was not heard for T divided by this, two heartbeats, it is thought that it stands still."""


@dataclass(slots=True)
class NodeHealth:
    incarnation: Incarnation
    heard_ns: int
    """When a heartbeat of this incarnation arrived, or when the manager began to count."""
    began_in: RoutingVersion = 0
    """The routing that was the first one with this incarnation."""
    known: RoutingVersion = 0
    """The routing that it had at its last heartbeat."""
    excused_until_ns: int = 0
    """Nobody is heard before who cannot reach it."""
    next_excuse_ns: int = 0
    """A silence that begins before is no excuse."""
    sequence: int = 0
    reports: dict[TargetId, TargetReport] = field(default_factory=dict)
    unreachable: tuple[NodeId, ...] = ()
    dead: bool = False


@dataclass(slots=True)
class _Order:
    give_up: GiveUp
    cut_off: bool
    """Its reason is a broken path."""
    incarnation: Incarnation
    """Of the process that is asked."""


class Health:
    def __init__(self, ledger: Ledger, now_ns: int) -> None:
        self._ledger = ledger
        self._failure_timeout_ns = ledger.state.failure_timeout_ns
        self._nodes: dict[NodeId, NodeHealth] = {}
        for node in ledger.nodes.committed.values():
            self._nodes[node.id] = NodeHealth(node.incarnation, now_ns)
        self._orders: dict[ChainId, _Order] = {}
        """The last one of each chain: of one version, no second target is asked."""
        self._held_until_ns: dict[TargetId, int] = {}

    # --- what happens ---

    def started(self, node: NodeId, incarnation: Incarnation, version: RoutingVersion, now_ns: int) -> None:
        """A node was added, or a new process of it has registered: committed, in this routing."""
        old = self._nodes.get(node)
        new = self._nodes[node] = NodeHealth(incarnation, now_ns, version)
        if old is None or old.incarnation == incarnation:
            return
        new.excused_until_ns, new.next_excuse_ns = old.excused_until_ns, old.next_excuse_ns
        held = [one for one in self._held_until_ns if self._node_of(one) == node]
        if held and now_ns >= new.next_excuse_ns:
            new.next_excuse_ns = now_ns + HOLD_OFF * self._failure_timeout_ns
            for target in held:
                del self._held_until_ns[target]

    def _node_of(self, target: TargetId) -> NodeId | None:
        row = self._ledger.targets.committed.get(target)
        return None if row is None else row.node

    def forget(self, node: NodeId) -> None:
        self._nodes.pop(node, None)

    def hear(self, heartbeat: Heartbeat, now_ns: int) -> list[ChainId]:
        """Takes it in; the caller has checked incarnation and sequence. The chains about which it says something
        new."""
        node = self._nodes[heartbeat.node]
        changed: dict[ChainId, None] = {}
        if node.dead:
            changed.update(dict.fromkeys(self._ledger.chains_of_node(heartbeat.node)))
        if self._is_excuse(node, now_ns):
            node.excused_until_ns = node.heard_ns + self._failure_timeout_ns
            node.next_excuse_ns = node.heard_ns + HOLD_OFF * self._failure_timeout_ns
        node.heard_ns, node.sequence, node.dead = now_ns, heartbeat.sequence, False
        node.known = heartbeat.known
        node.unreachable = heartbeat.unreachable
        before, node.reports = node.reports, {}
        for report in heartbeat.reports:
            row = self._ledger.targets.committed.get(report.target)
            if row is None or row.node != heartbeat.node:
                continue
            node.reports[report.target] = report
            chain = self._ledger.chain_of(report.target)
            if chain is not None and report.condition is Condition.GONE:
                self._hold(chain, report, node.incarnation, now_ns)
            if chain is not None and _said(before.get(report.target)) != _said(report):
                changed[chain] = None
        return list(changed)

    def _is_excuse(self, node: NodeHealth, now_ns: int) -> bool:
        """Its silence until now."""
        quiet = now_ns - node.heard_ns >= self._failure_timeout_ns // QUIET
        return quiet and node.heard_ns >= node.next_excuse_ns

    def _hold(self, chain: ChainId, report: TargetReport, incarnation: Incarnation, now_ns: int) -> None:
        """A target that has given up as it was asked to, for a broken path, shall not be synced over it at once."""
        order = self._orders.get(chain)
        if order is None or not order.cut_off or report.target in self._held_until_ns:
            return
        if order.incarnation != incarnation:
            return
        if (order.give_up.target, order.give_up.chain_version) == (report.target, report.chain_version):
            self._held_until_ns[report.target] = now_ns + HOLD_OFF * self._failure_timeout_ns

    def restart_clocks(self, slept_ns: int) -> None:
        """The manager's process stood still for so long: what was sent meanwhile is heard only now."""
        for node in self._nodes.values():
            node.heard_ns += slept_ns

    def sweep(self, now_ns: int) -> list[ChainId]:
        """Who has died by now. Chains with something to be decided about."""
        changed: dict[ChainId, None] = {}
        for node_id, node in self._nodes.items():
            if not node.dead and self.silent(node_id, now_ns):
                node.dead = True
                changed.update(dict.fromkeys(self._ledger.chains_of_node(node_id)))
        for target, until_ns in list(self._held_until_ns.items()):
            if now_ns >= until_ns:
                del self._held_until_ns[target]
                chain = self._ledger.chain_of(target)
                changed.update({} if chain is None else {chain: None})
        return list(changed)

    # --- what is known ---

    def get(self, node: NodeId) -> NodeHealth | None:
        return self._nodes.get(node)

    def silent_ns(self, node: NodeId, now_ns: int) -> int:
        known = self._nodes.get(node)
        return now_ns - known.heard_ns if known is not None else 0

    def silent(self, node: NodeId, now_ns: int) -> bool:
        """For so long that its fence has ended."""
        return self.silent_ns(node, now_ns) >= self._failure_timeout_ns

    def dead(self) -> list[NodeId]:
        """As of the last sweep, less those that were heard since."""
        return [node_id for node_id, node in self._nodes.items() if node.dead]

    def report(self, node: NodeId, target: TargetId) -> TargetReport | None:
        known = self._nodes.get(node)
        return known.reports.get(target) if known is not None else None

    def reports(self, chain: Chain, replaced: Mapping[NodeId, None]) -> dict[TargetId, TargetReport]:
        """For `chains.next_chain`. `replaced`: nodes whose processes are dead because others have registered."""
        found: dict[TargetId, TargetReport] = {}
        for member in chain.members:
            report = self._report(chain, member, replaced)
            if report is not None:
                found[member.target] = report
        return found

    def _report(self, chain: Chain, member: Member, replaced: Mapping[NodeId, None]) -> TargetReport | None:
        gone = TargetReport(member.target, Condition.GONE, chain.version)
        node = self._nodes.get(member.node)
        if node is None or node.dead or member.node in replaced:
            return gone
        if member.state not in (TargetState.SERVING, TargetState.LASTSRV) and self._unwanted(member.target):
            return gone
        return node.reports.get(member.target)

    def _unwanted(self, target: TargetId) -> bool:
        row = self._ledger.targets.get(target)
        return target in self._held_until_ns or (row is not None and row.drained)

    # --- orders ---

    def orders(self, node: NodeId, now_ns: int) -> tuple[GiveUp, ...]:
        """Which targets of this node are asked to give up."""
        found: list[GiveUp] = []
        for chain_id in self._ledger.chains_of_node(node):
            chain = self._ledger.chains.committed[chain_id]
            order = self._order(chain, now_ns)
            if order is not None and any(one.target == order.target and one.node == node for one in chain.members):
                found.append(order)
        return tuple(found)

    def _order(self, chain: Chain, now_ns: int) -> GiveUp | None:
        serving = [one for one in chain.members if one.state is TargetState.SERVING and self._lately(one.node, now_ns)]
        victim, reason = self._drained(serving), "drained"
        cut_off = victim is None
        if victim is None:
            victim, reason = self._cut_off(chain, serving, now_ns)
        if victim is None:
            return None
        standing = self._orders.get(chain.id)
        if standing is None or standing.give_up.chain_version != chain.version:
            give_up = GiveUp(victim.target, chain.id, chain.version, reason)
            standing = _Order(give_up, cut_off, self._nodes[victim.node].incarnation)
            self._orders[chain.id] = standing
        return standing.give_up if any(one.target != standing.give_up.target for one in serving) else None

    def _lately(self, node: NodeId, now_ns: int) -> bool:
        return node in self._nodes and self.silent_ns(node, now_ns) < self._failure_timeout_ns // 2

    def _drained(self, serving: list[Member]) -> Member | None:
        if len(serving) < 2:
            return None
        rows = ((one, self._ledger.targets.committed.get(one.target)) for one in serving)
        return next((one for one, row in rows if row is not None and row.drained), None)

    def _cut_off(self, chain: Chain, serving: list[Member], now_ns: int) -> tuple[Member | None, str]:
        line = [one for one in chain.members if one.state in (TargetState.SERVING, TargetState.SYNCING)]
        for left, right in pairwise(line):
            one_way = self._reports_unreachable(left.node, right.node, now_ns)
            if not one_way and not self._reports_unreachable(right.node, left.node, now_ns):
                continue
            votes_left, votes_right = self._votes(left.node, now_ns), self._votes(right.node, now_ns)
            victim, other = (left, right) if votes_left > votes_right else (right, left)
            if victim.state is TargetState.SERVING and not any(one is not victim for one in serving):
                victim, other = other, victim
            if victim.state is TargetState.SERVING and not any(one is not victim for one in serving):
                continue
            votes = f"{votes_left} and {votes_right} nodes complain of them"
            return victim, f"nodes {left.node} and {right.node} cannot reach each other, {votes}"
        return None, ""

    def _reports_unreachable(self, node: NodeId, of: NodeId, now_ns: int) -> bool:
        """And it counts."""
        known, other = self._nodes.get(node), self._nodes.get(of)
        if known is None or other is None or known.dead or of not in known.unreachable:
            return False
        excused = now_ns < other.excused_until_ns or self._is_excuse(other, now_ns)
        return known.known >= other.began_in and not excused

    def _votes(self, of: NodeId, now_ns: int) -> int:
        return sum(1 for node in self._nodes if self._reports_unreachable(node, of, now_ns))


def _said(report: TargetReport | None) -> tuple[object, ...]:
    return () if report is None else (report.condition, report.chain, report.chain_version, report.clean)
