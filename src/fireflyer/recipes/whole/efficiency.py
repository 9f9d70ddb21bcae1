"""The effective training time ratio of a task over all its runs: measured, and by formula 1 of `analytics.ettr` with
every term filled in. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from fireflyer.analytics import JobAccount, account
from fireflyer.analytics.ettr import EttrInputs, expected_of, filled_formula
from fireflyer.analytics.report import Row
from fireflyer.base.units import SECOND
from fireflyer.recipes.whole.facts import TaskFacts
from fireflyer.recipes.whole.plan import TaskPlan

__all__ = ["TaskEttr", "accounts_of", "ettr_of", "lost_between"]

_DAY_S = 86_400.0


class TaskEttr(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    measured: float
    """Productive time over the task's life, from its submission to its end."""
    expected: float | None
    filled: str
    """The formula with numbers, or why it cannot be filled in."""
    terms: tuple[Row, ...]


def accounts_of(task: TaskFacts) -> list[JobAccount]:
    """Of its runs that have an event log."""
    return [account(run.log) for run in task.runs if run.log]


def lost_between(jobs: Sequence[JobAccount]) -> int:
    """Steps of a run that ended without saving them, which the next run did again."""
    return sum(max(0, earlier.last_step - later.first_step) for earlier, later in pairwise(jobs))


def ettr_of(wanted: TaskPlan, task: TaskFacts) -> TaskEttr:
    jobs = accounts_of(task)
    life_s = ((task.ended_ns or task.submitted_ns) - task.submitted_ns) / SECOND
    steps = sum(job.steps for job in jobs)
    done_s = sum(job.parts.productive_ns for job in jobs) / SECOND
    again = lost_between(jobs)
    productive_s = done_s * (1 - again / steps) if steps else 0.0
    measured = productive_s / life_s if life_s > 0 else 0.0
    periods = _periods(jobs)
    if productive_s <= 0 or not periods:
        why = "not computed: no checkpoint was committed, so the checkpoint period is unknown"
        return TaskEttr(name=task.name, measured=measured, expected=None, filled=why, terms=())
    starts = sum(job.attempts for job in jobs)
    committed = sum(one.error is None for job in jobs for one in job.checkpoints)
    failures = sum(len(job.failures) for job in jobs) + _unseen_failures(task)
    rate = failures / life_s
    begins_ns = sum((run.log_begins_ns or run.scheduled_ns) - run.scheduled_ns for run in task.runs)
    u0 = (begins_ns + sum(job.parts.startup_ns + job.parts.restart_ns for job in jobs)) / SECOND / max(1, starts)
    dt = sum(periods) / len(periods) * done_s / steps
    w = sum(job.parts.checkpoint_ns for job in jobs) / SECOND / max(1, committed)
    q = (task.account.get("queue_ns", 0) + task.account.get("suspended_ns", 0)) / SECOND / max(1, len(task.runs))
    inputs = EttrInputs(
        failures=failures,
        failures_per_s=rate,
        restart_s=u0,
        period_s=dt,
        stall_s=w,
        productive_s=productive_s,
        queue_s=q,
    )
    per_day = rate / wanted.nodes * _DAY_S
    terms = (
        Row("N·r_f", f"{rate:.4f} /s", f"{failures} in {life_s:.1f} s: N = {wanted.nodes}, r_f = {per_day:,.0f} a day"),
        Row("u0", f"{u0:.2f} s", f"restart overhead: mean of {starts} starts, until all ranks train"),
        Row("Δt", f"{dt:.2f} s", "productive time between two checkpoints"),
        Row("w", f"{w:.3f} s", f"training stood still for a checkpoint: mean of {committed}"),
        Row("q", f"{q:.2f} s", f"waiting for nodes: mean of {len(task.runs)} runs"),
        Row("R", f"{productive_s:.1f} s", "productive time"),
    )
    return TaskEttr(
        name=task.name, measured=measured, expected=expected_of(inputs), filled=filled_formula(inputs), terms=terms
    )


def _periods(jobs: Sequence[JobAccount]) -> list[int]:
    """Steps between two checkpoints that were committed one after the other in one attempt."""
    found = []
    for job in jobs:
        by_attempt: dict[int, set[int]] = {}
        for one in job.checkpoints:
            if one.error is None:
                by_attempt.setdefault(one.attempt, set()).add(one.step)
        for steps in by_attempt.values():
            found += [later - earlier for earlier, later in pairwise(sorted(steps))]
    return found


def _unseen_failures(task: TaskFacts) -> int:
    """Runs that ended by an infrastructure cause that their own log does not tell: their launcher was killed."""
    return sum(run.cause == "infrastructure" and not account(run.log).failures for run in task.runs)
