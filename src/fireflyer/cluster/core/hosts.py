"""Which hosts take part in an attempt: what each has done so far decides.

A host whose node was lost has *failed*, one that the check of `--on-failure` found at fault is *suspect*, which counts
as a failure, too. One that failed twice is left out. One that does not come up is *absent*: it is passed over in this
attempt and tried again in the next.

The hosts are put in order when an attempt begins, and the first ones that are not passed over are its members: as many
as the job may have nodes, but suspects only where fewer than it must have are left without them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.states import Node
from fireflyer.cluster.schema.job import JobSpec

__all__ = ["LEASE_SLACK_NS", "MAX_HOST_FAILURES", "Hosts", "lease_end_ns"]

MAX_HOST_FAILURES = 2
"""A host that failed so often gets no node of this job any more."""
LEASE_SLACK_NS = 2 * SECOND
"""Beyond its lease a guard needs time to notice and to kill, and its clock may run slower than ours."""


class Hosts:
    """The hosts of a job by number. Without other machines: one for each node, and nothing is known of them."""

    def __init__(self, spec: JobSpec) -> None:
        count = len(spec.hosts) or spec.nodes
        self._spec = spec
        self._failures = [0] * count
        self._absences = [0] * count
        """How often in a row."""
        self._suspect = [False] * count
        self._passed_over = [False] * count
        self._order = list(range(count))

    def begin_attempt(self, nodes: Sequence[Node]) -> None:
        """Puts the hosts in order: those with fewer failures and absences first, then those that have a node."""
        used = [node.host for node in nodes]
        self._passed_over = [False] * len(self._order)
        self._order.sort(
            key=lambda host: (
                self._suspect[host],
                self._failures[host] + self._absences[host],
                host not in used,
                host,
            )
        )

    def failed(self, node: Node) -> None:
        """The host of the node is to blame for the end of an attempt."""
        if self._spec.hosts and node.renewed_ns is not None:
            self._failures[node.host] += 1

    def suspect(self, host: int) -> None:
        if self._spec.hosts:
            self._suspect[host] = True
            self._failures[host] += 1

    def absent(self, host: int) -> None:
        self._absences[host] += 1
        self._passed_over[host] = True

    def is_up(self, host: int) -> None:
        self._absences[host] = 0

    def members(self) -> tuple[int, ...]:
        """Hosts of this attempt, the best first; fewer than the job needs where there are no more."""
        there = [host for host in self._order if not self._left_out(host) and not self._passed_over[host]]
        sound = sum(not self._suspect[host] for host in there)
        return tuple(there[: min(self._spec.nodes, max(self._spec.least_nodes, sound))])

    def choose(self, own: int, taken: Collection[int]) -> int | None:
        """A member that has no node: the node's `own`, or the best. None: all have one."""
        free = [host for host in self.members() if host not in taken]
        return own if own in free else next(iter(free), None)

    def none_left(self, nodes: Sequence[Node]) -> str | None:
        """Why the job cannot go on, whatever comes back; None: it can."""
        spec, out = self._spec, self.left_out()
        left = len(self._order) - len(out)
        if left >= spec.least_nodes:
            return None
        names = ", ".join(out[:8]) + (", ..." if len(out) > 8 else "")
        if spec.elastic:
            return (
                f"{left} of {len(self._order)} hosts {'is' if left == 1 else 'are'} left, and the job needs "
                f"{spec.least_nodes} (--nodes {spec.least_nodes}:{spec.nodes}): {names} failed {MAX_HOST_FAILURES} "
                f"times{' each' if len(out) > 1 else ''}; repair what failed, or give more hosts"
            )
        node = next((node for node in nodes if self._left_out(node.host)), nodes[0])
        return (
            f"no host is left for node {node.number}: {spec.hosts[node.host]} failed {MAX_HOST_FAILURES} times and "
            "there is no spare; repair it, or give more hosts (--hosts, --spares)"
        )

    def left_out(self) -> tuple[str, ...]:
        """The hosts that failed too often."""
        return tuple(name for host, name in enumerate(self._spec.hosts) if self._left_out(host))

    def _left_out(self, host: int) -> bool:
        return self._failures[host] >= MAX_HOST_FAILURES


def lease_end_ns(node: Node, lease_ns: int, now_ns: int) -> int:
    """From when on nothing of the node can be left, though nobody has said so."""
    end_ns = now_ns if node.renewed_ns is None else max(now_ns, node.renewed_ns + lease_ns)
    return end_ns + LEASE_SLACK_NS
