"""Checks of this node as the managers order them: periodically, before and after runs, and when they ask for a probe.

    orders ──> what is due (`core.health.rounds`) ──> program ──> report ──> Sync, until the manager has taken it
        └────> what follows events ─────────────────────────────────┘

One round runs at a time, beside the agent's loop: nothing that a rank or a guard waits for waits for a check.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.health_event import SEVERITIES, HealthEvent
from fireflyer.base.units import counted
from fireflyer.cluster.agent.health_follower import HealthFollower
from fireflyer.cluster.agent.health_program import Printed, refused, run_health_program
from fireflyer.cluster.core.health.rounds import HealthRounds, Round, of_idle_node
from fireflyer.cluster.core.node_check import SOUND, SUSPECT
from fireflyer.cluster.schema.sync import SHIPPED_VALIDATE, VALIDATION, HealthOrder, HealthReport
from fireflyer.runtime.clock import BootClock

__all__ = ["NodeChecks", "validation_event"]

_log = logging.getLogger(__name__)


class NodeChecks:
    """`run` until it is cancelled. `on_report` is called when there is a report for the managers."""

    def __init__(
        self, incarnation: int, on_report: Callable[[], None], *, any_program: bool = True, state: str = ""
    ) -> None:
        """`any_program`: that managers name; else those that `refused` lets pass. `state`: directory for the counters
        of what comes with Fire-Flyer, apart from those of people who run it; empty: theirs."""
        self._any_program = any_program
        self._state = state
        self._follower = HealthFollower(self._happened, any_program=any_program, state=state)
        self._on_report = on_report
        self._rounds = HealthRounds(incarnation)
        self._clock = BootClock()
        self._news = asyncio.Event()
        self._told = ""

    def hear(self, order: HealthOrder | None) -> None:
        self._rounds.hear(order, time.time_ns())
        self._follower.hear(order)
        self._news.set()

    def runs_are(self, tokens: frozenset[str]) -> None:
        """Runs that live on this node now: a new one, and the end of one, ask for a round."""
        if self._rounds.runs_are(tokens):
            self._news.set()

    def reports(self) -> tuple[HealthReport, ...]:
        return self._rounds.reports()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follower.run())
            tasks.create_task(self._run_rounds())

    def _happened(self, lines: tuple[bytes, ...]) -> None:
        self._rounds.happened(lines)
        self._on_report()

    async def _run_rounds(self) -> None:
        while True:
            due = self._rounds.next(self._clock.now_ns())
            if due is not None:
                await self._carry_out(due)
                continue
            self._news.clear()
            try:
                async with asyncio.timeout(self._rounds.wait_s(self._clock.now_ns())):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _carry_out(self, due: Round) -> None:
        validated = await self._run(due.validation, due.validation_limit_ns) if due.validation else None
        idle = self._rounds.idle
        printed = await self._run(due.program, due.limit_ns, idle=idle)  # after it: what the kernel logged under load
        lines = printed.lines
        if idle and not self._rounds.idle:
            lines = tuple(line for line in lines if not of_idle_node(line))
        if validated is not None:
            lines = (*lines[:255], msgspec.json.encode(validation_event(validated, due.validation[0])))
        self._tell(printed.failure)
        self._rounds.done(due, lines, printed.failure)
        self._on_report()

    async def _run(self, program: tuple[str, ...], limit_ns: int, *, idle: bool = False) -> Printed:
        words = "" if self._any_program else refused(program)
        if words:
            return Printed(failure=words)
        return await run_health_program(program, limit_ns, self._state, idle=idle)

    def _tell(self, failure: str) -> None:
        """Once."""
        if failure and failure != self._told:
            _log.warning("checks of this node came to no result reason=%s", failure)
        self._told = failure


def validation_event(printed: Printed, program: str) -> HealthEvent:
    """What the validation of a node has come to, as an event of the check `VALIDATION`."""
    now_ns = time.time_ns()
    words = _words_of_validators(printed) if program == SHIPPED_VALIDATE else _last_words(printed)
    if printed.exit_code == SOUND:
        return HealthEvent(check=VALIDATION, severity="ok", words=words, seen_ns=now_ns)
    if printed.exit_code == SUSPECT:
        return HealthEvent(check=VALIDATION, severity="high", words=words, seen_ns=now_ns)
    said = f": {words}" if program == SHIPPED_VALIDATE and words else ""
    failure = printed.failure or f"{program} exited with code {printed.exit_code}, which is neither 0 nor 2{said}"
    return HealthEvent(check=VALIDATION, severity="warn", could_not_run=True, words=failure[:400], seen_ns=now_ns)


def _words_of_validators(printed: Printed) -> str:
    """Of the worst event of `ff validate --json`; how many passed where none is bad."""
    events = []
    for line in printed.lines:
        with contextlib.suppress(*DECODE_ERRORS):
            events.append(decode_json(line, HealthEvent))
    if not events:
        return _last_words(printed)
    worst = max(events, key=lambda event: SEVERITIES.index(event.severity))
    if worst.severity == "ok":
        return f"{counted(len(events), 'validator')} passed"
    return f"{worst.check}: {worst.words}"[:400]


def _last_words(printed: Printed) -> str:
    text = printed.lines[-1].decode(errors="replace") if printed.lines else ""
    return "".join(char for char in text if char.isprintable())[:400]
