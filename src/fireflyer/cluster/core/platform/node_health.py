"""The health machine as a part of the leader: reports of nodes go in, its effects go into the draft.

Its records are rows, so what it decides and what follows from that is one transaction, and a draft that the store does
not take is decided again from what is committed. Reports that a draft was made of are acknowledged after its commit; a
report that comes again is not taken again, as the record of its node says what was.
"""

from __future__ import annotations

import msgspec

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cluster.core.health.findings import Finding, findings_of, is_fault, no_result
from fireflyer.cluster.core.health.machine import HealthMachine
from fireflyer.cluster.core.health.messages import (
    Effect,
    Event,
    Moved,
    Probed,
    Rebooted,
    Removed,
    Repaired,
    Reported,
    Requeue,
    ReturnAsked,
    RunFailed,
    Said,
    Tell,
    TimePassed,
)
from fireflyer.cluster.core.platform.commands import RecordRepair, ReturnNode
from fireflyer.cluster.core.platform.life.tasks import Tasks
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.store.history import NodeChange
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import Wish
from fireflyer.cluster.schema.sync import VALIDATION, HealthHeard, HealthOrder, HealthReport, Sync

__all__ = ["NodesHealth", "measured_words"]


class _Nodes:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def count(self) -> int:
        return len(self._ledger.nodes)

    def leaf_of(self, node: str, /) -> str:
        row = self._ledger.nodes.get(node)
        return f"{row.zone}/{row.leaf}" if row is not None and row.leaf else ""

    def group_of(self, node: str, /) -> str:
        row = self._ledger.nodes.get(node)
        return row.group if row is not None else ""

    def is_busy(self, node: str, /) -> bool:
        return self._ledger.places.get(node) is not None


def measured_words(fault: Finding) -> str:
    """What a validator has found, for the reason of a drain: `validation: cpu_gemm_flop_per_s is 80, ...`"""
    words = fault.words or fault.cause
    return f"{VALIDATION}: {words}" if fault.check == VALIDATION else f"{VALIDATION}: {fault.check}: {words}"


