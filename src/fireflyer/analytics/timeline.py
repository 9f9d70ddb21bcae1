"""What an event log says about each attempt of a job, made robust: the reading that the accounting stands on.

Reports travel over a network from processes that may be dying, so entries can be late, out of order, repeated or
missing. Nothing here depends on their order in the log, only on the launcher's instant of each entry:

- A step is *done* when every rank that reports steps at all in this job has reported that step or a later one of the
  same attempt (a rank does its steps in order, so a lost report is proven by the next one), or when a checkpoint of
  that step was committed, which needs every rank's state after it. Its instant is that of the report that completed it.
- An attempt is *ready* when every rank that ever reports a resume has done so in it. Where a script reports steps but
  no resume, training began one step time before the first report.
- An attempt has *failed* at the first thing that the launcher noticed: a lost node, a rank's non-zero exit, or its own
  verdict. A gang that is stopped because the user asked for it has not failed, nor one that was suspended: what its
  ranks end with after the first has left is not looked at.

Instants are nanoseconds of the launcher's clock, clamped to the job; hostile numbers (negative durations, ranks outside
the job, attempts that the launcher never started) are ignored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fireflyer.base.events import (
    AttemptFailed,
    AttemptSized,
    AttemptStarted,
    CheckpointReport,
    FaultInjected,
    JobFinished,
    JobStarted,
    Logged,
    NodeLost,
    RankExited,
    ResumeReport,
    StepReport,
    Suspended,
    SuspendRequested,
)
from fireflyer.base.suspension import SUSPENDED_EXIT_CODE

__all__ = ["AttemptReading", "JobReading", "StepTimes", "read_log"]


@dataclass(slots=True)
class StepTimes:
    """One step of one attempt, over the ranks that reported it."""

    productive_ns: int
    """Of the slowest rank: the others waited for it inside the allreduce."""
    checkpoint_ns: int
    """Of the rank that was held up longest."""
    tokens: int
    samples: int
    loss: float | None
    """Of the lowest rank that knows it."""
    at_ns: int
    """When the first of these reports arrived."""


@dataclass(slots=True)
class AttemptReading:
    number: int
    start_ns: int
    resumed_step: int = 0
    """Steps already done when it began."""
    resume: ResumeReport | None = None
    """Of the lowest rank."""
    ready_ns: int | None = None
    done_step: int = 0
    progress: list[tuple[int, int]] = field(default_factory=list)
    """`(step, at_ns)`, both rising: all steps up to `step` were done at `at_ns`."""
    steps: dict[int, StepTimes] = field(default_factory=dict)
    checkpoints: list[tuple[int, CheckpointReport]] = field(default_factory=list)
    rank_steps: int = 0
    """Reports of steps; with the next three a sum over ranks and steps."""
    rank_step_ns: int = 0
    allreduce_bytes: int = 0
    allreduce_ns: int = 0
    noticed_ns: int | None = None
    """When the launcher noticed that the attempt had failed; None when it did not fail."""
    stopped: bool = False
    """The launcher said that somebody asked for its end."""
    suspended: Suspended | None = None
    """Its ranks left, to go on later."""
    reason: str = ""
    restarting: bool = False
    culprit: tuple[int | None, int | None] = (None, None)
    """`(node, rank)`: the launcher's verdict, else the first that was noticed; `rank` is None for a whole node."""
    node_lost: NodeLost | None = None
    rank_exited: RankExited | None = None
    injected: tuple[int, FaultInjected] | None = None

    def done_ns(self, step: int) -> int | None:
        """When `step` was done in this attempt; None when it was not, or when it was done before it."""
        index = bisect_left(self.progress, (step, -1))
        return self.progress[index][1] if index < len(self.progress) else None


@dataclass(slots=True)
class JobReading:
    started: JobStarted | None
    finished: JobFinished | None
    start_ns: int
    end_ns: int
    attempts: list[AttemptReading]
    """In the order of their numbers; at least one when the log is not empty."""
    reported: bool
    """Whether any rank ever reported a step or a resume: without it nothing is known about where the time went."""


