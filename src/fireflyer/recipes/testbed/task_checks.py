"""What must be true of tasks that were disturbed, and of files that were acknowledged. Pure.

Every check is made of what was seen. What was not seen is a difference too: a loss that nobody reported, a file that is
missing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import msgspec

from fireflyer.base.events import CheckpointReport, JobFinished, Logged, ResumeReport, StepReport
from fireflyer.checkpoint.core.names import candidates
from fireflyer.recipes.testbed.facts import FileFact, Reference, TaskFacts
from fireflyer.recipes.testbed.plan import TaskPlan

__all__ = [
    "Check",
    "Finding",
    "check_of",
    "ended_well",
    "newest_checkpoints",
    "resumes_of",
    "same_checkpoints",
    "same_files",
    "same_losses",
    "steps_of",
]

MAX_PROBLEMS: Final = 5
"""Of one check that are told one by one."""

Finding: TypeAlias = tuple[str, list[str]]
"""What was found, for people; the differences."""


class Check(msgspec.Struct, frozen=True):
    name: str
    good: bool
    text: str
    """What was found; of a failed check, the differences."""


def check_of(name: str, finding: Finding) -> Check:
    text, problems = finding
    more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    return Check(name, not problems, "; ".join(problems[:MAX_PROBLEMS]) + more if problems else text)


def _task(tasks: Sequence[TaskFacts], name: str) -> TaskFacts | None:
    return next((task for task in tasks if task.name == name), None)


def ended_well(plans: Sequence[TaskPlan], tasks: Sequence[TaskFacts]) -> Finding:
    """Each task is there once and has finished with success, and the parts of its time add up to its life."""
    problems = []
    for wanted in plans:
        named = [task for task in tasks if task.name == wanted.name]
        if len(named) > 1:
            problems.append(f"task {wanted.name} is there {len(named)} times")
        task = named[0] if named else None
        if task is None:
            problems.append(f"task {wanted.name} was not submitted")
        elif (task.state, task.outcome) != ("finished", "succeeded"):
            problems.append(f"task {task.name} is {task.state} {task.outcome}: {task.reason}")
        elif task.user != wanted.user:
            problems.append(f"task {task.name} belongs to {task.user}, not to {wanted.user}")
        elif sum(task.account.values()) != (task.ended_ns or 0) - task.submitted_ns:
            problems.append(f"the parts of task {task.name} do not add up to its life")
    users = len({task.user for task in tasks})
    return f"{len(tasks)} tasks of {users} users have finished, all with success", problems


# --- losses ---


def _bits(loss: float) -> bytes:
    return struct.pack("<d", loss)


def same_losses(
    plans: Sequence[TaskPlan],
    tasks: Sequence[TaskFacts],
    references: Mapping[str, Reference],
    *,
    launchers_die: bool = False,
) -> Finding:
    """Also of steps that were done twice, on every rank, bit for bit. `references`: by the name of the task.
    `launchers_die`: the log of a run that does not say how it ended may lack its last steps, as far as the next run
    went on behind them."""
    problems: list[str] = []
    compared = 0
    for wanted in plans:
        task, reference = _task(tasks, wanted.name), references.get(wanted.name)
        if task is None or reference is None:
            problems.append(f"task {wanted.name} has no losses to compare")
            continue
        problems += _reference_problems(wanted, reference)
        found, problem = _compare(wanted, task, reference, launchers_die=launchers_die)
        compared += found
        problems += problem
    return f"all {compared:,} losses that ranks reported are bitwise those of the undisturbed runs", problems


def _reference_problems(wanted: TaskPlan, reference: Reference) -> list[str]:
    if sorted(reference.losses) != list(range(1, wanted.steps + 1)):
        return [f"the undisturbed run of {wanted.name} does not have every step"]
    if not all(map(math.isfinite, reference.losses.values())):
        return [f"the undisturbed run of {wanted.name} has a loss that is not finite"]
    if reference.losses[wanted.steps] >= reference.losses[1]:
        return [f"the loss of {wanted.name} did not fall"]
    return []


def _compare(wanted: TaskPlan, task: TaskFacts, reference: Reference, *, launchers_die: bool) -> tuple[int, list[str]]:
    compared, problems = 0, []
    reported: dict[int, set[int]] = {rank: set() for rank in range(wanted.nodes)}
    for run in task.runs:
        for event in steps_of(run.log):
            right = reference.losses.get(event.step)
            if event.loss is None or right is None or _bits(event.loss) != _bits(right):
                where = f"rank {event.rank}, step {event.step}, run {run.number}, attempt {event.attempt}"
                problems.append(f"task {wanted.name}: {where}: loss {event.loss!r}, undisturbed {right!r}")
            compared += 1
            reported.setdefault(event.rank, set()).add(event.step)
    everything = set(range(1, wanted.steps + 1))
    for rank, steps in reported.items():
        if rank >= wanted.nodes:
            problems.append(f"task {wanted.name} has a rank {rank}")
        elif missing := sorted(everything - steps - (_died_with_launchers(task, rank) if launchers_die else set())):
            problems.append(f"task {wanted.name}: rank {rank} reported no loss of step {missing[0]}")
    return compared, problems


def _died_with_launchers(task: TaskFacts, rank: int) -> set[int]:
    """Steps of this rank that a log lacks because its writer was killed: the next run went on behind them."""
    lost: set[int] = set()
    for run, after in pairwise(task.runs):
        if not any(isinstance(entry.event, JobFinished) for entry in run.log):
            told = max((event.step for event in steps_of(run.log) if event.rank == rank), default=0)
            lost |= {step for _, starts in resumes_of(after.log)[:1] for step in range(told + 1, min(starts)[0] + 1)}
    return lost


def steps_of(log: Sequence[Logged]) -> list[StepReport]:
    return [entry.event for entry in log if isinstance(entry.event, StepReport)]


# --- where tasks went on ---


def newest_checkpoints(plans: Sequence[TaskPlan], tasks: Sequence[TaskFacts]) -> Finding:
    """Each start goes on from a checkpoint that is no older than the newest of which the commit was reported."""
    problems, again = [], 0
    for wanted in plans:
        task = _task(tasks, wanted.name)
        newest = 0
        for run in task.runs if task is not None else ():
            for attempt, resumed in resumes_of(run.log):
                where = f"task {wanted.name}, run {run.number}, attempt {attempt}"
                before = max([newest, *_committed(run.log, attempt)])
                if len(resumed) > 1:
                    problems.append(f"{where}: ranks went on from different checkpoints: {sorted(resumed)}")
                step, name = min(resumed)
                if step and [one.step for one in candidates([name])] != [step]:
                    problems.append(f"{where}: went on at step {step} from {name!r}, which is no checkpoint of it")
                if step < before:
                    problems.append(f"{where}: went on from step {step}, the newest checkpoint was of step {before}")
                again += bool(step)
            newest = max([newest, *_committed(run.log, None)])
    return f"{again} starts of tasks went on from the newest checkpoint", problems


def resumes_of(log: Sequence[Logged]) -> list[tuple[int, set[tuple[int, str]]]]:
    """Of each attempt, where its ranks went on: step, and name of the checkpoint."""
    found: dict[int, set[tuple[int, str]]] = {}
    for entry in log:
        if isinstance(entry.event, ResumeReport):
            found.setdefault(entry.event.attempt, set()).add((entry.event.step, entry.event.checkpoint or ""))
    return sorted(found.items())


def _committed(log: Sequence[Logged], before: int | None) -> list[int]:
    """Steps of the checkpoints of attempts before this one; None: of all."""
    reports = [entry.event for entry in log if isinstance(entry.event, CheckpointReport)]
    return [one.step for one in reports if one.error is None and (before is None or one.attempt < before)]


# --- files ---


def same_files(stored: Sequence[FileFact], twins: Sequence[FileFact]) -> Finding:
    """`stored`: all files that are there; `twins`: all that must be there."""
    found, right = _by_path(stored), _by_path(twins)
    problems = [f"{path} is not in the file system" for path in sorted(set(right) - set(found))]
    problems += [f"{path} is in the file system and has no twin" for path in sorted(set(found) - set(right))]
    problems += [
        f"{path} differs from its twin" for path in sorted(set(found) & set(right)) if found[path] != right[path]
    ]
    if not right:
        problems.append("no file was written")
    size = sum(one.bytes for one in stored)
    return f"all {len(found)} files in the file system, {size:,} bytes, equal their twins", problems


def same_checkpoints(
    plans: Sequence[TaskPlan], references: Mapping[str, Reference], shards: Mapping[str, Mapping[str, str]]
) -> Finding:
    """The last checkpoint of each task holds weights, moments and random generators as if nothing had happened."""
    problems, count = [], 0
    for wanted in plans:
        reference = references.get(wanted.name)
        right = reference.shards if reference is not None else {}
        found = shards.get(wanted.name, {})
        if len(right) != wanted.nodes:
            problems.append(f"the undisturbed run of {wanted.name} has {len(right)} shards, not {wanted.nodes}")
        problems += [
            f"{name} of the last checkpoint of {wanted.name} differs"
            for name in sorted({*right, *found})
            if right.get(name) != found.get(name)
        ]
        count += len(found)
    return f"all {count} shards of the last checkpoints are bitwise those of the undisturbed runs", problems


def _by_path(files: Sequence[FileFact]) -> dict[str, FileFact]:
    return {one.path: one for one in files}
