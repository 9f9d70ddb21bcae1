"""Which hosts take part in an attempt: what each has done so far decides.

A host whose node was lost has *failed*, one that the check of `--on-failure` found at fault is *suspect*, which counts
as a failure, too. One that failed twice is left out. One that does not come up is *absent*: it is passed over in this
attempt and tried again in the next. A lost one of which nobody has said within its lease that nothing is left there is
*silent* until it comes up: it is waited for `SILENT_NS` more, and where the job has too few hosts then, it is left out.

The hosts are put in order when an attempt begins, and the first ones that are not passed over are its members: as many
as the job may have nodes, but suspects only where fewer than it must have are left without them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fireflyer.base.units import SECOND, format_duration
from fireflyer.cluster.core.states import Node
from fireflyer.cluster.schema.job import JobSpec

__all__ = ["LEASE_SLACK_NS", "MAX_HOST_FAILURES", "SILENT_NS", "Hosts", "lease_end_ns"]

MAX_HOST_FAILURES = 2
"""A host that failed so often gets no node of this job any more."""
SILENT_NS = 20 * SECOND
"""A host that was silent at the end of its lease has so long to come up again."""
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
        self._silent_ns: dict[int, int] = {}
        """Host that is silent: since when."""
        self._given_up: set[int] = set()
        """Silent hosts that are left out."""
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

    def silent(self, host: int, now_ns: int) -> None:
        """Its lease is over, and nobody has said what is left there."""
        self._silent_ns.setdefault(host, now_ns)

    def absent(self, host: int, now_ns: int) -> None:
        self._absences[host] += 1
        self._passed_over[host] = True
        waited_ns = now_ns - self._silent_ns.get(host, now_ns)
        if waited_ns >= SILENT_NS and len(self.members()) < self._spec.least_nodes:
            self._given_up.add(host)

    def is_up(self, host: int) -> None:
        self._absences[host] = 0
        self._silent_ns.pop(host, None)

    def start_limit_ns(self, host: int) -> int:
        """How long its supervisor may take to come up."""
        limit_ns = self._spec.timeouts.supervisor_start_ns
        return min(limit_ns, SILENT_NS) if host in self._silent_ns else limit_ns

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
        if spec.elastic:
            return (
                f"{left} of {len(self._order)} hosts {'is' if left == 1 else 'are'} left, and the job needs "
                f"{spec.least_nodes} (--nodes {spec.least_nodes}:{spec.nodes}): {self._why_left_out()}; repair what "
                "failed, or give more hosts"
            )
        node = next((node for node in nodes if self._left_out(node.host)), nodes[0])
        return (
            f"no host is left for node {node.number}: {spec.hosts[node.host]} {self._why(node.host)} and there is no "
            "spare; repair it, or give more hosts (--hosts, --spares)"
        )

    def left_out(self) -> tuple[str, ...]:
        """The hosts that failed too often, or are silent."""
        return tuple(name for host, name in enumerate(self._spec.hosts) if self._left_out(host))

    def _left_out(self, host: int) -> bool:
        return self._failures[host] >= MAX_HOST_FAILURES or host in self._given_up

    def _why(self, host: int) -> str:
        if host in self._given_up:
            return f"was lost, did not answer for {format_duration(SILENT_NS)} after its lease,"
        return f"failed {MAX_HOST_FAILURES} times"

    def _why_left_out(self) -> str:
        failed = [name for host, name in enumerate(self._spec.hosts) if self._failures[host] >= MAX_HOST_FAILURES]
        silent = [self._spec.hosts[host] for host in sorted(self._given_up)]
        each = " each" if len(failed) > 1 else ""
        said = [f"{_shown(failed)} failed {MAX_HOST_FAILURES} times{each}"] if failed else []
        if silent:
            said.append(f"{_shown(silent)} did not answer for {format_duration(SILENT_NS)} after the lease")
        return ", and ".join(said)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def lease_end_ns(node: Node, lease_ns: int, now_ns: int) -> int:
    """From when on nothing of the node can be left, though nobody has said so."""
    end_ns = now_ns if node.renewed_ns is None else max(now_ns, node.renewed_ns + lease_ns)
    return end_ns + LEASE_SLACK_NS
