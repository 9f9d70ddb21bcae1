"""What must be true of a demonstration, computed from its facts. Pure; it fails on any difference.

Every check is made of what was seen. What was not seen is a difference too: a loss that nobody reported, a file that is
missing, a fault that broke nothing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from fireflyer.base.events import CheckpointReport, Logged, ResumeReport, StepReport
from fireflyer.checkpoint.core.names import candidates
from fireflyer.recipes.whole.facts import Facts, Fault, FileFact, Reference, RunFacts, TaskFacts
from fireflyer.recipes.whole.plan import TaskPlan, WholePlan

__all__ = ["Check", "judge"]

MAX_PROBLEMS: Final = 5
"""Of one check that are told one by one."""


class Check(msgspec.Struct, frozen=True):
    name: str
    good: bool
    text: str
    """What was found; of a failed check, the differences."""


def judge(plan: WholePlan, facts: Facts) -> list[Check]:
    """In the order in which they are shown. The demonstration succeeded if all are good."""
    checks: list[tuple[str, Callable[[WholePlan, Facts], tuple[str, list[str]]]]] = [
        ("course", _course),
        ("tasks", _tasks),
        ("losses", _losses),
        ("starts", _starts),
        ("storage node", _storage),
        ("storage traffic", _traffic),
        ("compute node", _node),
        ("interruption", _interruption),
        ("files", _files),
        ("checkpoints", _checkpoints),
    ]
    found = []
    for name, check in checks:
        text, problems = check(plan, facts)
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        found.append(Check(name, not problems, "; ".join(problems[:MAX_PROBLEMS]) + more if problems else text))
    return found


def _task(facts: Facts, name: str) -> TaskFacts | None:
    return next((task for task in facts.tasks if task.name == name), None)


def _fault(facts: Facts, kind: str) -> Fault | None:
    return next((fault for fault in facts.faults if fault.kind == kind), None)


def _course(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    missing = [kind for kind in ("storage", "node", "urgent") if _fault(facts, kind) is None]
    problems = [*facts.trouble, *(f"the disturbance {kind!r} did not take place" for kind in missing)]
    return f"{len(plan.all_tasks)} tasks, {len(facts.faults)} disturbances", problems


def _tasks(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    problems = []
    for wanted in plan.all_tasks:
        task = _task(facts, wanted.name)
        if task is None:
            problems.append(f"task {wanted.name} was not submitted")
        elif (task.state, task.outcome) != ("finished", "succeeded"):
            problems.append(f"task {task.name} is {task.state} {task.outcome}: {task.reason}")
        elif task.user != wanted.user:
            problems.append(f"task {task.name} belongs to {task.user}, not to {wanted.user}")
        elif sum(task.account.values()) != (task.ended_ns or 0) - task.submitted_ns:
            problems.append(f"the parts of task {task.name} do not add up to its life")
    users = len({task.user for task in facts.tasks})
    return f"{len(facts.tasks)} tasks of {users} users have finished, all with success", problems


# --- losses ---


def _bits(loss: float) -> bytes:
    return struct.pack("<d", loss)


def _losses(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    problems: list[str] = []
    compared = 0
    for wanted in plan.all_tasks:
        task, reference = _task(facts, wanted.name), facts.references.get(wanted.name)
        if task is None or reference is None:
            problems.append(f"task {wanted.name} has no losses to compare")
            continue
        problems += _reference_problems(wanted, reference)
        found, problem = _compare(wanted, task, reference)
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


def _compare(wanted: TaskPlan, task: TaskFacts, reference: Reference) -> tuple[int, list[str]]:
    compared, problems = 0, []
    reported: dict[int, set[int]] = {rank: set() for rank in range(wanted.nodes)}
    for run in task.runs:
        for event in _steps(run.log):
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
        elif missing := sorted(everything - steps):
            problems.append(f"task {wanted.name}: rank {rank} reported no loss of step {missing[0]}")
    return compared, problems


def _steps(log: Sequence[Logged]) -> list[StepReport]:
    return [entry.event for entry in log if isinstance(entry.event, StepReport)]


# --- where tasks went on ---


def _starts(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    """Each start goes on from a checkpoint that is no older than the newest of which the commit was reported."""
    problems, again = [], 0
    for wanted in plan.all_tasks:
        task = _task(facts, wanted.name)
        newest = 0
        for run in task.runs if task is not None else ():
            for attempt, resumed in _resumes(run.log):
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


def _resumes(log: Sequence[Logged]) -> list[tuple[int, set[tuple[int, str]]]]:
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


# --- disturbances ---


def _storage(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    fault = _fault(facts, "storage")
    if fault is None:
        return "", ["no storage node was killed"]
    problems = []
    if not fault.killed:
        problems.append("no process of the storage node was there to be killed")
    if fault.failed_ns is None:
        problems.append("the storage node was never seen to count as failed")
    if fault.over_ns is None or fault.whole_ns is None:
        problems.append("the storage node did not come back, or not every chain became whole again")
    last = facts.storage[-1] if facts.storage else None
    if last is None or len(last.alive) != plan.storage_nodes or last.whole != last.chains or not last.chains:
        problems.append("at the end not all storage nodes live, or not every chain is whole")
    if any(sample.serving < sample.chains for sample in facts.storage):
        problems.append("a chain had no replica that serves")
    took_s = ((fault.whole_ns or 0) - fault.at_ns) / 1e9
    return f"storage node {fault.what} was killed; every chunk had all replicas again after {took_s:.1f} s", problems


def _traffic(_plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    """Without errors, also while the storage node was away, and after it was back."""
    problems = [f"a {one.kind} failed: {one.error}" for one in facts.operations if one.error]
    fault = _fault(facts, "storage")
    failed_ns, over_ns, whole_ns = (None,) * 3 if fault is None else (fault.failed_ns, fault.over_ns, fault.whole_ns)
    for kind in ("write", "read"):
        ends_ns = [one.end_ns for one in facts.operations if one.kind == kind and not one.error]
        if failed_ns is None or over_ns is None or not any(failed_ns < end_ns < over_ns for end_ns in ends_ns):
            problems.append(f"no {kind} was done while the storage node was away")
        if whole_ns is None or not any(end_ns > whole_ns for end_ns in ends_ns):
            problems.append(f"no {kind} was done after the failure")
    longest_s = max((one.end_ns - one.begin_ns for one in facts.operations), default=0) / 1e9
    count = len(facts.operations)
    return (
        f"{count:,} writes and reads, none failed, each read gave what was written; longest {longest_s:.1f} s",
        problems,
    )


def _node(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    fault = _fault(facts, "node")
    if fault is None:
        return "", ["no compute node was killed"]
    task, problems = _task(facts, fault.task), []
    if fault.killed < 2:
        problems.append(f"{fault.killed} processes of {fault.what} were killed, not the agent and its part of a run")
    if fault.over_ns is None:
        problems.append(f"{fault.what} did not come back")
    if task is None:
        return "", [*problems, f"task {fault.task} is not there"]
    again = [
        (run.number, attempt, resumed)
        for run in task.runs
        for attempt, resumed in _resumes(run.log)
        if _begins_after(run, attempt, fault.at_ns)
    ]
    went_on = [step for _, _, resumed in again for step, _ in resumed]
    if not went_on:
        problems.append(f"task {fault.task} did not start again after it had lost {fault.what}")
    elif min(went_on) < plan.checkpoint_every:
        problems.append(f"task {fault.task} began at step {min(went_on)} again, not from a checkpoint")
    return (
        f"{fault.what} was killed with its part of {fault.task}, which went on from step {min(went_on, default=0)}",
        problems,
    )


def _begins_after(run: RunFacts, attempt: int, at_ns: int) -> bool:
    """Whether the ranks of this attempt resumed after `at_ns`."""
    if run.log_begins_ns is None:
        return False
    return any(
        run.log_begins_ns + entry.at_ns > at_ns
        for entry in run.log
        if isinstance(entry.event, ResumeReport) and entry.event.attempt == attempt
    )


def _interruption(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    urgent = _task(facts, plan.urgent.name)
    if urgent is None or not urgent.runs:
        return "", [f"task {plan.urgent.name} never ran"]
    left = [
        (task, run)
        for task in facts.tasks
        for run in task.runs
        if task is not urgent and run.cause == "suspended" and task.priority < urgent.priority
    ]
    if not left:
        return "", [f"no task of lower priority saved and left its nodes for {urgent.name}"]
    problems = []
    task, run = left[0]
    last = max((event.step for event in _steps(run.log)), default=0)
    after = [one for one in task.runs if one.number > run.number]
    resumed = {step for one in after[:1] for _, starts in _resumes(one.log)[:1] for step, _ in starts}
    if not after:
        problems.append(f"task {task.name} did not run again after it had left its nodes")
    elif resumed != {last}:
        problems.append(f"task {task.name} left at step {last} and went on from {sorted(resumed)}: steps were lost")
    if not set(urgent.runs[0].nodes) & set(run.nodes):
        problems.append(f"{urgent.name} did not get the nodes that {task.name} had left")
    if urgent.runs[0].scheduled_ns < run.over_ns:
        problems.append(f"{urgent.name} got its nodes before the run of {task.name} was over")
    return f"{task.name} saved step {last}, left its nodes to {urgent.name}, and went on from step {last}", problems


def _files(_plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    stored, twins = _by_path(facts.stored), _by_path(facts.twins)
    problems = [f"{path} is not in the file system" for path in sorted(set(twins) - set(stored))]
    problems += [f"{path} is in the file system and has no twin" for path in sorted(set(stored) - set(twins))]
    problems += [
        f"{path} differs from its twin" for path in sorted(set(stored) & set(twins)) if stored[path] != twins[path]
    ]
    if not twins:
        problems.append("no file was written")
    size = sum(one.bytes for one in facts.stored)
    return f"all {len(stored)} files in the file system, {size:,} bytes, equal their twins", problems


def _checkpoints(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    """The last checkpoint of each task holds weights, moments and random generators as if nothing had happened."""
    problems, count = [], 0
    for wanted in plan.all_tasks:
        reference = facts.references.get(wanted.name)
        right = reference.shards if reference is not None else {}
        found = facts.shards.get(wanted.name, {})
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
