"""What a node's checks report becomes: nothing, a word to a person, a probe, a drain. A pure machine over records.

    Said, Probed, Reported┐                            ┌─> Requeue    the run of the node goes elsewhere
    Repaired, ReturnAsked ┼─> records (`records`) ─────┼─> Moved      history; who places tasks reads the record
    Rebooted, RunFailed, ─┤      │ `NodeHealth.asked`  └─> Tell       a person
    TimePassed            ┘      │
                                 └─> probes, by the agent of the node

*Severity* (arXiv:2410.21680, III): `warn` tells a person, once, and stands with the node until the check passes. `low`
and `high` are faults: the node takes no new task from then on. A fault that is certain is acted on: a state that needs
no probe (`at_once`), or an event that happened (`once`), which no probe can repeat. Any other is probed first,
`policy.probes` times; one probe that passes makes it a flap, and flaps are acted on at `policy.flaps` only. A fault of
severity `high` requeues the run of the node, one of `low` lets it end. What an answer says beside the fault that was
probed is a report.

*What is not acted on.* Evidence that a user can have made is probed when the node has no run; so it never requeues
one. A node that would be one too many (`Repairs.most_out`) is held by the breaker. Links that many nodes of one leaf
lose are the leaf's: its nodes are held. A state that is held is over when its check passes, and is probed before it is
acted on; an event that the breaker holds stays. A check that could not run is no fault where its severity is `warn` (it
is required) or `ok`: a person is told of the former, and no node returns without it.

*After a failure.* What ended a run may be a fault of any of its nodes, and is known seconds later. Until all checks of
a node have answered it takes no task, for `policy.probe_limit_ns` at most: else its next run fails of the same fault.
Where the trainer's guard has found that ranks of it differ from the majority of their replicas, the validation must
have answered as well, once in `DOUBT_AGAIN_NS` at most, and of no more nodes at a time than may be out: users can say
so, and only what validators find, twice, takes a node out as faulty.

The machine never looks at what people drained: that is another word, which it neither sets nor removes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND, counted
from fireflyer.cluster.core.health.findings import PROGRAM, Finding, covers, is_certain, is_fault
from fireflyer.cluster.core.health.messages import (
    Effect,
    Event,
    Probed,
    Rebooted,
    Removed,
    Repaired,
    Reported,
    ReturnAsked,
    RunFailed,
    Said,
    Tell,
    TimePassed,
)
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.health.records import (
    MAX_FLAPS,
    MAX_WARNED,
    MAX_WARNED_WORDS,
    MORE_WARNINGS,
    OUT,
    TAKES_TASKS,
    Confirming,
    Flap,
    Fleet,
    Hold,
    NodeHealth,
    Records,
    RepairState,
    Warned,
)
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.health.repair import BY_MACHINE, Repairs, fault_of, fault_words
from fireflyer.cluster.schema.sync import VALIDATION

__all__ = ["DOUBT_AGAIN_NS", "DOUBT_LIMIT_NS", "HealthMachine"]

DOUBT_AGAIN_NS: Final = 86_400 * SECOND
"""Well above `DOUBT_LIMIT_NS`: else a user could keep a node idle for most of the time."""
DOUBT_LIMIT_NS: Final = 3600 * SECOND
"""A validation that was not answered for so long is waited for no longer."""


class HealthMachine:
    def __init__(self, policy: HealthPolicy, records: Records, fleet: Fleet) -> None:
        self._policy, self._records, self._fleet = policy, records, fleet
        self._effects: list[Effect] = []
        self._repairs = Repairs(policy, records, fleet, self._effects)

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Raises `UsageError` where a person asks for what cannot be."""
        match event:
            case Said(node, events, asked):
                self._said(node, events, asked, now_ns)
            case Probed():
                self._probed(event, now_ns)
            case Reported(node, fault):
                self._fault(self._known(node), fault, 0, now_ns)
            case Repaired(node, remedy, words, by):
                self._repairs.repaired(self._out(node), remedy, words, by, now_ns)
            case ReturnAsked(node, words, by):
                self._return_asked(node, words, by, now_ns)
            case Rebooted(node):
                record = self._known(node)
                if record.state is RepairState.REBOOT:
                    self._repairs.repaired(record, Remedy.REBOOT, "its agent reports another boot", BY_MACHINE, now_ns)
            case RunFailed(nodes, corrupt):
                for node in nodes:
                    self._run_failed(self._known(node), now_ns)
                self._doubt([node for node in nodes if node in corrupt], now_ns)
            case Removed(node, by):
                self._removed(node, by, now_ns)
            case TimePassed():
                self._sweep(now_ns)
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def _known(self, node: str) -> NodeHealth:
        return self._records.health.get(node) or NodeHealth(name=node)

    def _put(self, record: NodeHealth) -> NodeHealth:
        if record != self._known(record.name):
            self._repairs.put(record)
        return record

    # --- reports ---

    def _said(self, node: str, events: tuple[Finding, ...], asked: int, now_ns: int) -> None:
        followed = bool(events) and all(event.once for event in events)  # what happened on the node: no check has run
        if not followed and all(event.check != PROGRAM for event in events):
            self._forget_warnings(self._known(node), PROGRAM, "")  # it has run; it does not say so itself
        for event in events:
            if is_fault(event):
                self._fault(self._known(node), event, asked, now_ns)
            elif event.severity == "ok" and not event.could_not_run:
                self._passed(self._known(node), event, now_ns)
            elif event.severity != "ok":
                self._warn(self._known(node), event)

    def _warn(self, record: NodeHealth, event: Finding) -> None:
        could_not = " could not run" if event.could_not_run else ""
        words = f"{fault_words(event)}{could_not}"
        warned = Warned(event.check, event.part, event.cause, words[:MAX_WARNED_WORDS])
        known = {one.subject for one in record.warned}
        if len(known - {MORE_WARNINGS.subject}) >= MAX_WARNED - 1 and warned.subject not in known:
            # Else each would be told at each round.
            warned, words = MORE_WARNINGS, f"more than {MAX_WARNED - 1} warnings: further ones are not told"
        if warned.subject in known:
            return
        self._put(msgspec.structs.replace(record, warned=(*record.warned, warned)))
        self._effects.append(Tell(record.name, words, event))

    def _forget_warnings(self, record: NodeHealth, check: str, part: str) -> NodeHealth:
        warned = tuple(one for one in record.warned if one.check != check or part not in ("", one.part))
        if len(warned) < MAX_WARNED:  # there is room for those that it stands for
            warned = tuple(one for one in warned if one != MORE_WARNINGS)
        return self._put(msgspec.structs.replace(record, warned=warned))

    def _passed(self, record: NodeHealth, event: Finding, now_ns: int) -> None:
        record = self._forget_warnings(record, event.check, event.part)
        fault = record.fault
        if record.state is not RepairState.SUSPECT or fault is None or not covers(event, fault):
            return
        if record.hold is Hold.BREAKER and fault.once and is_certain(fault):
            return  # what has happened is not undone by a check that no longer sees it; a leaf explains it
        self._flapped(record, fault, now_ns)

    # --- after a failure ---

    def _run_failed(self, record: NodeHealth, now_ns: int) -> None:
        """Of a node that takes no task anyway nothing is asked."""
        if record.state in TAKES_TASKS:
            self._put(_asked_for_all(record, now_ns))

    def _doubt(self, nodes: list[str], now_ns: int) -> None:
        """Replicas differed there. A user's program says so, and a validation takes minutes: so not after every run,
        and not of many at a time."""
        room = self._repairs.most_out() - sum(row.doubted for _, row in self._records.health.rows()) if nodes else 0
        for node in nodes:
            record = self._known(node)
            is_new = not record.doubted_ns or now_ns - record.doubted_ns >= DOUBT_AGAIN_NS
            if room > 0 and is_new and not record.doubted and record.state in (*TAKES_TASKS, RepairState.SUSPECT):
                room -= 1
                self._put(msgspec.structs.replace(record, doubted=True, doubted_ns=max(1, now_ns)))
                self._effects.append(Tell(node, fault_words(_corruption(now_ns)), _corruption(now_ns)))

    def _no_longer_unchecked(self, record: NodeHealth, now_ns: int) -> NodeHealth:
        waits = record.unchecked
        limit_ns = max(self._policy.probe_limit_ns, DOUBT_LIMIT_NS if record.doubted else 0)
        is_over = waits is not None and now_ns - waits.at_ns >= limit_ns
        return self._checked(record) if is_over else record

    def _checked(self, record: NodeHealth) -> NodeHealth:
        return self._put(msgspec.structs.replace(record, unchecked=None, doubted=False))

    # --- suspicion ---

    def _fault(self, record: NodeHealth, event: Finding, asked: int, now_ns: int) -> None:
        fault = record.fault
        if record.state in TAKES_TASKS:
            self._suspect(record, event, now_ns)
        elif record.state is RepairState.SUSPECT:
            if fault is None or record.hold is Hold.UNCONFIRMED or self._overtakes(record, event, fault):
                self._suspect(record, event, now_ns)
        elif record.state is RepairState.DRAINED and self._worsens(event, fault_of(record)):
            record = msgspec.structs.replace(record, fault=event, reason=fault_words(event), test_asked="")
            self._repairs.requeue(self._put(record))
        elif record.state is RepairState.TESTING and event.once and is_certain(event):
            self._repairs.happened(record, event, asked, now_ns)

    def _worsens(self, event: Finding, fault: Finding) -> bool:
        """The run was to end by itself, and may not any more."""
        return is_certain(event) and event.severity == "high" and fault.severity == "low"

    def _overtakes(self, record: NodeHealth, event: Finding, fault: Finding) -> bool:
        """A fault that is certain, of a node that is suspected of something less."""
        if not is_certain(event):
            return False
        of_leaf = record.hold is Hold.LEAF and event.check not in self._policy.link_checks
        return of_leaf or _weight(event) > _weight(fault)

    def _suspect(self, record: NodeHealth, event: Finding, now_ns: int) -> None:
        record = msgspec.structs.replace(record, fault=event, hold=Hold.NONE, confirming=None, test_asked="")
        if event.user_made:
            if self._fleet.is_busy(record.name):
                self._hold(
                    record, Hold.USER, "the user of its run can have made this: it is probed after the run", now_ns
                )
            else:
                self._confirm(record, now_ns)
        elif is_certain(event):
            self._act(record, event, now_ns)
        else:
            self._confirm(record, now_ns)

    def _confirm(self, record: NodeHealth, now_ns: int) -> None:
        number = record.numbers + 1
        record = msgspec.structs.replace(
            record, hold=Hold.NONE, confirming=Confirming(number=number, at_ns=now_ns), numbers=number
        )
        words = f"{fault_words(fault_of(record))}; it is probed"
        if record.state is RepairState.SUSPECT:
            self._put(msgspec.structs.replace(record, reason=words))
        else:
            self._repairs.move(record, RepairState.SUSPECT, words, now_ns)

    def _hold(self, record: NodeHealth, hold: Hold, why: str, now_ns: int) -> None:
        record = msgspec.structs.replace(record, hold=hold, confirming=None)
        words = f"{fault_words(fault_of(record))}; {why}"
        if record.state is not RepairState.SUSPECT or self._known(record.name).hold is not hold:
            self._repairs.move(record, RepairState.SUSPECT, words, now_ns)
            self._effects.append(Tell(record.name, words, record.fault))
        else:
            self._put(msgspec.structs.replace(record, reason=words))

    def _probed(self, answer: Probed, now_ns: int) -> None:
        node, number, events = answer.node, answer.number, answer.events
        record = self._known(node)
        if record.unchecked is not None and record.unchecked.number == number:
            self._checked(record)
            bad = tuple(event for event in events if record.doubted and _is_of_validation(event))
            self._said(node, tuple(event for event in events if event not in bad), answer.asked, now_ns)
            if bad:
                self._validation_failed(self._known(node), bad[0], now_ns)
            return
        confirming, fault = record.confirming, record.fault
        if confirming is None or fault is None or not number or confirming.number != number:
            return
        waits = msgspec.structs.replace(confirming, number=0, at_ns=now_ns)
        record = msgspec.structs.replace(record, confirming=waits)
        if record.state is RepairState.TESTING:
            self._repairs.tested(record, events, answer.asked, now_ns)
            self._said(node, tuple(event for event in events if not is_fault(event)), answer.asked, now_ns)
            return
        bad = tuple(event for event in events if _is_again(event, fault))
        mine = tuple(event for event in events if event.check == fault.check)
        if bad:
            self._probe_failed(record, waits, fault, bad, now_ns)
        elif any(covers(event, fault) for event in mine) or _is_left_out(mine):
            self._flapped(record, fault, now_ns)
        else:
            self._hold(record, Hold.UNCONFIRMED, "a probe came to no result", now_ns)
        self._said(node, tuple(event for event in events if event not in bad), answer.asked, now_ns)

    def _probe_failed(
        self, record: NodeHealth, waits: Confirming, fault: Finding, bad: tuple[Finding, ...], now_ns: int
    ) -> None:
        failed, worst = waits.failed + 1, max(bad, key=_weight)
        if is_certain(worst):
            self._act(msgspec.structs.replace(record, confirming=None), worst, now_ns)
        elif failed >= self._policy.probes:
            found = msgspec.structs.replace(bad[-1], user_made=fault.user_made)
            self._act(msgspec.structs.replace(record, confirming=None), found, now_ns)
        else:
            self._put(msgspec.structs.replace(record, confirming=msgspec.structs.replace(waits, failed=failed)))

    def _flapped(self, record: NodeHealth, fault: Finding, now_ns: int) -> None:
        """The fault is over."""
        window_ns = self._policy.flap_window_ns
        flaps = tuple(one for one in record.flaps if now_ns - one.at_ns < window_ns)
        flaps = (*flaps, Flap(fault.check, fault.part, now_ns))[-MAX_FLAPS:]
        record = msgspec.structs.replace(record, flaps=flaps, confirming=None, hold=Hold.NONE, test_asked="")
        often = sum(1 for one in flaps if (one.check, one.part) == (fault.check, fault.part))
        if often >= self._policy.flaps and not fault.user_made:
            words = f"{counted(often, 'flap')}, the last one: {fault.words}"[:400]
            record = msgspec.structs.replace(record, flaps=())
            self._act(record, msgspec.structs.replace(fault, severity="low", words=words), now_ns)
            return
        state = RepairState.PROBATION if record.ticket else RepairState.HEALTHY
        record = msgspec.structs.replace(record, fault=None)
        if record.doubted:  # what was asked for then is not answered
            record = _asked_for_all(record, now_ns)
        self._repairs.move(record, state, "", now_ns)

    # --- acting ---

    def _act(self, record: NodeHealth, event: Finding, now_ns: int) -> None:
        """On a fault that is certain."""
        record = msgspec.structs.replace(record, fault=event)
        if self._is_of_leaf(record.name, event, now_ns):
            self._suspect_leaf(record, now_ns)
            return
        if not self._is_held_by_breaker(record, now_ns):
            self._repairs.drain(record, event, now_ns)

    def _is_held_by_breaker(self, record: NodeHealth, now_ns: int) -> bool:
        out, most = self._repairs.out(but=record.name), self._repairs.most_out()
        if out < most:
            return False
        words = f"held by the breaker: {counted(out, 'node')} of {self._fleet.count()} are out already, {most} may be"
        self._hold(record, Hold.BREAKER, words, now_ns)
        return True

    def _validation_failed(self, record: NodeHealth, event: Finding, now_ns: int) -> None:
        """Once, of a node that is doubted. It is validated again, out of service, before that counts as a fault."""
        if record.state is RepairState.SUSPECT:  # of what was found beside it
            self._put(msgspec.structs.replace(record, doubted=True))
        elif record.state in TAKES_TASKS:
            record = msgspec.structs.replace(record, fault=event)
            if not self._is_held_by_breaker(record, now_ns):
                self._repairs.drain_for_test(record, event, now_ns)

    def _is_of_leaf(self, node: str, event: Finding, now_ns: int) -> bool:
        leaf = self._fleet.leaf_of(node)
        if not leaf or event.check not in self._policy.link_checks:
            return False
        others = [row for row in self._with_link_faults(leaf, now_ns) if row.name != node]
        return len(others) + 1 >= self._policy.leaf_links

    def _with_link_faults(self, leaf: str, now_ns: int) -> list[NodeHealth]:
        """Suspects and drained nodes that no person has taken over."""
        return [
            row
            for name, row in self._records.health.rows()
            if row.state in (RepairState.SUSPECT, *OUT)
            and row.fault is not None
            and row.fault.check in self._policy.link_checks
            and not row.taken
            and (row.hold is Hold.LEAF or now_ns - row.since_ns < self._policy.leaf_window_ns)
            and self._fleet.leaf_of(name) == leaf
        ]

    def _suspect_leaf(self, record: NodeHealth, now_ns: int) -> None:
        leaf = self._fleet.leaf_of(record.name)
        words = f"leaf {leaf} is suspect, as several of its nodes have lost their links"
        known = [row for row in self._with_link_faults(leaf, now_ns) if row.name != record.name]
        if all(row.hold is not Hold.LEAF for row in known):
            self._effects.append(Tell(record.name, words))
        for row in (*known, record):
            if row.hold is Hold.LEAF:
                continue
            if row.ticket and row.state in OUT:
                self._repairs.close(row, BY_MACHINE, words, now_ns)
                row = msgspec.structs.replace(row, ticket=0)
            row = msgspec.structs.replace(row, hold=Hold.LEAF, confirming=None)
            self._repairs.move(row, RepairState.SUSPECT, f"{fault_words(fault_of(row))}; {words}", now_ns)

    # --- people ---

    def _out(self, node: str) -> NodeHealth:
        """Raises `UsageError`."""
        record = self._known(node)
        if record.state not in OUT and not (record.state is RepairState.SUSPECT and record.hold is not Hold.NONE):
            raise UsageError(f"node {node} is {record.state.value}: its checks have not taken it out")
        return record

    def _return_asked(self, node: str, words: str, by: str, now_ns: int) -> None:
        record = self._repairs.asked(self._out(node), by, "return asked", words, now_ns)
        self._repairs.test_when_empty(record, f"{by} asked for its return" + (f": {words}" if words else ""), now_ns)

    def _removed(self, node: str, by: str, now_ns: int) -> None:
        record = self._records.health.get(node)
        if record is not None:
            self._repairs.close(record, by, "the node was removed", now_ns)
            self._records.health.put(node, None)

    # --- time ---

    def _sweep(self, now_ns: int) -> None:
        rows = [
            row
            for _, row in self._records.health.rows()
            if row.state not in (RepairState.HEALTHY, RepairState.RETURNED) or row.unchecked is not None
        ]
        held: dict[str, list[NodeHealth]] = {}
        for row in rows:
            if row.hold is Hold.LEAF and not row.taken:
                held.setdefault(self._fleet.leaf_of(row.name), []).append(row)
        over = {leaf for leaf, mine in held.items() if self._is_over(mine, now_ns)}
        with self._repairs.counted():
            for record in sorted(rows, key=lambda row: (row.since_ns, row.name)):
                self._pass_time(self._known(record.name), over, now_ns)

    def _is_over(self, held: list[NodeHealth], now_ns: int) -> bool:
        """The suspicion of a leaf, of which these nodes are left."""
        newest_ns = max(row.since_ns for row in held)
        return len(held) < self._policy.leaf_links and now_ns - newest_ns >= self._policy.leaf_window_ns

    def _pass_time(self, record: NodeHealth, over: set[str], now_ns: int) -> None:
        if record.test_asked:
            if not self._fleet.is_busy(record.name):
                self._repairs.test(record, now_ns, record.test_asked)
            return
        record = self._no_longer_unchecked(record, now_ns)
        match record.state:
            case RepairState.SUSPECT if record.hold is Hold.LEAF:
                if self._fleet.leaf_of(record.name) in over:
                    self._act_on_held(record, fault_of(record), now_ns)
            case RepairState.SUSPECT:
                self._pass_time_of_suspect(record, now_ns)
            case RepairState.DRAINED:
                if not self._fleet.is_busy(record.name):
                    self._repairs.vacated(record, now_ns)
            case RepairState.TESTING if self._fleet.is_busy(record.name):
                self._repairs.test_when_empty(record, "it was given a run while nodes were not checked", now_ns)
            case RepairState.TESTING:
                self._next_probe(record, self._policy.test_every_ns, now_ns)
            case RepairState.PROBATION:
                if now_ns >= record.until_ns:
                    self._repairs.settle(record, now_ns)
            case _:
                pass

    def _pass_time_of_suspect(self, record: NodeHealth, now_ns: int) -> None:
        confirming = record.confirming
        if confirming is not None and confirming.number:
            if now_ns - confirming.at_ns >= self._policy.probe_limit_ns:
                self._hold(record, Hold.UNCONFIRMED, "a probe was not answered", now_ns)
        elif confirming is not None:
            self._next_probe(record, self._policy.probe_spacing_ns, now_ns)
        elif record.hold is Hold.USER and not self._fleet.is_busy(record.name):
            self._confirm(record, now_ns)
        elif record.hold is Hold.UNCONFIRMED and fault_of(record).check == VALIDATION:  # no periodic report has it
            if now_ns - record.since_ns >= DOUBT_LIMIT_NS and not self._fleet.is_busy(record.name):
                self._confirm(record, now_ns)
        elif record.hold is Hold.BREAKER and self._repairs.has_room(fault_of(record)):
            self._act_on_held(record, fault_of(record), now_ns)

    def _act_on_held(self, record: NodeHealth, fault: Finding, now_ns: int) -> None:
        """A state that was seen long ago may be over; what has happened is not."""
        if fault.once and is_certain(fault):
            self._act(record, fault, now_ns)
        else:
            self._confirm(record, now_ns)

    def _next_probe(self, record: NodeHealth, every_ns: int, now_ns: int) -> None:
        confirming = record.confirming
        if confirming is None:
            return
        waited_ns = now_ns - confirming.at_ns
        if waited_ns >= (self._policy.probe_limit_ns if confirming.number else every_ns):
            number = record.numbers + 1
            again = msgspec.structs.replace(confirming, number=number, at_ns=now_ns)
            self._put(msgspec.structs.replace(record, confirming=again, numbers=number))