class NodesHealth:
    def __init__(self, ledger: Ledger, tasks: Tasks, settings: Settings) -> None:
        self._ledger, self._tasks = ledger, tasks
        self._checking = settings.checking
        self._policy = self._checking.now.policy
        self._machine = HealthMachine(self._policy, ledger, _Nodes(ledger))
        self._heard: dict[str, HealthHeard] = {}
        """Reports that are part of what is committed."""
        self._in_draft: dict[str, HealthHeard] = {}
        self.nodes: dict[str, None] = {}
        """Of which the scheduler must know more, or whose orders may have changed."""

    # --- what comes in ---

    def observe(self, node: str, sync: Sync, *, rebooted: bool) -> None:
        """What the node reports for the first time."""
        if self._order(node) is None:
            return
        if rebooted:
            self._feed(Rebooted(node))
        for report in sync.health:
            heard = self._in_draft.get(node) or self._taken(node)
            if heard is not None and (sync.incarnation, report.number) <= (heard.incarnation, heard.number):
                continue
            self._in_draft[node] = HealthHeard(sync.incarnation, report.number)
            self.nodes[node] = None
            self._report(node, report, self._in_draft[node])

    def _taken(self, node: str) -> HealthHeard | None:
        row = self._ledger.health.get(node)
        known = HealthHeard(*row.heard) if row is not None and row.heard != (0, 0) else None
        found = [one for one in (known, self._heard.get(node)) if one is not None]
        return max(found, key=lambda one: (one.incarnation, one.number), default=None)

    def _report(self, node: str, report: HealthReport, heard: HealthHeard) -> None:
        events = findings_of(report.lines, self._tasks.now_ns)
        if report.failure:
            events = (*events, no_result(report.failure, self._tasks.now_ns))
        before = self._ledger.health.get(node)
        asked = report.asked
        self._feed(Probed(node, report.probe, events, asked) if report.probe else Said(node, events, asked))
        row = self._ledger.health.get(node)
        if row is not None and row is not before:
            self._ledger.health.put(node, msgspec.structs.replace(row, heard=(heard.incarnation, heard.number)))

    def runs_failed(self) -> None:
        """Nodes of runs that failed are checked before they take another one. What a node has reported together with
        the end of its run is known by now."""
        keys = list(self._tasks.failed)
        self._tasks.failed.clear()
        for key in keys:
            places = [(name, self._ledger.places.get(name)) for name in self._ledger.runs.known(key).nodes]
            mine = (name for name, place in places if place is None or (place.task, place.run) == key)
            checked = tuple(name for name in mine if self._order(name) is not None)
            ended = self._ledger.runs.known(key).ended
            corrupt = set(ended.corrupt) if ended is not None else ()
            if checked:
                self._feed(RunFailed(checked, tuple(name for name in checked if name in corrupt)))

    def sweep(self) -> None:
        if self._checking.now.any_node():
            self._feed(TimePassed())

    def command(self, command: RecordRepair | ReturnNode, user: str) -> str:
        """Raises `NotFound`, `UsageError`."""
        if self._ledger.nodes.get(command.node) is None:
            raise NotFound(f"there is no node {command.node}")
        if self._order(command.node) is None:
            raise UsageError(
                f"node {command.node} is not checked; set [health] in the configuration of the managers"
                f"{', and its groups' if self._checking.now.groups else ''}"
            )
        match command:
            case RecordRepair(node, remedy, words):
                self._feed(Repaired(node, remedy, words, user))
                return f"{self._tested(node, f'after {remedy.value}')}, and returns when all required checks pass"
            case ReturnNode(node, words):
                self._feed(ReturnAsked(node, words, user))
                return f"{self._tested(node)}, and returns when all required checks pass"

    def _tested(self, node: str, after: str = "") -> str:
        row = self._ledger.health.get(node)
        when = "when its run has ended" if row is not None and row.test_asked else ""
        return " ".join(part for part in (f"node {node} is tested", after, when) if part)

    def reported(self, node: str, fault: Finding) -> str:
        """A fault of the check `VALIDATION`: what was measured has happened, and the validation of the node must pass
        before it returns. Empty: nothing validates the node, so its health cannot take it back. Raises `NotFound`,
        `UsageError`."""
        if self._ledger.nodes.get(node) is None:
            raise NotFound(f"there is no node {node}")
        if not is_fault(fault) or fault.could_not_run or fault.user_made:
            raise UsageError(f"{fault.check} of node {node} is no fault of the node; report what is low or high")
        order = self._order(node)
        if order is None or not order.validation:
            return ""
        words = measured_words(fault).removeprefix(f"{VALIDATION}: ")[:400]
        fault = msgspec.structs.replace(fault, check=VALIDATION, words=words, at_once=True, once=True)
        before = self._ledger.health.get(node)
        self._feed(Reported(node, fault))
        row = self._ledger.health.get(node)
        if row is None or row is before:
            state = row.state.value if row is not None else "healthy"
            return f"node {node} is {state} for another fault: nothing is changed"
        ticket = f"; ticket {row.ticket}" if row.ticket else ""
        return f"node {node} is {row.state.value}: {row.reason}{ticket}"

    def removed(self, node: str, user: str) -> None:
        self._feed(Removed(node, user))

    # --- what follows ---

    def _order(self, node: str) -> HealthOrder | None:
        """None: the node is not checked."""
        row = self._ledger.nodes.get(node)
        return self._checking.order_of(row.group) if row is not None else None

    def _feed(self, event: Event) -> None:
        now_ns = self._tasks.now_ns
        if self._policy is not self._checking.now.policy:
            self._policy = self._checking.now.policy
            self._machine = HealthMachine(self._policy, self._ledger, _Nodes(self._ledger))
        before = dict(self._ledger.health.changes())
        for effect in self._machine.handle(now_ns, event):
            self._follow(effect, now_ns)
        changes = self._ledger.health.changes()
        changed = (name for name, row in changes.items() if name not in before or before[name] is not row)
        self.nodes.update(dict.fromkeys(changed))

    def _follow(self, effect: Effect, now_ns: int) -> None:
        match effect:
            case Requeue(node, reason):
                place = self._ledger.places.get(node)
                if place is not None:
                    run = self._ledger.runs.known((place.task, place.run))
                    self._tasks.leave(run, "stop", Wish.NODE_FAULT, reason)
            case Moved(node, state, reason, fault, ticket):
                self._ledger.record(NodeChange(now_ns, node, state.value, reason, fault, ticket))
                self._ledger.changed("node", node, state.value)
                self._tasks.notes.append(f"node {node} is {state.value}" + (f": {reason}" if reason else ""))
            case Tell(node, words, fault):
                self._ledger.record(NodeChange(now_ns, node, "warned", words, fault))
                self._ledger.changed("node", node, "warned")
                self._tasks.notes.append(f"node {node}: {words}")

    # --- what nodes are told ---

    def order_of(self, node: str) -> HealthOrder | None:
        """Of what is committed."""
        node_row = self._ledger.nodes.committed.get(node)
        order = self._checking.order_of(node_row.group) if node_row is not None else None
        if order is None:
            return None
        row = self._ledger.health.committed.get(node)
        asked = row.asked if row is not None else None
        if row is not None and row.is_validated and self._ledger.places.committed.get(node) is not None:
            asked = None  # ranks are still being stopped there, or it was given a run while nodes were not checked
        number, check = asked if asked is not None else (0, "")
        heard = self._heard.get(node)
        version = self._checking.now.policy.version
        order = msgspec.structs.replace(order, probe=number, check=check, heard=heard, policy=version)
        if row is not None and row.unchecked is not None and not row.doubted:
            order = msgspec.structs.replace(order, validation=())  # minutes, in which the node would be idle
        return order

    # --- the draft ---

    def committed(self) -> None:
        self._heard.update(self._in_draft)
        self._in_draft.clear()
        self.nodes.clear()

    def rollback(self) -> None:
        self._in_draft.clear()
        self.nodes.clear()

    def forget(self, node: str) -> None:
        self._heard.pop(node, None)
