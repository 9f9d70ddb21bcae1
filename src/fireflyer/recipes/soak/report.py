"""What a soak tells people and programs, computed from its facts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from fireflyer.base.events import ResumeReport, StepReport
from fireflyer.base.units import SECOND, format_bytes
from fireflyer.recipes.soak.facts import FaultFact, SoakFacts
from fireflyer.recipes.soak.faults import KINDS, Kind, Lane, kind_named
from fireflyer.recipes.testbed.facts import TaskFacts
from fireflyer.recipes.testbed.task_checks import Check

__all__ = ["KindRow", "SoakReport", "lost_steps", "report_of"]


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    text: str
    faults: int
    recovered: int
    median_s: float | None
    """From when a fault was taken back until it was recovered from; None: none was."""
    worst_s: float | None
    failed: int
    """Faults after which a storage node counted as failed."""
    lost_steps: int
    """Steps of tasks that were done again."""


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    seed: int
    headline: str
    kinds: tuple[KindRow, ...]
    left_out: tuple[str, ...]
    checks: tuple[Check, ...]
    time_line: tuple[str, ...]
    """A line for each fault."""


def report_of(facts: SoakFacts, checks: Sequence[Check], *, took_ns: int) -> SoakReport:
    lost = lost_steps(facts)
    rows = [_row(kind, facts, lost) for kind in KINDS]
    written = sum(writer.bytes for writer in facts.writers)
    return SoakReport(
        ok=all(check.good for check in checks),
        seed=facts.seed,
        headline=f"{len(facts.faults)} faults in {(facts.end_ns - facts.begin_ns) / SECOND:.0f} s, {len(facts.tasks)} "
        f"tasks, {format_bytes(written)} written and acknowledged; {took_ns / SECOND:.0f} s in all, seed {facts.seed}",
        kinds=tuple(row for row in rows if row.faults),
        left_out=facts.left_out,
        checks=tuple(checks),
        time_line=tuple(_line(fault, lost.get(fault.number, 0)) for fault in facts.faults),
    )


def _row(kind: Kind, facts: SoakFacts, lost: dict[int, int]) -> KindRow:
    mine = [fault for fault in facts.faults if fault.kind == kind.name]
    times_s = [took for fault in mine if (took := _recovery_s(fault)) is not None]
    return KindRow(
        kind=kind.name,
        text=kind.text,
        faults=len(mine),
        recovered=len(times_s),
        median_s=round(statistics.median(times_s), 1) if times_s else None,
        worst_s=round(max(times_s), 1) if times_s else None,
        failed=sum(fault.failed for fault in mine),
        lost_steps=sum(lost.get(fault.number, 0) for fault in mine),
    )


def _recovery_s(fault: FaultFact) -> float | None:
    if fault.recovered_ns is None or fault.released_ns is None:
        return None
    return (fault.recovered_ns - fault.released_ns) / SECOND


def _line(fault: FaultFact, lost: int) -> str:
    held_s = ((fault.released_ns or fault.at_ns) - fault.at_ns) / SECOND
    took_s = _recovery_s(fault)
    parts = [
        f"{fault.at_ns / SECOND:7.1f} s  fault {fault.number}: {kind_named(fault.kind).text}",
        f"{fault.target}{f' with {fault.task}' if fault.task and fault.task != fault.target else ''}",
        f"for {held_s:.1f} s" if held_s >= 0.1 else "",
        "counted as failed" if fault.failed else "",
        "NOT RECOVERED" if took_s is None else f"recovered {took_s:.1f} s later",
        f"{lost} steps again" if lost else "",
    ]
    return ", ".join(part for part in parts if part)


def lost_steps(facts: SoakFacts) -> dict[int, int]:
    """By the number of a fault, steps that tasks did again because of it: each time that a task went on from a
    checkpoint behind what it had done is put down to the fault of the platform that began last before it."""
    faults = [fault for fault in facts.faults if kind_named(fault.kind).lane is Lane.PLATFORM]
    lost: dict[int, int] = {}
    for task in facts.tasks:
        for at_ns, steps in _again(task):
            before = [fault for fault in faults if fault.at_ns < at_ns]
            number = before[-1].number if before else 0
            lost[number] = lost.get(number, 0) + steps
    return lost


def _again(task: TaskFacts) -> list[tuple[int, int]]:
    """When it went on, and how many steps it had done beyond that."""
    found: list[tuple[int, int]] = []
    newest = 0
    for run in task.runs:
        attempts: set[int] = set()
        for entry in run.log:
            event = entry.event
            if isinstance(event, StepReport):
                newest = max(newest, event.step)
            elif isinstance(event, ResumeReport) and event.attempt not in attempts:
                attempts.add(event.attempt)
                if newest > event.step:
                    found.append(((run.log_begins_ns or run.scheduled_ns) + entry.at_ns, newest - event.step))
                newest = event.step
    return found
