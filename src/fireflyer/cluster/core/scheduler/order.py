"""Who comes first: priority with age, then usage over share, then first submission."""

from __future__ import annotations

from collections.abc import Mapping

from fireflyer.cluster.core.scheduler.model import Policy, Snapshot, Task

__all__ = ["aged_priority", "may_interrupt", "queue_key", "usage_over_share"]

LEAST_SHARE = 1.0
"""Of a user who has none: their usage counts most."""


def aged_priority(task: Task, now_ns: int, policy: Policy) -> int:
    """Of a task that waits. It grows by one for each `age_step_ns`, so it passes every newcomer's in the end."""
    return task.request.priority + max(0, now_ns - task.queued_ns) // policy.age_step_ns


def usage_over_share(user: str, usage: Mapping[str, float], share: Mapping[str, float]) -> float:
    return usage.get(user, 0.0) / max(share.get(user, 0.0), LEAST_SHARE)


def queue_key(task: Task, now_ns: int, snapshot: Snapshot) -> tuple[int, float, int, int]:
    """Ascending: who comes first has the least."""
    ratio = usage_over_share(task.request.user, snapshot.usage, snapshot.share)
    return -aged_priority(task, now_ns, snapshot.policy), ratio, task.submitted_ns, task.id


def may_interrupt(waiting: Task, running: Task, now_ns: int, snapshot: Snapshot) -> bool:
    """Whether a task that waits may have the nodes of one that runs. What runs keeps the age that it had when it began
    for as long as it takes to be a step older, and then counts with the priority that it was submitted with: so two
    that have waited alike do not take turns at once, and none keeps its nodes for ever because it once waited."""
    run = running.run
    if run is None or run.leaving:
        return False
    if run.backfilled:
        return queue_key(waiting, now_ns, snapshot) < queue_key(running, now_ns, snapshot)
    if now_ns - run.started_ns < running.request.guaranteed_ns:
        return False
    if waiting.request.priority > running.request.priority:
        return True
    if waiting.request.user == running.request.user:
        return False
    aged = aged_priority(waiting, now_ns, snapshot.policy)
    recent = now_ns - run.started_ns < snapshot.policy.age_step_ns
    its = aged_priority(running, run.started_ns, snapshot.policy) if recent else running.request.priority
    if aged != its:
        return aged > its
    theirs = usage_over_share(running.request.user, snapshot.usage, snapshot.share)
    return theirs > snapshot.policy.usage_margin * usage_over_share(
        waiting.request.user, snapshot.usage, snapshot.share
    )