def read_log(log: Sequence[Logged]) -> JobReading:
    """The attempts of one job. An empty log reads as a job of no length."""
    entries = sorted(log, key=lambda entry: entry.at_ns)
    started = _first(entries, JobStarted)
    finished_at, finished = next(
        ((entry.at_ns, entry.event) for entry in entries if isinstance(entry.event, JobFinished)), (None, None)
    )
    start_ns = next((entry.at_ns for entry in entries if isinstance(entry.event, JobStarted)), None)
    if start_ns is None:
        start_ns = entries[0].at_ns if entries else 0
    end_ns = max(start_ns, entries[-1].at_ns if entries else 0) if finished_at is None else max(start_ns, finished_at)
    reading = JobReading(started, finished, start_ns, end_ns, [], reported=False)

    world = started.world_size if started is not None else None
    trusted = [
        (min(max(entry.at_ns, start_ns), end_ns), entry.event)
        for entry in entries
        if not isinstance(entry.event, StepReport | ResumeReport | CheckpointReport | RankExited)
        or (entry.event.rank >= 0 and (world is None or entry.event.rank < world))
    ]
    by_attempt = _group(trusted, start_ns)
    events = [event for _, event in trusted]
    step_ranks = frozenset(event.rank for event in events if isinstance(event, StepReport))
    resume_ranks = frozenset(event.rank for event in events if isinstance(event, ResumeReport))
    reading.reported = bool(step_ranks or resume_ranks)
    ranks_of = _ranks_of_attempts(started, entries)
    numbers = sorted(by_attempt)
    for number in numbers:
        ranks = ranks_of.get(number)
        reading.attempts.append(
            _read_attempt(
                number,
                by_attempt[number],
                _below(step_ranks, ranks),
                _below(resume_ranks, ranks),
                finished is not None,
                number == numbers[-1],
            )
        )
    return reading


def _ranks_of_attempts(started: JobStarted | None, entries: Sequence[Logged]) -> dict[int, int]:
    """How many ranks an attempt has, where the job may have more."""
    if started is None:
        return {}
    sized = [entry.event for entry in entries if isinstance(entry.event, AttemptSized)]
    return {event.attempt: sum(event.node_ranks) or event.nodes * started.ranks_per_node for event in sized}


def _below(ranks: frozenset[int], limit: int | None) -> frozenset[int]:
    return ranks if limit is None else frozenset(rank for rank in ranks if rank < limit)


_AttemptEvent = (
    StepReport
    | ResumeReport
    | CheckpointReport
    | AttemptStarted
    | NodeLost
    | RankExited
    | AttemptFailed
    | FaultInjected
    | SuspendRequested
    | Suspended
)
_Timed = tuple[int, _AttemptEvent]


def _first(entries: Iterable[Logged], kind: type[JobStarted]) -> JobStarted | None:
    return next((entry.event for entry in entries if isinstance(entry.event, kind)), None)


def _group(trusted: Iterable[tuple[int, object]], start_ns: int) -> dict[int, list[_Timed]]:
    """Events of each attempt. A log without any `AttemptStarted` (a fragment) is taken at its word."""
    groups: dict[int, list[_Timed]] = {}
    opened: set[int] = set()
    for at_ns, event in trusted:
        if isinstance(event, JobStarted | JobFinished) or not isinstance(event, _AttemptEvent):
            continue
        groups.setdefault(event.attempt, []).append((at_ns, event))
        if isinstance(event, AttemptStarted):
            opened.add(event.attempt)
    if opened:
        return {number: group for number, group in groups.items() if number in opened}
    return groups or {0: [(start_ns, AttemptStarted(attempt=0))]}


def _read_attempt(
    number: int,
    events: list[_Timed],
    step_ranks: frozenset[int],
    resume_ranks: frozenset[int],
    job_finished: bool,
    is_last: bool,
) -> AttemptReading:
    attempt = AttemptReading(
        number, start_ns=next((at for at, e in events if isinstance(e, AttemptStarted)), events[0][0])
    )
    resumes = [(at, event) for at, event in events if isinstance(event, ResumeReport)]
    steps = [(at, event) for at, event in events if isinstance(event, StepReport) and event.step > 0]
    if resumes:
        attempt.resume = min((event for _, event in resumes), key=lambda event: event.rank)
        attempt.resumed_step = max(0, min(event.step for _, event in resumes))
    elif steps:
        attempt.resumed_step = min(event.step for _, event in steps) - 1
    _read_steps(attempt, steps)
    _read_checkpoints(attempt, events)
    attempt.progress = _progress(attempt, steps, step_ranks)
    attempt.done_step = attempt.progress[-1][0] if attempt.progress else attempt.resumed_step
    attempt.ready_ns = _ready_ns(attempt, resumes, resume_ranks)
    _read_failure(attempt, events, job_finished, is_last)
    return attempt


def _read_steps(attempt: AttemptReading, steps: Sequence[tuple[int, StepReport]]) -> None:
    seen: set[tuple[int, int]] = set()
    for at_ns, event in sorted(steps, key=lambda item: (item[1].rank, item[0])):
        if (event.rank, event.step) in seen:
            continue
        seen.add((event.rank, event.step))
        attempt.rank_steps += 1
        attempt.rank_step_ns += max(0, event.productive_ns)
        attempt.allreduce_bytes += max(0, event.allreduce_bytes)
        attempt.allreduce_ns += max(0, event.allreduce_ns)
        times = attempt.steps.get(event.step)
        if times is None:
            times = attempt.steps[event.step] = StepTimes(0, 0, 0, 0, None, at_ns)
        times.productive_ns = max(times.productive_ns, event.productive_ns)
        times.checkpoint_ns = max(times.checkpoint_ns, event.checkpoint_ns)
        times.tokens += max(0, event.tokens)
        times.samples += max(0, event.samples)
        times.at_ns = min(times.at_ns, at_ns)
        if times.loss is None:
            times.loss = event.loss


