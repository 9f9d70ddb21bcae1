"""When a node's checks are run, and which reports the managers have not taken yet. Pure.

A probe comes before what is periodic, and each is carried out once. Reports are kept until they are taken; of more than
`MAX_REPORTS` the oldest goes, but never the answer to the probe that is asked for: the managers have seen what a node
says for the time being by the newest one.
"""

from __future__ import annotations

from typing import NamedTuple

from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.sync import MAX_REPORTS, HealthOrder, HealthReport

__all__ = ["HealthRounds", "Round"]

_IDLE_S = 60.0


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
        self._tokens: frozenset[str] = frozenset()
        self._number = 0
        self._reports: list[HealthReport] = []

    def hear(self, order: HealthOrder | None) -> None:
        self._order = order
        if order is None:
            self._reports.clear()
        elif order.heard is not None and order.heard.incarnation == self._incarnation:
            taken = order.heard.number
            self._reports = [report for report in self._reports if report.number > taken]

    def runs_are(self, tokens: frozenset[str]) -> bool:
        """Of runs that live here. Whether a round is due by that."""
        changed, self._tokens = tokens != self._tokens, tokens
        if changed:
            self._due_ns = None
        return changed

    def next(self, now_ns: int) -> Round | None:
        order = self._order
        if order is None:
            return None
        if order.probe and order.probe != self._answered:
            only = ("--check", order.check) if order.check else ()
            validation = order.validation if not order.check else ()
            program = (*order.program, *only)
            return Round(program, order.limit_ns, validation, order.validation_limit_ns, order.probe)
        if self._due_ns is None or now_ns >= self._due_ns:
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
        self._number += 1
        report = HealthReport(number=self._number, probe=due.probe, lines=lines, failure=failure[:1000])
        self._reports.append(report)
        while len(self._reports) > MAX_REPORTS:
            old = next((one for one in self._reports if not one.probe or one.probe != self._answered), report)
            self._reports.remove(old)

    def reports(self) -> tuple[HealthReport, ...]:
        return tuple(self._reports)