def _asked_for_all(record: NodeHealth, now_ns: int) -> NodeHealth:
    number = record.numbers + 1
    return msgspec.structs.replace(record, unchecked=Confirming(number=number, at_ns=now_ns), numbers=number)


def _corruption(now_ns: int) -> Finding:
    words = "ranks of a run there differed from the majority of their replicas; it is validated"
    return Finding(
        check="replicas", severity="warn", cause="corruption", words=words, seen_ns=max(0, now_ns), user_made=True
    )


def _weight(event: Finding) -> tuple[bool, bool, bool]:
    """Of two faults of a node, the heavier one is acted on. An event is heavier than a state, which comes again."""
    certain = is_certain(event)
    return certain, certain and event.once, certain and event.severity == "high"


def _is_again(event: Finding, fault: Finding) -> bool:
    same = (event.check, event.part, event.could_not_run) == (fault.check, fault.part, fault.could_not_run)
    return same and is_fault(event)


def _is_of_validation(event: Finding) -> bool:
    return event.check == VALIDATION and is_fault(event) and not event.could_not_run


def _is_left_out(found: tuple[Finding, ...]) -> bool:
    """By a check that came to a result and names faults only: what it does not name is well."""
    return bool(found) and all(event.severity != "ok" and not event.could_not_run for event in found)