def _read_checkpoints(attempt: AttemptReading, events: Sequence[_Timed]) -> None:
    seen: set[tuple[int, int, bool]] = set()
    for at_ns, event in events:
        if isinstance(event, CheckpointReport):
            key = (event.rank, event.step, event.error is None)
            if key not in seen:
                seen.add(key)
                attempt.checkpoints.append((at_ns, event))


def _progress(
    attempt: AttemptReading, steps: Sequence[tuple[int, StepReport]], step_ranks: frozenset[int]
) -> list[tuple[int, int]]:
    """Rising `(step, at_ns)` from step reports of all ranks and from committed checkpoints (of steps that some rank
    reported, where ranks report steps)."""
    newest = max((event.step for _, event in steps), default=None)
    committed = [
        (at, event.step, -1)
        for at, event in attempt.checkpoints
        if event.error is None and (newest is None or event.step <= newest)
    ]
    evidence = sorted([(at, event.step, event.rank) for at, event in steps] + committed)
    reached = dict.fromkeys(sorted(step_ranks), attempt.resumed_step)
    floor = attempt.resumed_step
    progress: list[tuple[int, int]] = []
    for at_ns, step, rank in evidence:
        if rank < 0:
            common = max(floor, step)
        elif step > reached[rank]:
            was_last = reached[rank] <= floor
            reached[rank] = step
            common = max(floor, min(reached.values())) if was_last else floor
        else:
            continue
        if common > floor:
            floor = common
            progress.append((floor, at_ns))
    return progress


def _ready_ns(
    attempt: AttemptReading, resumes: Sequence[tuple[int, ResumeReport]], resume_ranks: frozenset[int]
) -> int | None:
    heard: dict[int, int] = {}
    for at_ns, event in resumes:
        heard.setdefault(event.rank, at_ns)
    first_done_ns = attempt.progress[0][1] if attempt.progress else None
    if resume_ranks and len(heard) == len(resume_ranks):
        ready_ns = max(heard.values())
        return ready_ns if first_done_ns is None else min(ready_ns, first_done_ns)
    if first_done_ns is None:
        return None
    first = attempt.steps.get(min(attempt.steps)) if attempt.steps else None
    took_ns = first.productive_ns + first.checkpoint_ns if first is not None else 0
    return max(attempt.start_ns, first_done_ns - took_ns)


def _read_failure(attempt: AttemptReading, events: Sequence[_Timed], job_finished: bool, is_last: bool) -> None:
    verdict: AttemptFailed | None = None
    noticed_ns: int | None = None
    attempt.suspended = next((event for _, event in events if isinstance(event, Suspended)), None)
    for at_ns, event in events:
        match event:
            case RankExited(exit_code=code) if code == SUSPENDED_EXIT_CODE and attempt.suspended is not None:
                continue
            case AttemptFailed() if verdict is None:
                verdict = event
            case NodeLost() if attempt.node_lost is None:
                attempt.node_lost = event
            case RankExited() if event.exit_code != 0 and attempt.rank_exited is None:
                attempt.rank_exited = event
            case FaultInjected() if attempt.injected is None:
                attempt.injected = (at_ns, event)
                continue
            case _:
                continue
        noticed_ns = at_ns if noticed_ns is None else noticed_ns
    ended_well = attempt.suspended is not None or (is_last and job_finished)
    stopped = verdict.stopped if verdict is not None else ended_well
    attempt.stopped = attempt.suspended is not None or (verdict is not None and verdict.stopped)
    if noticed_ns is None or stopped:
        return
    attempt.noticed_ns = noticed_ns
    attempt.culprit = _culprit(attempt, verdict)
    attempt.restarting = verdict.restarting if verdict is not None else not is_last
    attempt.reason = verdict.reason if verdict is not None else _reason(attempt)


def _culprit(attempt: AttemptReading, verdict: AttemptFailed | None) -> tuple[int | None, int | None]:
    if verdict is not None and verdict.node is not None:
        return verdict.node, verdict.rank
    if attempt.node_lost is not None:
        return attempt.node_lost.node, None
    return None, attempt.rank_exited.rank if attempt.rank_exited is not None else None


def _reason(attempt: AttemptReading) -> str:
    if attempt.node_lost is not None:
        return f"node {attempt.node_lost.node} lost: {attempt.node_lost.reason}"
    if attempt.rank_exited is not None:
        return f"rank {attempt.rank_exited.rank} exited with code {attempt.rank_exited.exit_code}"
    return "unknown"
