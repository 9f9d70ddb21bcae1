"""What must be true of a demonstration, computed from its facts. Pure; it fails on any difference.

Every check is made of what was seen. What was not seen is a difference too: a loss that nobody reported, a file that is
missing, a fault that broke nothing.
"""

from __future__ import annotations

from fireflyer.base.events import ResumeReport
from fireflyer.recipes.testbed.facts import RunFacts, TaskFacts
from fireflyer.recipes.testbed.task_checks import (
    Check,
    check_of,
    ended_well,
    newest_checkpoints,
    resumes_of,
    same_checkpoints,
    same_files,
    same_losses,
    steps_of,
)
from fireflyer.recipes.whole.facts import Facts, Fault
from fireflyer.recipes.whole.plan import WholePlan

__all__ = ["judge"]


def judge(plan: WholePlan, facts: Facts) -> list[Check]:
    """In the order in which they are shown. The demonstration succeeded if all are good."""
    wanted, tasks = plan.all_tasks, facts.tasks
    return [
        check_of("course", _course(plan, facts)),
        check_of("tasks", ended_well(wanted, tasks)),
        check_of("losses", same_losses(wanted, tasks, facts.references)),
        check_of("starts", newest_checkpoints(wanted, tasks)),
        check_of("storage node", _storage(plan, facts)),
        check_of("storage traffic", _traffic(plan, facts)),
        check_of("compute node", _node(plan, facts)),
        check_of("interruption", _interruption(plan, facts)),
        check_of("files", same_files(facts.stored, facts.twins)),
        check_of("checkpoints", same_checkpoints(wanted, facts.references, facts.shards)),
    ]


def _task(facts: Facts, name: str) -> TaskFacts | None:
    return next((task for task in facts.tasks if task.name == name), None)


def _fault(facts: Facts, kind: str) -> Fault | None:
    return next((fault for fault in facts.faults if fault.kind == kind), None)


def _course(plan: WholePlan, facts: Facts) -> tuple[str, list[str]]:
    missing = [kind for kind in ("storage", "node", "urgent") if _fault(facts, kind) is None]
    problems = [*facts.trouble, *(f"the disturbance {kind!r} did not take place" for kind in missing)]
    return f"{len(plan.all_tasks)} tasks, {len(facts.faults)} disturbances", problems


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
        for attempt, resumed in resumes_of(run.log)
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
    last = max((event.step for event in steps_of(run.log)), default=0)
    after = [one for one in task.runs if one.number > run.number]
    resumed = {step for one in after[:1] for _, starts in resumes_of(one.log)[:1] for step, _ in starts}
    if not after:
        problems.append(f"task {task.name} did not run again after it had left its nodes")
    elif resumed != {last}:
        problems.append(f"task {task.name} left at step {last} and went on from {sorted(resumed)}: steps were lost")
    if not set(urgent.runs[0].nodes) & set(run.nodes):
        problems.append(f"{urgent.name} did not get the nodes that {task.name} had left")
    if urgent.runs[0].scheduled_ns < run.over_ns:
        problems.append(f"{urgent.name} got its nodes before the run of {task.name} was over")
    return f"{task.name} saved step {last}, left its nodes to {urgent.name}, and went on from step {last}", problems
