"""The states of a task, and what the end of a run means for it.

                   ┌──────────── requeue ────────────┐
                   v                                 │
    submitted ─> QUEUED ─ schedule ─> SCHEDULED ─ start ─> RUNNING ─ leave ─> SUSPENDING
                   │                   │  ^ └──────────── leave ───────────────^  │
                   │ suspend           │  └─ schedule ─ SUSPENDED <── suspend ────┘
                   └───────────────────┴───> FINISHED <── finish, from every state

`leave`: the run was told to go, or its launcher has ended; the task waits again only when no process of the run is
left anywhere, so that two runs of it never overlap. An end for good is one as soon as the launcher has told it.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from fireflyer.base.errors import InvariantViolation
from fireflyer.cluster.core.platform.store.rows import TaskRow, Wish
from fireflyer.cluster.schema.sync import EndedRun
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome, TaskSpec, TaskState

__all__ = ["TRANSITIONS", "Step", "Verdict", "following", "pause_ns", "verdict"]


class Step(enum.Enum):
    SCHEDULE = "schedule"
    START = "start"
    LEAVE = "leave"
    REQUEUE = "requeue"
    SUSPEND = "suspend"
    FINISH = "finish"


_S = TaskState
TRANSITIONS: Final[dict[tuple[TaskState, Step], TaskState]] = {
    (_S.QUEUED, Step.SCHEDULE): _S.SCHEDULED,
    (_S.SUSPENDED, Step.SCHEDULE): _S.SCHEDULED,
    (_S.SCHEDULED, Step.START): _S.RUNNING,
    (_S.SCHEDULED, Step.LEAVE): _S.SUSPENDING,
    (_S.RUNNING, Step.LEAVE): _S.SUSPENDING,
    (_S.SUSPENDING, Step.REQUEUE): _S.QUEUED,
    (_S.SUSPENDING, Step.SUSPEND): _S.SUSPENDED,
    (_S.QUEUED, Step.SUSPEND): _S.SUSPENDED,
    **{(state, Step.FINISH): FINISHED for state in _S if state is not FINISHED},
}


def following(state: TaskState, step: Step) -> TaskState:
    new = TRANSITIONS.get((state, step))
    if new is None:
        raise InvariantViolation(f"a task that is {state.value} cannot {step.value}")
    return new


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a task whose run has ended: `finish`, `requeue` or `suspend`."""

    step: Step
    cause: Cause
    outcome: Outcome | None = None
    counted: bool = False
    """As one of its requeues."""
    reason: str = ""


_FAILS: Final = (Cause.PROGRAM, Cause.TIME_LIMIT, Cause.HUNG)


def verdict(task: TaskRow, spec: TaskSpec, wish: Wish, ended: EndedRun | None) -> Verdict:
    """`ended` None: nobody saw how it ended."""
    cause, reason = _cause(wish, ended)
    if cause is Cause.SUCCEEDED:
        return Verdict(step=Step.FINISH, cause=cause, outcome=Outcome.SUCCEEDED, reason=reason)
    if task.stopping:
        return Verdict(step=Step.FINISH, cause=Cause.STOPPED, outcome=Outcome.STOPPED, reason=task.stopping)
    if cause in _FAILS:
        return Verdict(step=Step.FINISH, cause=cause, outcome=Outcome.FAILED, reason=reason)
    if spec.kind == "interactive":
        words = reason or f"its run ended ({cause.value}), and an interactive task is not started again"
        return Verdict(step=Step.FINISH, cause=cause, outcome=Outcome.FAILED, reason=words)
    if wish is Wish.NODE_FAULT:
        return Verdict(step=Step.SUSPEND if task.held else Step.REQUEUE, cause=cause, reason=reason)
    if cause is Cause.INFRASTRUCTURE:
        if task.requeues >= spec.max_requeues:
            words = f"it failed {task.requeues + 1} times by infrastructure, the last time: {reason or 'unknown'}"
            return Verdict(step=Step.FINISH, cause=cause, outcome=Outcome.FAILED, reason=words)
        step = Step.SUSPEND if task.held else Step.REQUEUE
        return Verdict(step=step, cause=cause, counted=True, reason=reason)
    saved = cause is Cause.SUSPENDED or task.held
    return Verdict(step=Step.SUSPEND if saved else Step.REQUEUE, cause=cause, reason=reason)


def _cause(wish: Wish, ended: EndedRun | None) -> tuple[Cause, str]:
    if wish is Wish.TIME_LIMIT and (ended is None or ended.cause is not Cause.SUCCEEDED):
        return Cause.TIME_LIMIT, "it took longer than the time that it declared"
    if wish is Wish.NODE_FAULT and (ended is None or ended.cause is not Cause.SUCCEEDED):
        return Cause.INFRASTRUCTURE, "a check found a node of its run faulty"
    if wish is Wish.NO_START and (ended is None or ended.cause is Cause.STOPPED):
        return Cause.INFRASTRUCTURE, "its run did not start in time"
    if ended is not None and ended.cause is not Cause.STOPPED:
        return ended.cause, ended.reason
    if ended is not None:
        return Cause.INTERRUPTED, ended.reason or "its agent stopped it"
    if wish in (Wish.INTERRUPT, Wish.USER_SUSPEND):
        return Cause.INTERRUPTED, "it was ended before it had saved"
    return Cause.INFRASTRUCTURE, "nobody saw how its run ended"


def pause_ns(requeues: int, first_ns: int, most_ns: int) -> int:
    """Before run number `requeues` + 1 by infrastructure causes; doubles with each."""
    return min(most_ns, first_ns << min(requeues - 1, 40)) if requeues > 0 else 0
