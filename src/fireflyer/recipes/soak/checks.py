"""What must be true of a soak, computed from its facts. Pure; it fails on any difference."""

from __future__ import annotations

from itertools import pairwise

from fireflyer.base.events import AttemptStarted, StepReport
from fireflyer.base.units import SECOND
from fireflyer.recipes.soak.facts import SoakFacts
from fireflyer.recipes.soak.faults import kind_named
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.testbed.facts import RunFacts, TaskFacts
from fireflyer.recipes.testbed.task_checks import (
    Check,
    Finding,
    check_of,
    ended_well,
    newest_checkpoints,
    same_checkpoints,
    same_files,
    same_losses,
)

__all__ = ["judge"]


def judge(plan: SoakPlan, facts: SoakFacts) -> list[Check]:
    """In the order in which they are shown. The soak succeeded if all are good."""
    return [
        check_of("faults", _faults(facts)),
        check_of("tasks", _tasks(facts)),
        check_of("runs", _runs(facts)),
        check_of("losses", same_losses(facts.plans, facts.tasks, facts.references, launchers_die=True)),
        check_of("starts", newest_checkpoints(facts.plans, facts.tasks)),
        check_of("checkpoints", same_checkpoints(facts.plans, facts.references, facts.shards)),
        check_of("writers", _writers(facts)),
        check_of("files", same_files(facts.stored, facts.twins)),
        check_of("storage", _storage(plan, facts)),
        check_of("fsck", _fsck(facts)),
    ]


def _faults(facts: SoakFacts) -> Finding:
    """There were some, each reached something, and each was recovered from within its limit."""
    problems = list(facts.trouble)
    if not facts.faults:
        problems.append("there was no fault")
    for fault in facts.faults:
        kind = kind_named(fault.kind)
        name = f"fault {fault.number}, {kind.name}"
        if not fault.reached:
            problems.append(f"{name}: it reached nothing")
        elif fault.released_ns is None:
            problems.append(f"{name}: it was not taken back")
        elif fault.recovered_ns is None:
            problems.append(f"{name}: not recovered from")
        elif fault.recovered_ns - fault.released_ns > fault.allowed_ns:
            took_s = (fault.recovered_ns - fault.released_ns) / SECOND
            problems.append(f"{name}: recovered from after {took_s:.0f} s, {fault.allowed_ns // SECOND} s are allowed")
    kinds = len({fault.kind for fault in facts.faults})
    return f"all {len(facts.faults)} faults of {kinds} kinds were recovered from", problems


def _tasks(facts: SoakFacts) -> Finding:
    text, problems = ended_well(facts.plans, facts.tasks)
    wanted = {plan.name for plan in facts.plans}
    problems += [f"task {task.name} was not submitted by the soak" for task in facts.tasks if task.name not in wanted]
    return text, problems


def _runs(facts: SoakFacts) -> Finding:
    """No two runs of a task, and no two attempts of a run, trained at the same time, and none did a step twice."""
    problems = [problem for task in facts.tasks for problem in (*_two_runs(task), *_two_attempts(task))]
    runs = sum(len(task.runs) for task in facts.tasks)
    attempts = sum(isinstance(entry.event, AttemptStarted) for task in facts.tasks for run in task.runs
                   for entry in run.log)  # fmt: skip
    return f"{runs} runs with {attempts} attempts, never two of a task at the same time", problems


def _two_runs(task: TaskFacts) -> list[str]:
    problems = []
    for earlier, later in pairwise(task.runs):
        if later.scheduled_ns < earlier.over_ns:
            problems.append(f"task {task.name}: run {later.number} got nodes before run {earlier.number} was over")
        ended_ns, begun_ns = _span(earlier), _span(later)
        if ended_ns is not None and begun_ns is not None and begun_ns[0] < ended_ns[1]:
            problems.append(f"task {task.name}: run {later.number} trained while run {earlier.number} did")
    return problems


def _span(run: RunFacts) -> tuple[int, int] | None:
    """Of its first and its last step that was reported."""
    at_ns = [entry.at_ns for entry in run.log if isinstance(entry.event, StepReport)]
    if run.log_begins_ns is None or not at_ns:
        return None
    return run.log_begins_ns + min(at_ns), run.log_begins_ns + max(at_ns)


def _two_attempts(task: TaskFacts) -> list[str]:
    problems = []
    for run in task.runs:
        newest, done = 0, set[tuple[int, int, int]]()
        for entry in run.log:
            event = entry.event
            if not isinstance(event, StepReport):
                continue
            where = f"task {task.name}, run {run.number}, rank {event.rank}"
            if event.attempt < newest:
                problems.append(f"{where}: a step of attempt {event.attempt} after one of attempt {newest}")
            key = event.attempt, event.rank, event.step
            if key in done:
                problems.append(f"{where}: step {event.step} twice in attempt {event.attempt}")
            newest = max(newest, event.attempt)
            done.add(key)
    return problems


def _writers(facts: SoakFacts) -> Finding:
    problems = [] if facts.writers else ["there were no writers"]
    for writer in facts.writers:
        if not writer.acknowledged or not writer.reads:
            problems.append(f"writer {writer.name}: nothing was acknowledged, or nothing was read back")
        if writer.stuck:
            problems.append(f"writer {writer.name}: {writer.stuck}")
        problems += [f"writer {writer.name}: {wrong}" for wrong in writer.wrong_reads]
    acknowledged = sum(writer.acknowledged for writer in facts.writers)
    reads = sum(writer.reads for writer in facts.writers)
    longest_s = max((writer.longest_ns for writer in facts.writers), default=0) / SECOND
    return (
        f"{acknowledged:,} operations were acknowledged, each of {reads:,} reads gave what was written last; longest "
        f"{longest_s:.1f} s",
        problems,
    )


def _storage(plan: SoakPlan, facts: SoakFacts) -> Finding:
    last = facts.storage
    if last is None or len(last.alive) != plan.storage_nodes or last.whole != last.chains or not last.chains:
        return "", ["at the end not all storage nodes live, or not every chain is whole"]
    return f"{len(last.alive)} storage nodes live, {last.whole} of {last.chains} chains are whole", []


def _fsck(facts: SoakFacts) -> Finding:
    last = facts.fsck[-1] if facts.fsck else ""
    if facts.fsck_code == 0:
        return f"ff fs fsck: {last}", []
    how = "did not end" if facts.fsck_code is None else f"ended with {facts.fsck_code}"
    return "", [f"ff fs fsck {how}", *facts.fsck]
