"""From the decision that a node is faulty until it takes tasks again: drain, ticket, remedy, test, probation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import msgspec

from fireflyer.base.errors import InvariantViolation
from fireflyer.base.units import counted, format_duration
from fireflyer.cluster.core.health.findings import Finding, covers, is_certain, is_fault
from fireflyer.cluster.core.health.messages import Effect, Moved, Requeue
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.health.records import (
    MAX_ACTIONS,
    MAX_FAULTS,
    MAX_PARTS,
    MAX_TICKETS,
    OUT,
    REMEDY_STATES,
    TAKES_TASKS,
    Action,
    Confirming,
    Fleet,
    Hold,
    NodeHealth,
    PartHistory,
    Records,
    RepairState,
    RepairTicket,
    part_key,
)
from fireflyer.cluster.core.health.remedies import Remedy, remedy_of

__all__ = ["BY_MACHINE", "Repairs", "fault_of", "fault_words"]

BY_MACHINE: Final = "health"


def fault_words(event: Finding) -> str:
    """One line."""
    cause = f" ({event.cause})" if event.cause else ""
    part = f" of {event.part}" if event.part else ""
    return f"{event.check}{cause}{part}" + (f": {event.words}" if event.words else "")


class Repairs:
    """Changes of records, and their effects into `effects`."""

    def __init__(self, policy: HealthPolicy, records: Records, fleet: Fleet, effects: list[Effect]) -> None:
        self._policy, self._records, self._fleet, self._effects = policy, records, fleet, effects
        self._counts: _Counts | None = None

    def put(self, record: NodeHealth) -> None:
        if self._counts is not None:
            self._counts.change(self._records.health.get(record.name), record)
        self._records.health.put(record.name, record)

    def move(self, record: NodeHealth, state: RepairState, reason: str, now_ns: int) -> NodeHealth:
        unchecked = record.unchecked if state in TAKES_TASKS else None
        record = msgspec.structs.replace(
            record, state=state, reason=reason, since_ns=now_ns, unchecked=unchecked,
            doubted=record.doubted and (unchecked is not None or state is RepairState.SUSPECT),
        )  # fmt: skip
        self.put(record)
        self._effects.append(Moved(record.name, state, reason, record.fault, record.ticket))
        return record

    # --- out ---

    def drain(self, record: NodeHealth, event: Finding, now_ns: int) -> NodeHealth:
        faults = self._count_fault(record.name, event, now_ns)
        remedy = remedy_of(event, faults)
        ticket = self._ticket(record, event, BY_MACHINE, now_ns)
        words = f"{fault_words(event)}; then {remedy.value}" + (f", fault {faults} of this part" if faults > 1 else "")
        self._act(ticket, Action(at_ns=now_ns, by=BY_MACHINE, what="drain", words=words[:400]))
        record = msgspec.structs.replace(
            record,
            fault=event,
            hold=Hold.NONE,
            confirming=None,
            ticket=ticket.id,
            taken=False,
            test_asked="",
            passed=(),
            failed=0,
        )
        record = self.move(record, RepairState.DRAINED, fault_words(event), now_ns)
        if event.severity == "high":
            self.requeue(record)
        return record

    def drain_for_test(self, record: NodeHealth, event: Finding, now_ns: int) -> None:
        """Only a test that fails, too, makes it a fault of its part; until then it requeues nothing, either."""
        ticket, why = self._ticket(record, event, BY_MACHINE, now_ns), fault_words(event)
        self._act(ticket, Action(at_ns=now_ns, by=BY_MACHINE, what="drain", words=f"{why}; then test"[:400]))
        record = msgspec.structs.replace(
            record, fault=event, hold=Hold.NONE, ticket=ticket.id, taken=False, test_asked=why, passed=(), failed=0
        )
        self.move(record, RepairState.DRAINED, f"{why}; it is tested before that counts", now_ns)

    def requeue(self, record: NodeHealth) -> None:
        if self._fleet.is_busy(record.name):
            self._effects.append(Requeue(record.name, f"{record.name} is faulty: {record.reason}"))

    def _count_fault(self, node: str, event: Finding, now_ns: int) -> int:
        """How often the part failed within the policy's time, now included."""
        key, parts = part_key(node, event), self._records.parts
        known = parts.get(key) or PartHistory(key=key, part=event.part, node=node)
        within = (at_ns for at_ns in known.faults_ns if now_ns - at_ns < self._policy.repeat_window_ns)
        faults_ns = (*within, now_ns)[-MAX_FAULTS:]
        parts.put(key, PartHistory(key=key, part=event.part, node=node, faults_ns=faults_ns))
        if len(faults_ns) == 1:
            self._forget_parts()
        return len(faults_ns)

    def _faults(self, node: str, event: Finding, now_ns: int) -> int:
        known = self._records.parts.get(part_key(node, event))
        since_ns = now_ns - self._policy.repeat_window_ns
        return sum(1 for at_ns in known.faults_ns if at_ns > since_ns) if known is not None else 0

    def _forget_parts(self) -> None:
        known = [(row.faults_ns[-1] if row.faults_ns else 0, key) for key, row in self._records.parts.rows()]
        for _, key in sorted(known)[: max(0, len(known) - MAX_PARTS)]:
            self._records.parts.put(key, None)

    def vacated(self, record: NodeHealth, now_ns: int) -> None:
        """No run is left on a node that is drained: its remedy is due."""
        self._due(record, "", now_ns)

    def remedy(self, record: NodeHealth, now_ns: int) -> Remedy:
        """Of a node that is out."""
        event = fault_of(record)
        return remedy_of(event, self._faults(record.name, event, now_ns))

    def _due(self, record: NodeHealth, why: str, now_ns: int) -> None:
        event, remedy = fault_of(record), self.remedy(record, now_ns)
        if remedy is Remedy.TEST:
            self.test(record, now_ns, why or fault_words(event))
            return
        words = f"{why or fault_words(event)}; {remedy.value} is due"
        self.move(record, REMEDY_STATES[remedy], words, now_ns)

    # --- tickets ---

    def _ticket(self, record: NodeHealth, event: Finding, by: str, now_ns: int) -> RepairTicket:
        """The one of this repair, where that is not settled yet."""
        tickets = self._records.tickets
        known = tickets.get(record.ticket)
        if known is not None and known.closed_ns is None:
            return known
        number = 1 + max((key for key, _ in tickets.rows()), default=0)
        ticket = RepairTicket(id=number, node=record.name, fault=event, opened_ns=now_ns, opened_by=by)
        tickets.put(number, ticket)
        closed = sorted(key for key, row in tickets.rows() if row.closed_ns is not None)
        for key in closed[: max(0, len(closed) - MAX_TICKETS)]:
            tickets.put(key, None)
        return ticket

    def _act(self, ticket: RepairTicket, action: Action) -> None:
        """The newest actions are kept."""
        actions = (*ticket.actions, action)[-MAX_ACTIONS:]
        self._records.tickets.put(ticket.id, msgspec.structs.replace(ticket, actions=actions))

    def note(self, record: NodeHealth, by: str, what: str, words: str, now_ns: int) -> None:
        ticket = self._records.tickets.get(record.ticket)
        if ticket is not None and ticket.closed_ns is None:
            self._act(ticket, Action(at_ns=now_ns, by=by, what=what, words=words[:400]))

    def asked(self, record: NodeHealth, by: str, what: str, words: str, now_ns: int) -> NodeHealth:
        """A person takes the repair over: the breaker counts the node no longer."""
        ticket = self._ticket(record, fault_of(record), by, now_ns)
        self._act(ticket, Action(at_ns=now_ns, by=by, what=what, words=words[:400]))
        return msgspec.structs.replace(record, ticket=ticket.id, taken=True)

    def close(self, record: NodeHealth, by: str, words: str, now_ns: int) -> None:
        self.note(record, by, "close", words, now_ns)
        ticket = self._records.tickets.get(record.ticket)
        if ticket is not None and ticket.closed_ns is None:
            self._records.tickets.put(ticket.id, msgspec.structs.replace(ticket, closed_ns=now_ns, closed_by=by))

    # --- repair, test, return ---

    def repaired(self, record: NodeHealth, remedy: Remedy, words: str, by: str, now_ns: int) -> None:
        if by == BY_MACHINE:
            self.note(record, by, remedy.value, words, now_ns)
        else:
            record = self.asked(record, by, remedy.value, words, now_ns)
        event = record.fault
        if remedy is Remedy.RMA and event is not None and not event.serial:
            # What is in its place now is another part. One with a serial number keeps its history, wherever it goes.
            self._records.parts.put(part_key(record.name, event), None)
        self.test_when_empty(record, f"{remedy.value} was done" + (f": {words}" if words else ""), now_ns)

    def test_when_empty(self, record: NodeHealth, why: str, now_ns: int) -> None:
        """A test loads the whole node, so it does not begin beside a run."""
        if not self._fleet.is_busy(record.name):
            self.test(record, now_ns, why)
            return
        record = msgspec.structs.replace(record, test_asked=why, confirming=None)
        words = f"{why}; it is tested when its run has ended"
        if record.state is RepairState.TESTING:
            self.move(record, RepairState.DRAINED, words, now_ns)
        else:
            self.put(msgspec.structs.replace(record, reason=words))

    def test(self, record: NodeHealth, now_ns: int, why: str) -> None:
        event = fault_of(record)
        faults, policy = self._faults(record.name, event, now_ns), self._policy
        back_off_ns = min(policy.back_off_most_ns, policy.back_off_ns << min(faults - 2, 40)) if faults > 1 else 0
        number = record.numbers + 1
        record = msgspec.structs.replace(
            record,
            hold=Hold.NONE,
            test_asked="",
            passed=(),
            failed=0,
            until_ns=now_ns + back_off_ns,
            confirming=Confirming(number=number, at_ns=now_ns, first=number),
            numbers=number,
        )
        longer = f", for {format_duration(back_off_ns)} at least" if back_off_ns else ""
        self.move(record, RepairState.TESTING, f"{why}; it is tested{longer}", now_ns)

    def tested(self, record: NodeHealth, events: tuple[Finding, ...], asked: int, now_ns: int) -> None:
        """The answer to a probe of the test. Periodic reports do not count: they may be of before the repair."""
        bad = [event for event in events if is_fault(event)]
        happened = next((event for event in bad if event.once and is_certain(event)), None)
        if happened is not None and _is_of_test(record, asked):
            self.test_failed(record, happened, now_ns)
            return
        fault, required = fault_of(record), self._required(record)
        good = {event.check for event in events if event.severity == "ok" and not event.could_not_run}
        if not any(covers(event, fault) for event in events):
            good.discard(fault.check)
        if bad:
            record = msgspec.structs.replace(record, passed=(), failed=record.failed + 1)
            if record.failed >= self._policy.probes:
                self.test_failed(record, bad[0], now_ns)
                return
        else:
            missed = [event for event in events if event.could_not_run and event.severity != "ok"]
            passed = tuple(check for check in required if check in record.passed or check in good)
            record = msgspec.structs.replace(record, passed=passed, failed=0)
            if passed == required and not missed and now_ns >= record.until_ns:
                self.return_to_service(record, f"{counted(len(record.passed), 'required check')} passed", now_ns)
                return
        if record != self._records.health.get(record.name):
            self.put(record)

    def _required(self, record: NodeHealth) -> tuple[str, ...]:
        of_group = self._policy.required_of(self._fleet.group_of(record.name))
        return tuple(dict.fromkeys((fault_of(record).check, *of_group)))

    def happened(self, record: NodeHealth, event: Finding, asked: int, now_ns: int) -> None:
        """An event, of which a report tells beside the test; no probe can repeat it."""
        if _is_of_test(record, asked):
            self.test_failed(record, event, now_ns)

    def test_failed(self, record: NodeHealth, event: Finding, now_ns: int) -> None:
        self.note(record, BY_MACHINE, "test failed", fault_words(event), now_ns)
        self._count_fault(record.name, event, now_ns)
        record = msgspec.structs.replace(record, fault=event, confirming=None, passed=(), failed=0)
        self._due(record, f"its test failed: {fault_words(event)}", now_ns)

    def further_fault(self, record: NodeHealth, event: Finding, now_ns: int) -> None:
        """Of a node that is out: counted once for each part, and what is due is by the worst."""
        fault = fault_of(record)
        key = part_key(record.name, event)
        known = self._records.parts.get(key)
        if key != part_key(record.name, fault) and (known is None or known.faults_ns[-1:] < (self._out_ns(record),)):
            self.note(record, BY_MACHINE, "further fault", fault_words(event), now_ns)
            self._count_fault(record.name, event, now_ns)
        if event.severity != "high" or fault.severity == "high":
            return
        record = msgspec.structs.replace(record, fault=event)
        if record.state in REMEDY_STATES.values():
            self._due(record, "", now_ns)
        else:
            self.put(msgspec.structs.replace(record, reason=fault_words(event)))

    def _out_ns(self, record: NodeHealth) -> int:
        """When the node was drained last."""
        ticket = self._records.tickets.get(record.ticket)
        if ticket is None:
            return record.since_ns
        drains = (action.at_ns for action in reversed(ticket.actions) if action.what == "drain")
        return next(drains, ticket.opened_ns)

    def return_to_service(self, record: NodeHealth, words: str, now_ns: int) -> None:
        """On probation. `words`: why."""
        self.note(record, BY_MACHINE, "return", words, now_ns)
        probation_ns = self._policy.probation_ns
        record = msgspec.structs.replace(record, confirming=None, until_ns=now_ns + probation_ns)
        reason = f"{words}; on probation for {format_duration(probation_ns)}"
        self.move(record, RepairState.PROBATION, reason, now_ns)

    def settle(self, record: NodeHealth, now_ns: int) -> None:
        """Its probation is over."""
        self.close(record, BY_MACHINE, "its probation is over", now_ns)
        record = msgspec.structs.replace(record, fault=None, ticket=0, taken=False, passed=(), until_ns=0)
        self.move(record, RepairState.RETURNED, "", now_ns)

    # --- the breaker ---

    def most_out(self) -> int:
        return max(1, int(self._policy.breaker_share * self._fleet.count()))

    def out(self, but: str = "") -> int:
        """Nodes that the machine took out and that no person has taken over."""
        mine = self._records.health.get(but)
        return self._counted().out - (mine is not None and _is_out(mine))

    def has_room(self, fault: Finding) -> bool:
        """For a node that the breaker holds. One that is probed may need it, too: so few are as may be drained."""
        counts = self._counted()
        waits = 0 if fault.once else counts.probed
        return counts.out + waits < self.most_out()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Within, nodes are counted once."""
        self._counts = self._counted()
        try:
            yield
        finally:
            self._counts = None

    def _counted(self) -> _Counts:
        if self._counts is not None:
            return self._counts
        counts = _Counts()
        for _, row in self._records.health.rows():
            counts.change(None, row)
        return counts


class _Counts:
    def __init__(self) -> None:
        self.out = 0
        """Nodes that the machine took out and that no person has taken over."""
        self.probed = 0

    def change(self, before: NodeHealth | None, after: NodeHealth) -> None:
        self.out += _is_out(after) - (before is not None and _is_out(before))
        self.probed += _is_probed(after) - (before is not None and _is_probed(before))


def _is_out(row: NodeHealth) -> bool:
    return row.state in OUT and not row.taken


def _is_probed(row: NodeHealth) -> bool:
    return row.state is RepairState.SUSPECT and row.confirming is not None


def _is_of_test(record: NodeHealth, asked: int) -> bool:
    """An event that is told now is not of before the repair: the test has been answered, or the node had been asked for
    a probe of it when the event happened."""
    first = record.confirming.first if record.confirming is not None else 0
    return bool(record.passed) or record.failed > 0 or 0 < first <= asked


def fault_of(record: NodeHealth) -> Finding:
    """Of a node that is suspect or out."""
    if record.fault is None:
        raise InvariantViolation(f"node {record.name} is {record.state.value} without a fault")
    return record.fault
