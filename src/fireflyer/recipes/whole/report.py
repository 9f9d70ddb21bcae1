"""What is said of a demonstration, the same for a terminal and for the page: rows, lanes and curves. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.analytics import JobAccount
from fireflyer.analytics.report import Row, one_line
from fireflyer.base.events import StepReport
from fireflyer.base.units import MIB, SECOND, format_duration
from fireflyer.recipes.testbed.facts import Reference, TaskFacts
from fireflyer.recipes.testbed.task_checks import Check
from fireflyer.recipes.whole.efficiency import TaskEttr, accounts_of, ettr_of, lost_between
from fireflyer.recipes.whole.facts import Facts, Fault, Operation
from fireflyer.recipes.whole.pictures import Band, Curve, Mark
from fireflyer.recipes.whole.plan import WholePlan
from fireflyer.recipes.whole.timeline import Lane, degraded, lanes

__all__ = ["FaultNote", "LossCurves", "WholeReport", "report_of", "throughput"]

BIN_NS: Final = SECOND
_SEE: Final = "see the checks"


class FaultNote(msgspec.Struct, frozen=True):
    number: int
    at_ns: int
    text: str


class LossCurves(msgspec.Struct, frozen=True):
    task: str
    note: str
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    """Steps at which the task stopped and went on later."""


class WholeReport(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    headline: str
    checks: tuple[Row, ...]
    faults: tuple[FaultNote, ...]
    lanes: tuple[Lane, ...]
    end_ns: int
    losses: tuple[LossCurves, ...]
    throughput: tuple[Curve, ...]
    throughput_marks: tuple[Mark, ...]
    throughput_bands: tuple[Band, ...]
    storage: tuple[Row, ...]
    ettr: tuple[TaskEttr, ...]
    lost: tuple[Row, ...]


def report_of(plan: WholePlan, facts: Facts, checks: Sequence[Check], *, took_ns: int) -> WholeReport:
    """`took_ns`: of the whole command."""
    ok = all(check.good for check in checks)
    failed = sum(not check.good for check in checks)
    verdict = f"All {len(checks)} checks hold" if ok else f"{failed} of {len(checks)} checks failed"
    notes = [FaultNote(number, fault.at_ns, _told(fault)) for number, fault in enumerate(facts.faults, 1)]
    storage = next((fault for fault in facts.faults if fault.kind == "storage"), None)
    tasks = {task.name: task for task in facts.tasks}
    planned = [(wanted, tasks[wanted.name]) for wanted in plan.all_tasks if wanted.name in tasks]
    return WholeReport(
        ok=ok,
        headline=f"{verdict}: {len(tasks)} tasks on {plan.nodes} nodes through {len(notes)} disturbances, in "
        f"{format_duration(facts.end_ns)} of {format_duration(took_ns)} with the undisturbed runs.",
        checks=tuple(Row(one.name, one_line(one.text, 600), mark="good" if one.good else "bad") for one in checks),
        faults=tuple(notes),
        lanes=tuple(lanes(plan, facts)),
        end_ns=facts.end_ns,
        losses=tuple(_curves(task, facts.references.get(task.name)) for _, task in planned),
        throughput=throughput(facts.operations, facts.end_ns),
        throughput_marks=tuple(Mark(note.at_ns / SECOND, str(note.number)) for note in notes),
        throughput_bands=tuple(Band(begin / SECOND, end / SECOND) for begin, end in degraded(facts.storage)),
        storage=tuple(_storage_rows(facts, storage)),
        ettr=tuple(ettr_of(wanted, task) for wanted, task in planned),
        lost=tuple(_lost(facts, plan, {check.name for check in checks if not check.good})),
    )


def _told(fault: Fault) -> str:
    match fault.kind:
        case "storage":
            return f"SIGKILL to storage node {fault.what}, until the manager counts it as failed"
        case "node":
            return f"SIGKILL to {fault.what}: its agent and its part of {fault.task}, {fault.killed} processes"
        case _:
            return f"task {fault.what} is submitted, of a higher priority than all that run"


# --- losses ---


def _curves(task: TaskFacts, reference: Reference | None) -> LossCurves:
    under = () if reference is None else tuple((float(step), loss) for step, loss in sorted(reference.losses.items()))
    starts = [
        {
            entry.event.step: entry.event.loss
            for entry in run.log
            if isinstance(entry.event, StepReport)
            and (entry.event.rank, entry.event.attempt) == (0, attempt)
            and entry.event.loss is not None
        }
        for run in task.runs
        for attempt in sorted({one.event.attempt for one in run.log if isinstance(one.event, StepReport)})
    ]
    over: list[tuple[float, float]] = []
    marks = []
    for number, steps in enumerate(starts):
        if number and over:
            over.append((over[-1][0], math.nan))  # the pen is lifted between two starts
            marks.append(Mark(float(min(steps, default=0)), "↻"))
        over += [(float(step), loss) for step, loss in sorted(steps.items())]
    cached = " (computed earlier, with the same code)" if reference is not None and reference.cached else ""
    return LossCurves(
        task=task.name,
        note=f"{len(starts)} start{'s' if len(starts) != 1 else ''}; the undisturbed curve{cached} lies below",
        curves=(Curve("undisturbed", "under", under), Curve("as it ran", "over", tuple(over))),
        marks=tuple(marks),
    )


# --- storage ---


def throughput(operations: Sequence[Operation], end_ns: int) -> tuple[Curve, ...]:
    """MiB/s of writes and reads; the bytes of an operation are spread over the time that it took."""
    curves = []
    for kind in ("write", "read"):
        bins = [0.0] * max(1, math.ceil(end_ns / BIN_NS))
        for one in operations:
            if one.kind != kind or one.error:
                continue
            took_ns = max(1, one.end_ns - one.begin_ns)
            for number in range(max(0, one.begin_ns // BIN_NS), min(len(bins) - 1, one.end_ns // BIN_NS) + 1):
                inside_ns = min(one.end_ns, (number + 1) * BIN_NS) - max(one.begin_ns, number * BIN_NS)
                bins[number] += one.bytes * max(0, inside_ns) / took_ns
        points = tuple(
            ((number + 0.5) * BIN_NS / SECOND, value / MIB * SECOND / BIN_NS) for number, value in enumerate(bins)
        )
        curves.append(Curve(f"{kind}s", kind, points))
    return tuple(curves)


def _storage_rows(facts: Facts, fault: Fault | None) -> list[Row]:
    rows = []
    whole_ns = None if fault is None else fault.whole_ns
    spans = [("whole time", 0, facts.end_ns)]
    if fault is not None and whole_ns is not None:
        spans += [("through failure", fault.at_ns, whole_ns)]
    for label, begin_ns, end_ns in spans:
        done = [one for one in facts.operations if not one.error and begin_ns <= one.begin_ns < end_ns]
        if done and end_ns > begin_ns:
            rate = sum(one.bytes for one in done) / MIB / ((end_ns - begin_ns) / SECOND)
            longest = max(one.end_ns - one.begin_ns for one in done)
            note = f"{len(done):,} writes and reads in {format_duration(end_ns - begin_ns)}"
            rows.append(Row(label, f"{rate:.1f} MiB/s", f"{note}, the longest took {format_duration(longest)}"))
    size = sum(one.bytes for one in facts.stored)
    rows.append(Row("files at the end", f"{len(facts.stored)}", f"{size / MIB:.1f} MiB, each read back"))
    return rows


# --- what was lost ---


def _lost(facts: Facts, plan: WholePlan, failed: set[str]) -> list[Row]:
    """`failed`: checks; what they have not shown is not claimed."""
    rows = []
    for fault in facts.faults:
        task = next((one for one in facts.tasks if one.name == fault.task), None)
        match fault.kind:
            case "storage":
                took_ns = (fault.whole_ns or facts.end_ns) - fault.at_ns
                note = (
                    f"each chunk has {plan.replicas} replicas on different nodes; those on storage node {fault.what} "
                    f"were brought up to date {format_duration(took_ns)} after its death"
                )
                rows.append(Row(f"storage {fault.what} killed", _SEE if "files" in failed else "no byte", note))
            case "node" if task is not None:
                rows += _lost_with_node(fault, accounts_of(task))
            case _:
                rows += _lost_by_interruption(facts, _SEE if "interruption" in failed else "no step")
    return rows


def _lost_with_node(fault: Fault, jobs: Sequence[JobAccount]) -> list[Row]:
    failures = [failure for job in jobs for failure in job.failures]
    steps = sum(failure.lost_steps for failure in failures) + lost_between(jobs)
    lost_ns = sum(job.parts.lost_ns for job in jobs)
    restart_ns = sum(job.parts.restart_ns for job in jobs)
    reason = f" ({one_line(failures[0].reason, 120)})" if failures else ""
    note = (
        f"done since the last checkpoint, and so done again: {format_duration(lost_ns)}; "
        f"{format_duration(restart_ns)} until all ranks had resumed{reason}"
    )
    return [Row(f"{fault.what} killed", f"{steps} step{'s' if steps != 1 else ''} of {fault.task}", note)]


def _lost_by_interruption(facts: Facts, lost: str) -> list[Row]:
    rows = []
    for task in facts.tasks:
        for run in task.runs:
            if run.cause != "suspended":
                continue
            after = next((one for one in task.runs if one.number == run.number + 1), None)
            waited = "" if after is None else f"; it waited {format_duration(max(0, after.scheduled_ns - run.over_ns))}"
            why = one_line(run.leave_reason, 120) or "for a task of higher priority"
            rows.append(Row(f"{task.name} interrupted", lost, f"it saved before it left ({why}){waited}"))
    return rows
