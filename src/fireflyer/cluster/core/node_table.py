"""The nodes of a gang: their states, and what leads from one to the next.

    DOWN ──StartSupervisor──> COMING ──SupervisorUp──> IDLE ──StartRanks──> BUSY ──StopRanks──> STOPPING
     ^                          │                      ^ │                  │ │                   │
     │                          │                      └─┼────RanksGone─────┘ │                   │
     │                          │                      └─┼────RanksGone───────┼───────────────────┘
     │                          v                        v                    v
     └──SupervisorGone, end of lease── KILLING <──KillNode── (lost, silent, too slow to stop)

IDLE to LEAVING by `ShutDownSupervisor` at the end of the job; LEAVING to DOWN by `SupervisorGone`.

Why no two attempts ever run beside each other on a node: ranks are started in IDLE only, and IDLE is entered only by
`RanksGone` (the supervisor saw the last process of the attempt end) or by `SupervisorUp` of a supervisor that was
started in DOWN, which is entered only by `SupervisorGone` (nothing that the previous supervisor started is left).
Numbers older than the current incarnation or attempt are ignored, so a message from the past cannot stand in for
either.

On other machines the proof may not arrive: the link is cut, the machine is off. A node there has a *lease*, which its
guard renews by asking; what the guard owns is killed when the lease ends, by its own clock. Renewals end with KILLING,
so `lease_ns` after the last one was granted, and a little more for the kill and for clocks that differ, the node is as
good as gone, and DOWN. The first lease is granted with SupervisorUp, before any command, and an older incarnation is
given no command.
"""

from __future__ import annotations

from collections.abc import Iterator

from fireflyer.base.units import SECOND, format_duration
from fireflyer.cluster.core.hosts import Hosts, lease_end_ns
from fireflyer.cluster.core.messages import (
    Effect,
    KillNode,
    ShutDownSupervisor,
    StartRanks,
    StartSupervisor,
    StopRanks,
)
from fireflyer.cluster.core.states import WATCHED, Node, NodeState
from fireflyer.cluster.schema.job import JobSpec
from fireflyer.cluster.schema.wire import Stop

__all__ = ["NodeTable"]

STOP_SLACK_NS = 2 * SECOND
"""A supervisor that has not stopped its ranks so long after their grace is killed."""
LEAVE_NS = 3 * SECOND


class NodeTable:
    """The nodes by number. Methods change states and return the effects that belong to the change."""

    def __init__(self, spec: JobSpec, hosts: Hosts) -> None:
        self.nodes = [Node(number, host=number) for number in range(spec.nodes)]
        self._spec = spec
        self._hosts = hosts

    def find(self, number: int, incarnation: int) -> Node | None:
        """None: a number that no node has, or an incarnation that is over."""
        known = 0 <= number < len(self.nodes) and self.nodes[number].incarnation == incarnation
        return self.nodes[number] if known else None

    def all_down(self) -> bool:
        return all(node.state is NodeState.DOWN for node in self.nodes)

    def gather(self, now_ns: int) -> Iterator[Effect]:
        """Brings nodes up on the members of the attempt: the nodes 0, 1, … in turn, and no others."""
        members = self._hosts.members()
        coming = any(node.state is NodeState.COMING for node in self.nodes)
        for node in self.nodes:
            surplus = node.number >= len(members) and not coming  # one that comes may be passed over, or be of use
            if node.state is NodeState.IDLE and (surplus or node.host not in members):
                yield self.leave(node, now_ns)
        taken = [node.host for node in self.nodes if node.state is not NodeState.DOWN]
        for node in self.nodes[: len(members)]:
            host = self._hosts.choose(node.host, taken) if node.state is NodeState.DOWN else None
            if host is not None:
                taken.append(host)
                yield self._start_supervisor(node, host, now_ns)

    def _start_supervisor(self, node: Node, host: int, now_ns: int) -> Effect:
        node.host = host
        node.incarnation += 1
        node.state = NodeState.COMING
        node.renewed_ns = None
        node.deadline_ns = now_ns + self._hosts.start_limit_ns(host)
        return StartSupervisor(node.number, node.incarnation, host)

    def assembled(self, size: int) -> bool:
        """The nodes 0 to `size` - 1 are up, and nobody else is."""
        up = [node for node in self.nodes if node.state is NodeState.IDLE]
        return up == self.nodes[:size] and all(node.state is NodeState.DOWN for node in self.nodes[size:])

    def past_last_call(self, now_ns: int) -> list[Node]:
        """Nodes that do not come, once there are as many as the job needs: it does not wait for them for ever."""
        if sum(node.state is NodeState.IDLE for node in self.nodes) < self._spec.least_nodes:
            return []
        last_ns = now_ns - self._spec.timeouts.last_call_ns
        coming = [node for node in self.nodes if node.state is NodeState.COMING]
        return [node for node in coming if node.deadline_ns - self._hosts.start_limit_ns(node.host) <= last_ns]

    def start_ranks(self, size: int, attempt: int) -> Iterator[Effect]:
        for node in self.nodes[:size]:
            node.state = NodeState.BUSY
            node.ends = {}
            yield StartRanks(node.number, node.incarnation, attempt)

    def stop_ranks(self, now_ns: int, stop: Stop) -> Iterator[Effect]:
        for node in self.nodes:
            if node.state is NodeState.BUSY:
                node.state = NodeState.STOPPING
                node.deadline_ns = now_ns + stop.settle_ns + stop.grace_ns + STOP_SLACK_NS
                yield StopRanks(node.number, node.incarnation, stop)

    def leave(self, node: Node, now_ns: int) -> Effect:
        node.state = NodeState.LEAVING
        node.deadline_ns = now_ns + LEAVE_NS
        return ShutDownSupervisor(node.number, node.incarnation)

    def kill(self, node: Node, now_ns: int) -> Effect:
        timeouts = self._spec.timeouts
        node.state = NodeState.KILLING
        node.deadline_ns = now_ns + timeouts.kill_ns
        if self._spec.hosts:
            node.deadline_ns = lease_end_ns(node, timeouts.lease_ns, now_ns)
        return KillNode(node.number, node.incarnation)

    def kill_all(self, now_ns: int) -> Iterator[Effect]:
        for node in self.nodes:
            if node.state not in (NodeState.DOWN, NodeState.KILLING):
                yield self.kill(node, now_ns)

    def dismiss(self, now_ns: int) -> Iterator[Effect]:
        """The job is over: no node is needed any more."""
        for node in self.nodes:
            if node.state is NodeState.IDLE:
                yield self.leave(node, now_ns)
            elif node.state is NodeState.COMING:
                yield self.kill(node, now_ns)

    def give_back(self, gap_ns: int) -> None:
        """The launcher slept: what it did not hear in this time is no fault of the nodes."""
        for node in self.nodes:
            node.seen_ns += gap_ns
            node.deadline_ns += gap_ns

    def loss(self, node: Node, now_ns: int) -> str | None:
        """Why the node counts as lost; None: it does not."""
        timeouts = self._spec.timeouts
        if node.state in WATCHED and now_ns - node.seen_ns >= timeouts.node_lost_ns:
            return f"no heartbeat from its supervisor for {format_duration(timeouts.node_lost_ns)}"
        if node.state is NodeState.COMING and now_ns >= node.deadline_ns:
            return f"its supervisor did not start within {format_duration(self._hosts.start_limit_ns(node.host))}"
        if node.state is NodeState.STOPPING and now_ns >= node.deadline_ns:
            return "its supervisor did not stop its ranks in time"
        return None
