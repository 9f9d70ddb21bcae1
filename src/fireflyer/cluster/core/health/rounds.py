"""When a node's checks are run, what follows what happens beside them, and which reports the managers have not taken
yet. Pure.

A probe comes before what is periodic, and each is carried out once. Reports are kept until they are taken. Of more than
`MAX_REPORTS`, answers to former probes go. Then what the oldest periodic report found is moved into the next one: a
check may say it once (an Xid), and nobody may lead for longer than so many periods. What a follower says is a report
like that of a round.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from fireflyer.base.health_event import MAX_LINE_BYTES
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import MAX_LINES, PROGRAM, Finding, findings_of
from fireflyer.cluster.schema.sync import MAX_REPORTS, HealthOrder, HealthReport

__all__ = ["Following", "HealthRounds", "PrintedLines", "Round", "of_idle_node"]

_IDLE_S: Final = 60.0
_FIRST_PAUSE_NS: Final = SECOND
_LAST_PAUSE_NS: Final = 600 * SECOND
_MAX_ASKED: Final = 8
"""Probes of which it is kept when the node heard of them."""
MAX_MOVED: Final = 64
"""Faults of a report that are moved into the next one."""


class Round(NamedTuple):
    """To be carried out now."""

    program: tuple[str, ...]
    limit_ns: int
    validation: tuple[str, ...]
    validation_limit_ns: int
    probe: int


class HealthRounds:
    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._order: HealthOrder | None = None
        self._answered = 0
        """Of probes, the last one."""
        self._due_ns: int | None = None
        """Of the next periodic round; None: now."""
        self._scheduled: tuple[tuple[str, ...], int] = ((), 0)
        """Program and period by which it is due."""
        self._tokens: frozenset[str] = frozenset()
        self._number = 0
        self._reports: list[HealthReport] = []
        self._asked: list[tuple[int, int]] = []
        """The newest probes, and when the node first heard of each, by its own clock."""

    def hear(self, order: HealthOrder | None, wall_ns: int) -> None:
        """`wall_ns`: nanoseconds since 1970, as those of events."""
        self._order = order
        self._note_probe(order.probe if order is not None else 0, wall_ns)
        if order is None:
            self._reports.clear()
        elif order.heard is not None and order.heard.incarnation == self._incarnation:
            taken = order.heard.number
            self._reports = [report for report in self._reports if report.number > taken]

    def _note_probe(self, number: int, wall_ns: int) -> None:
        last = self._asked[-1][0] if self._asked else 0
        if number and number < last:
            self._asked.clear()  # the node was removed and is there again: its numbers begin anew
        if number and number != last:
            self._asked = [*self._asked, (number, wall_ns)][-_MAX_ASKED:]

    def _asked_before(self, lines: tuple[bytes, ...]) -> int:
        """`HealthReport.asked`."""
        if not self._asked:
            return 0
        happened_ns = max((event.seen_ns for event in findings_of(lines, 0) if event.once), default=0)
        return next((number for number, heard_ns in reversed(self._asked) if heard_ns <= happened_ns), 0)

    def runs_are(self, tokens: frozenset[str]) -> bool:
        """Of runs that live here. Whether a round is due by that."""
        changed, self._tokens = tokens != self._tokens, tokens
        if changed:
            self._due_ns = None
        return changed

    @property
    def idle(self) -> bool:
        """No run lives here."""
        return not self._tokens

    def next(self, now_ns: int) -> Round | None:
        order = self._order
        if order is None:
            return None
        if order.probe and order.probe != self._answered:
            only = ("--check", order.check) if order.check else ()
            validation = order.validation if not order.check else ()
            program = (*order.program, *only)
            return Round(program, order.limit_ns, validation, order.validation_limit_ns, order.probe)
        wanted = order.program, order.period_ns
        if self._due_ns is None or now_ns >= self._due_ns or wanted != self._scheduled:  # else it waits up to a day
            self._scheduled = wanted
            self._due_ns = now_ns + order.period_ns  # a run that comes or goes meanwhile asks for another round
            return Round(order.program, order.limit_ns, (), 0, 0)
        return None

    def wait_s(self, now_ns: int) -> float:
        """Until the next round, where no order comes before."""
        if self._order is None or self._due_ns is None:
            return _IDLE_S
        return max(0.0, (self._due_ns - now_ns) / SECOND)

    def done(self, due: Round, lines: tuple[bytes, ...], failure: str) -> None:
        self._answered = due.probe or self._answered
        self._add(lines, due.probe, failure)

    def happened(self, lines: tuple[bytes, ...]) -> None:
        """What a follower has printed, of `MAX_LINES` lines at most."""
        if self._order is not None:
            self._add(lines)

    def _add(self, lines: tuple[bytes, ...], probe: int = 0, failure: str = "") -> None:
        self._number += 1
        asked = self._asked_before(lines)
        self._reports.append(
            HealthReport(number=self._number, probe=probe, lines=lines, failure=failure[:1000], asked=asked)
        )
        while len(self._reports) > MAX_REPORTS:
            self._drop_one()

    def _drop_one(self) -> None:
        """All reports are sent together, so a manager that has taken one has taken those before it."""
        former = next((one for one in self._reports if one.probe and one.probe != self._answered), None)
        if former is not None:
            self._reports.remove(former)
            return
        old, following = [one for one in self._reports if not one.probe][:2]
        self._reports[self._reports.index(following)] = _joined(old, following)
        self._reports.remove(old)

    def reports(self) -> tuple[HealthReport, ...]:
        return tuple(self._reports)


class Following:
    """Which program is to follow what happens on the node, and when it may be started again after it has ended."""

    def __init__(self) -> None:
        self.program: tuple[str, ...] = ()
        """Empty: none."""
        self._pause_ns = _FIRST_PAUSE_NS
        self._due_ns = 0

    def hear(self, order: HealthOrder | None) -> bool:
        """Whether another program is to follow from now on; it may be started at once."""
        program = order.follow if order is not None else ()
        if program == self.program:
            return False
        self.program, self._pause_ns, self._due_ns = program, _FIRST_PAUSE_NS, 0
        return True

    def wait_s(self, now_ns: int) -> float | None:
        """Until it is to be started; None: there is none."""
        return max(0, self._due_ns - now_ns) / SECOND if self.program else None

    def ended(self, started_ns: int, now_ns: int) -> None:
        """Pauses double, up to 10 min, while it does not live for as long."""
        if now_ns - started_ns >= _LAST_PAUSE_NS:
            self._pause_ns = _FIRST_PAUSE_NS
        self._due_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _LAST_PAUSE_NS)


class PrintedLines:
    """Of what a follower prints without end, in batches that fit into a report."""

    def __init__(self) -> None:
        self._rest = b""
        self._whole: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """A line that is too long is cut, so it is no event and told as such."""
        *whole, rest = (self._rest + data).split(b"\n")
        self._whole += [line[:MAX_LINE_BYTES] for line in whole if line.strip()]
        self._rest = rest[: MAX_LINE_BYTES + 1]

    def take(self) -> tuple[bytes, ...]:
        """The next batch; of equal lines the first. Empty: there is no whole line."""
        batch, self._whole = self._whole[:MAX_LINES], self._whole[MAX_LINES:]
        return tuple(dict.fromkeys(batch))


def of_idle_node(line: bytes) -> bool:
    """Whether the line tells a fault that is one only where no run lives: processes on GPUs. Where a run has come while
    the checks ran, they may be its own."""
    finding = _fault(line)
    return finding is not None and finding.check == "gpu_processes"


def _joined(old: HealthReport, following: HealthReport) -> HealthReport:
    """With the faults of the older one before what was found later: that a check passes now is later than its fault."""
    known = {_key(finding) for line in following.lines if (finding := _fault(line)) is not None}
    faults = {_key(finding): line for line in old.lines if (finding := _fault(line)) is not None}
    moved = [line for key, line in faults.items() if key not in known][:MAX_MOVED]
    lines = (*moved, *following.lines)[:MAX_LINES]
    return msgspec.structs.replace(following, lines=lines, asked=max(old.asked, following.asked))


def _fault(line: bytes) -> Finding | None:
    """None of a line that is no fault, or no health event."""
    finding = findings_of((line,), 0)[0]
    return finding if finding.severity != "ok" and finding.check != PROGRAM else None


def _key(finding: Finding) -> tuple[str, str, str]:
    return finding.check, finding.part, finding.cause
