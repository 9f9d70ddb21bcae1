"""Who comes first: priority with age, then usage over share, then first submission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from fireflyer.base.errors import InvariantViolation
from fireflyer.cluster.core.scheduler.model import Policy, Request, Task

__all__ = [
    "QueueKey",
    "Standing",
    "aged_priority",
    "ages_next_ns",
    "counts_as",
    "head_start_ns",
    "may_interrupt",
    "queue_key",
    "usage_over_share",
    "waits_since_ns",
]

QueueKey: TypeAlias = tuple[int, float, int, int]

LEAST_SHARE = 1.0
"""Of a user who has none: their usage counts most."""


class Standing(Protocol):
    """What the order depends on beside tasks and time; such as a standing."""

    @property
    def policy(self) -> Policy: ...
    @property
    def usage(self) -> Mapping[str, float]: ...
    @property
    def share(self) -> Mapping[str, float]: ...


def head_start_ns(request: Request, policy: Policy) -> int:
    """The age with which a task is submitted: that of its gang."""
    return (request.least_nodes.bit_length() - 1) * policy.gang_age_ns


def aged_priority(task: Task, now_ns: int, policy: Policy) -> int:
    """Of a task that waits. It grows by one for each `age_step_ns`, so it passes every newcomer's in the end."""
    age_ns = head_start_ns(task.request, policy) + max(0, now_ns - task.queued_ns)
    return task.request.priority + age_ns // policy.age_step_ns


def ages_next_ns(task: Task, now_ns: int, policy: Policy) -> int:
    """When its aged priority is the next time one higher."""
    step_ns, head_ns = policy.age_step_ns, head_start_ns(task.request, policy)
    return task.queued_ns - head_ns + ((head_ns + max(0, now_ns - task.queued_ns)) // step_ns + 1) * step_ns


def waits_since_ns(queued_ns: int, started_ns: int, now_ns: int) -> int:
    """`queued_ns` of a task whose run ends now. It keeps the age that it had when the run began: a suspended task has
    its place again, and does not wait anew behind all who came meanwhile."""
    return now_ns - max(0, started_ns - queued_ns)


def usage_over_share(user: str, usage: Mapping[str, float], share: Mapping[str, float]) -> float:
    return usage.get(user, 0.0) / max(share.get(user, 0.0), LEAST_SHARE)


def queue_key(task: Task, now_ns: int, standing: Standing) -> QueueKey:
    """Ascending: who comes first has the least."""
    ratio = usage_over_share(task.request.user, standing.usage, standing.share)
    return -aged_priority(task, now_ns, standing.policy), ratio, task.submitted_ns, task.id


def counts_as(running: Task, now_ns: int, policy: Policy) -> tuple[int, int | None]:
    """The priority with which one that runs with a guarantee counts, and until when, if it changes. It keeps the age
    that it had when it began for as long as it takes to be a step older, and then counts with the priority and the age
    that it was submitted with: so two that have waited alike do not take turns at once, and none keeps its nodes for
    ever because it once waited."""
    if running.run is None:
        raise InvariantViolation(f"task {running.id} does not run")
    until_ns = running.run.started_ns + policy.age_step_ns
    if now_ns >= until_ns:
        return running.request.priority + head_start_ns(running.request, policy) // policy.age_step_ns, None
    return aged_priority(running, running.run.started_ns, policy), until_ns


def may_interrupt(waiting: Task, running: Task, now_ns: int, standing: Standing) -> bool:
    """Whether a task that waits may have the nodes of one that runs."""
    run = running.run
    if run is None or run.leaving:
        return False
    if run.backfilled:
        return queue_key(waiting, now_ns, standing) < queue_key(running, now_ns, standing)
    if now_ns - run.started_ns < running.request.guaranteed_ns:
        return False
    if waiting.request.priority > running.request.priority:
        return True
    if waiting.request.user == running.request.user:
        return False
    aged = aged_priority(waiting, now_ns, standing.policy)
    its, _ = counts_as(running, now_ns, standing.policy)
    if aged != its:
        return aged > its
    theirs = usage_over_share(running.request.user, standing.usage, standing.share)
    return theirs > standing.policy.usage_margin * usage_over_share(
        waiting.request.user, standing.usage, standing.share
    )
