"""Where a job's wall time went: cut once into blocks, then each block into parts that sum to it exactly.

The wall time runs from `JobStarted` to `JobFinished`, or to the last entry of a log that a kill cut short. It is first
cut, on the launcher's clock alone, into blocks that touch:

    startup → kept → (lost → broken → restart → kept)* → tail

`kept` holds the steps of an attempt that the final state was built on, `lost` those that a later attempt threw away by
resuming below them, `broken` the step in progress until the failure was noticed, `restart` runs from there until all
ranks have resumed (over several attempts, if some die before that), and `tail` is what follows the last step. Which
steps are kept is read backwards from the last attempt: it resumed from step r, so the newest earlier attempt that did
all steps up to r is its ancestor and keeps them; what no one inherits is lost.

Only then are the ranks' own durations used: a kept block is split into *checkpoint* stalls, *productive* step time (of
the slowest rank; the others waited for it) and *other*, each bounded by what is left of the block; a lost block into
stalls and *lost*. The stalls are the larger of what step reports and checkpoint reports say. A step whose report never
came counts as long as the average one. A job whose ranks report nothing (a plain torchrun script) has its training time
under *unknown*: not zero, and not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fireflyer.analytics.timeline import AttemptReading, JobReading, StepTimes, read_log
from fireflyer.base.events import Logged, SaturationReport, SkippedCheckpoint

__all__ = ["Block", "Checkpoint", "Failure", "JobAccount", "LossPoint", "Parts", "account"]


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds of wall time; they sum to the job's wall time exactly."""

    startup_ns: int = 0
    """Time from the job's start until all ranks of the first attempt were ready."""
    productive_ns: int = 0
    """Step time of steps that counted."""
    lost_ns: int = 0
    """Steps that were done again later, and the step in progress when a failure was noticed."""
    restart_ns: int = 0
    """Time from noticing a failure until all ranks had resumed."""
    checkpoint_ns: int = 0
    """Time that training stood still for a checkpoint; background writing does not count."""
    other_ns: int = 0
    """Time between steps, after the last step, and of shutting down."""
    unknown_ns: int = 0
    """Time in which ranks ran that reported nothing."""

    @property
    def total_ns(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)


class Block(msgspec.Struct, frozen=True):
    """A stretch of the job's time: `startup`, `kept`, `lost`, `broken`, `restart`, `tail` or `unknown`."""

    kind: str
    attempt: int
    start_ns: int
    end_ns: int


class LossPoint(msgspec.Struct, frozen=True):
    """Loss that was reported for a step, and by which attempt."""

    step: int
    loss: float
    attempt: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One committed or failed checkpoint; `bytes` summed over the ranks that reported it, times of the slowest."""

    attempt: int
    step: int
    at_ns: int
    bytes: int
    stall_ns: int
    write_ns: int
    error: str | None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Failure that ended an attempt, when it was noticed and what it cost."""

    attempt: int
    noticed_ns: int
    reason: str
    node: int | None
    """Node that is to blame; None: not known."""
    rank: int | None
    """Rank that is to blame; None: the whole node is, or nobody is known."""
    injected: str | None
    """Fault that the launcher was asked to inject, in words; None: none was."""
    detection_ns: int | None
    """Time from the injection until the failure was noticed; None: nothing was injected."""
    broken_step: int | None
    """The step in progress; None when training had not begun, or nothing was reported."""
    restarted: bool
    """Whether another attempt followed."""
    resumed_step: int | None
    """Steps already done when training went on, in the next attempt that got so far; None when none did."""
    resumed_checkpoint: str | None
    passed_over: tuple[SkippedCheckpoint, ...]
    """Checkpoints that the restart refused, with the reasons."""
    lost_steps: int
    """Completed steps of this attempt that were thrown away."""
    restart_ns: int | None
    """Time from noticing the failure until all ranks resumed; None: the next attempt failed before, or there was
    none."""


class JobAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Account of one job: where its time went, its steps, checkpoints and failures."""

    job: str
    command: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    """Number of ranks of each node; the largest of `node_ranks` where it gives several numbers."""
    started_s: float | None
    """Seconds since the epoch, for people only."""
    wall_ns: int
    exit_code: int | None
    """None when the log ends before the job did."""
    stopped: bool
    """Somebody asked for its end: it has neither succeeded nor failed."""
    suspended: bool
    """Whether the job was stopped to be suspended: it goes on when it is started again."""
    reason: str
    attempts: int
    reported: bool
    """False when no rank reported anything: all of training is then `unknown`."""
    parts: Parts
    blocks: tuple[Block, ...]
    first_step: int
    """Steps that were already done when the job began (an earlier run's checkpoint)."""
    last_step: int
    tokens: int
    """Tokens of all ranks in the steps that counted."""
    samples: int
    rank_steps: int
    """Steps, and in the next three their times and bytes, summed over all ranks and attempts."""
    rank_step_ns: int
    allreduce_bytes: int
    allreduce_ns: int
    """Time for which sums were in flight. No bandwidth follows from it: a rank meanwhile computes, and waits for slower
    ranks."""
    losses: tuple[LossPoint, ...]
    """The final curve: for each step, what the attempt said whose step counted."""
    discarded: tuple[LossPoint, ...]
    """Points of steps that did not count, in the order of attempt and step."""
    failures: tuple[Failure, ...]
    checkpoints: tuple[Checkpoint, ...]
    restored: tuple[str, ...]
    """Names of the checkpoints that attempts resumed from."""
    saturated: int = 0
    """Results of fp8 sums that did not fit, over all ranks, groups and attempts."""
    saturable: int = 0
    """Results of fp8 sums in those groups."""
    saturated_ranks: tuple[int, ...] = ()
    """Ranks that rounded those results, ascending."""
    node_ranks: tuple[int, ...] = ()
    """Number of ranks of each node, where these numbers differ; empty: `ranks_per_node`."""

    @property
    def steps(self) -> int:
        """Steps that counted."""
        return self.last_step - self.first_step


def account(log: Sequence[Logged]) -> JobAccount:
    """The account of one job from its event log; entries may be late, repeated, missing or in any order.

    `account(log).parts.total_ns == account(log).wall_ns` always. Never raises on the content of a log.
    """
    reading = read_log(log)
    keeps = _kept_until(reading.attempts)
    blocks = _blocks(reading, keeps)
    by_number = {attempt.number: (attempt, keep) for attempt, keep in zip(reading.attempts, keeps, strict=True)}
    parts = msgspec.structs.asdict(Parts())
    for block in blocks:
        for name, spent_ns in _split(block, *by_number[block.attempt]).items():
            parts[name] += spent_ns
    losses, discarded = _losses(reading.attempts, keeps)
    kept_steps = [
        times for attempt, keep in by_number.values() for times in _steps(attempt, attempt.resumed_step, keep)
    ]
    started, finished = reading.started, reading.finished
    trained = [attempt for attempt in reading.attempts if attempt.ready_ns is not None]
    return JobAccount(
        job=started.job if started is not None else "unknown",
        command=started.command if started is not None else (),
        nodes=started.nodes if started is not None else 0,
        ranks_per_node=started.ranks_per_node if started is not None else 0,
        started_s=started.wall_time_s if started is not None else None,
        wall_ns=reading.end_ns - reading.start_ns,
        exit_code=finished.exit_code if finished is not None else None,
        stopped=finished is not None and finished.exit_code != 0 and any(a.stopped for a in reading.attempts),
        suspended=finished is not None and finished.exit_code != 0 and reading.attempts[-1].suspended is not None,
        reason=finished.reason if finished is not None else "the event log ends before the job ended",
        attempts=len(reading.attempts),
        reported=reading.reported,
        parts=Parts(**parts),
        blocks=tuple(blocks),
        first_step=_first_step(reading.attempts, keeps),
        last_step=trained[-1].done_step if trained else 0,
        tokens=sum(times.tokens for times in kept_steps),
        samples=sum(times.samples for times in kept_steps),
        rank_steps=sum(attempt.rank_steps for attempt in reading.attempts),
        rank_step_ns=sum(attempt.rank_step_ns for attempt in reading.attempts),
        allreduce_bytes=sum(attempt.allreduce_bytes for attempt in reading.attempts),
        allreduce_ns=sum(attempt.allreduce_ns for attempt in reading.attempts),
        losses=losses,
        discarded=discarded,
        failures=_failures(reading, keeps),
        checkpoints=_checkpoints(reading),
        **_saturation(log, started.world_size if started is not None else None),
        node_ranks=started.node_ranks if started is not None else (),
        restored=tuple(a.resume.checkpoint for a in trained if a.resume is not None and a.resume.checkpoint),
    )


def _saturation(log: Sequence[Logged], world: int | None) -> dict[str, Any]:
    """Reports count from the start of a group: the largest of a rank is its last. All its ranks count all values."""
    lasts: dict[tuple[int, str, int], SaturationReport] = {}
    for entry in log:
        event = entry.event
        if isinstance(event, SaturationReport) and event.rank >= 0 and (world is None or event.rank < world):
            key = (event.attempt, event.group, event.rank)
            if key not in lasts or event.saturated >= lasts[key].saturated:
                lasts[key] = event
    values: dict[tuple[int, str], int] = {}
    for (attempt, group, _), event in lasts.items():
        values[attempt, group] = max(event.values, values.get((attempt, group), 0))
    return {
        "saturated": sum(max(0, event.saturated) for event in lasts.values()),
        "saturable": sum(values.values()),
        "saturated_ranks": tuple(sorted({rank for _, _, rank in lasts})),
    }


def _kept_until(attempts: Sequence[AttemptReading]) -> list[int]:
    """For each attempt the last of its steps that counts (its `resumed_step` when none does)."""
    keeps = [attempt.resumed_step for attempt in attempts]
    trained = [index for index, attempt in enumerate(attempts) if attempt.ready_ns is not None]
    if not trained:
        return keeps
    index = trained[-1]
    keeps[index] = attempts[index].done_step
    while attempts[index].resumed_step > 0:
        wanted = attempts[index].resumed_step
        earlier = [i for i in trained if i < index and attempts[i].done_step > attempts[i].resumed_step]
        earlier = [i for i in earlier if attempts[i].resumed_step < wanted]
        if not earlier:
            break
        complete = [i for i in earlier if attempts[i].done_step >= wanted]
        # A checkpoint proves its step even where the last reports of it were lost: then the attempt that came nearest.
        index = complete[-1] if complete else max(earlier, key=lambda i: (attempts[i].done_step, i))
        keeps[index] = min(wanted, attempts[index].done_step)
    return keeps


def _first_step(attempts: Sequence[AttemptReading], keeps: Sequence[int]) -> int:
    kept = [attempt.resumed_step for attempt, keep in zip(attempts, keeps, strict=True) if keep > attempt.resumed_step]
    if kept:
        return min(kept)
    trained = [attempt.resumed_step for attempt in attempts if attempt.ready_ns is not None]
    return trained[-1] if trained else 0


def _blocks(reading: JobReading, keeps: Sequence[int]) -> list[Block]:
    """Contiguous, in time order, from the job's start to its end."""
    blocks: list[Block] = []
    cursor = reading.start_ns

    def until(at_ns: int | None, kind: str, attempt: int) -> None:
        nonlocal cursor
        end_ns = min(at_ns, reading.end_ns) if at_ns is not None else cursor
        if end_ns > cursor:
            blocks.append(Block(kind, attempt, cursor, end_ns))
            cursor = end_ns

    waiting = "startup" if reading.reported else "unknown"
    for index, (attempt, keep) in enumerate(zip(reading.attempts, keeps, strict=True)):
        number = attempt.number
        following = reading.attempts[index + 1] if index + 1 < len(reading.attempts) else None
        stopped_ns = attempt.noticed_ns
        if stopped_ns is None and following is not None:
            stopped_ns = following.start_ns
        limit_ns = reading.end_ns if stopped_ns is None else stopped_ns
        if not reading.reported:
            until(attempt.start_ns, waiting, number)
            until(limit_ns, "unknown", number)
        elif attempt.ready_ns is None:
            until(limit_ns, waiting, number)
        else:
            until(min(attempt.ready_ns, limit_ns), waiting, number)
            for step, kind in ((keep, "kept"), (attempt.done_step, "lost")):
                done_ns = attempt.done_ns(step) if step > attempt.resumed_step else None
                until(None if done_ns is None else min(done_ns, limit_ns), kind, number)
            until(limit_ns, "tail" if stopped_ns is None else "broken", number)
        waiting = "restart"
        if following is None:
            until(reading.end_ns, "restart" if attempt.restarting else "tail", number)
    if not blocks and reading.end_ns > cursor:
        until(reading.end_ns, "tail", -1)
    return blocks


_WHOLE = {
    "startup": "startup_ns",
    "broken": "lost_ns",
    "restart": "restart_ns",
    "tail": "other_ns",
    "unknown": "unknown_ns",
}


def _split(block: Block, attempt: AttemptReading, keep: int) -> dict[str, int]:
    """The parts of one block: non-negative, summing to its length."""
    length_ns = block.end_ns - block.start_ns
    whole = _WHOLE.get(block.kind)
    if whole is not None:
        return {whole: length_ns}
    after, last = (attempt.resumed_step, keep) if block.kind == "kept" else (keep, attempt.done_step)
    steps = _steps(attempt, after, last)
    stall_ns = min(length_ns, max(sum(s.checkpoint_ns for s in steps), _stalls(attempt, after, last)))
    if block.kind == "lost":
        return {"checkpoint_ns": stall_ns, "lost_ns": length_ns - stall_ns}
    productive_ns = sum(s.productive_ns for s in steps)
    if steps:
        productive_ns = productive_ns * (last - after) // len(steps)
    productive_ns = min(length_ns - stall_ns, productive_ns)
    return {
        "checkpoint_ns": stall_ns,
        "productive_ns": productive_ns,
        "other_ns": length_ns - stall_ns - productive_ns,
    }


def _steps(attempt: AttemptReading, after: int, last: int) -> list[StepTimes]:
    return [times for step, times in sorted(attempt.steps.items()) if after < step <= last]


def _stalls(attempt: AttemptReading, after: int, last: int) -> int:
    stalls: dict[int, int] = {}
    for _, report in attempt.checkpoints:
        if after < report.step <= last:
            stalls[report.step] = max(stalls.get(report.step, 0), report.stall_ns)
    return sum(stalls.values())


def _losses(
    attempts: Sequence[AttemptReading], keeps: Sequence[int]
) -> tuple[tuple[LossPoint, ...], tuple[LossPoint, ...]]:
    """The final curve and the discarded points. Of a last attempt that did not fail, every reported step belongs to the
    curve, also one that not all ranks have reported yet."""
    final: dict[int, LossPoint] = {}
    discarded: list[LossPoint] = []
    for index, (attempt, keep) in enumerate(zip(attempts, keeps, strict=True)):
        open_ended = index == len(attempts) - 1 and attempt.noticed_ns is None
        for step, times in sorted(attempt.steps.items()):
            if times.loss is None:
                continue
            point = LossPoint(step, times.loss, attempt.number)
            if attempt.resumed_step < step and (step <= keep or open_ended):
                final[step] = point
            else:
                discarded.append(point)
    return tuple(final[step] for step in sorted(final)), tuple(discarded)


def _checkpoints(reading: JobReading) -> tuple[Checkpoint, ...]:
    merged: dict[tuple[int, int, bool], Checkpoint] = {}
    for attempt in reading.attempts:
        for at_ns, report in attempt.checkpoints:
            key = (attempt.number, report.step, report.error is None)
            old = merged.get(key)
            merged[key] = Checkpoint(
                attempt=attempt.number,
                step=report.step,
                at_ns=max(at_ns - reading.start_ns, old.at_ns if old is not None else 0),
                bytes=max(0, report.bytes) + (old.bytes if old is not None else 0),
                stall_ns=max(0, report.stall_ns, old.stall_ns if old is not None else 0),
                write_ns=max(0, report.write_ns, old.write_ns if old is not None else 0),
                error=report.error if old is None else old.error,
            )
    return tuple(
        sorted(merged.values(), key=lambda checkpoint: (checkpoint.attempt, checkpoint.step, checkpoint.at_ns))
    )


def _failures(reading: JobReading, keeps: Sequence[int]) -> tuple[Failure, ...]:
    failures: list[Failure] = []
    for index, (attempt, keep) in enumerate(zip(reading.attempts, keeps, strict=True)):
        if attempt.noticed_ns is None:
            continue
        later = reading.attempts[index + 1 :]
        resumed = next((other for other in later if other.ready_ns is not None), None)
        resume = resumed.resume if resumed is not None else None
        injected_ns, injected = attempt.injected if attempt.injected is not None else (None, None)
        node, rank = attempt.culprit
        failures.append(
            Failure(
                attempt=attempt.number,
                noticed_ns=attempt.noticed_ns - reading.start_ns,
                reason=attempt.reason,
                node=node,
                rank=rank,
                injected=injected.what if injected is not None else None,
                detection_ns=max(0, attempt.noticed_ns - injected_ns) if injected_ns is not None else None,
                broken_step=attempt.done_step + 1 if attempt.ready_ns is not None else None,
                restarted=bool(later),
                resumed_step=resumed.resumed_step if resumed is not None else None,
                resumed_checkpoint=resume.checkpoint if resume is not None else None,
                passed_over=resume.passed_over if resume is not None else (),
                lost_steps=max(0, attempt.done_step - max(keep, attempt.resumed_step)),
                restart_ns=_restart_ns(attempt.noticed_ns, later[0]) if later else None,
            )
        )
    return tuple(failures)


def _restart_ns(noticed_ns: int, following: AttemptReading) -> int | None:
    return max(0, following.ready_ns - noticed_ns) if following.ready_ns is not None else None
