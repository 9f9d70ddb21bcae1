"""What is said about a job when it is over: the account as sentences and tables, the same for a terminal and for HTML.

`build_report` turns a log into rows of text; renderers only lay them out. What is not known is called *unknown*, and a
string that came from a rank or a user is made one printable line of bounded length here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from fireflyer.analytics.accounting import Failure, JobAccount, LossPoint, account
from fireflyer.analytics.ettr import Ettr, EttrInputs, daly_young_interval_s, ettr
from fireflyer.base.events import Logged
from fireflyer.base.rank_layout import counts_text
from fireflyer.base.units import SECOND, format_bytes, format_duration, format_rate

__all__ = ["MAX_TEXT", "Fact", "FailureStory", "JobReport", "PartRow", "Row", "build_report", "one_line"]

MAX_TEXT = 300
"""Characters of one text from outside (a reason, a name) that a report shows."""
MAX_CHECKPOINT_NOTES = 20
"""Failed and refused checkpoints that a report lists one by one."""
_MAX_RANKS = 8

Mark = Literal["", "good", "bad"]
UNKNOWN = "unknown"


class Row(msgspec.Struct, frozen=True):
    label: str
    value: str
    note: str = ""
    mark: Mark = ""


class Fact(msgspec.Struct, frozen=True):
    """Something that the caller knows and the log does not, such as the verdict of a check."""

    label: str
    value: str
    good: bool | None = None


class PartRow(msgspec.Struct, frozen=True):
    """One part of the wall time. `spent_ns` is None where nobody knows it."""

    kind: str
    label: str
    spent_ns: int | None
    share: float | None
    meaning: str

    @property
    def duration(self) -> str:
        return UNKNOWN if self.spent_ns is None else _time(self.spent_ns)

    @property
    def percent(self) -> str:
        return "" if self.share is None else f"{self.share:.1%}"


class FailureStory(msgspec.Struct, frozen=True):
    title: str
    rows: tuple[Row, ...]


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    account: JobAccount
    ettr: Ettr
    title: str
    headline: str
    succeeded: bool | None
    """None when the log ends before the job did, or somebody asked for its end."""
    facts: tuple[Row, ...]
    summary: tuple[Row, ...]
    parts: tuple[PartRow, ...]
    failures: tuple[FailureStory, ...]
    checkpoints: tuple[Row, ...]
    ettr_rows: tuple[Row, ...]
    undisturbed: tuple[LossPoint, ...] = ()
    """Losses of a run without failures, to be drawn beneath those of this one."""


def build_report(log: Sequence[Logged], *, facts: Sequence[Fact] = (), undisturbed: Sequence[Logged] = ()) -> JobReport:
    """The report of one job from its event log alone, from `facts` that the caller adds, and from the event log of an
    `undisturbed` run, whose loss curve is drawn beneath."""
    job = account(log)
    ratio = ettr(job)
    return JobReport(
        account=job,
        ettr=ratio,
        title=f"Job {one_line(job.job)}",
        headline=_headline(job),
        succeeded=None if job.exit_code is None or job.stopped else job.exit_code == 0,
        facts=tuple(Row(one_line(f.label), one_line(f.value), mark=_mark(f.good)) for f in facts),
        summary=tuple(_summary(job)),
        parts=tuple(_parts(job)),
        failures=tuple(_story(job, number, failure) for number, failure in enumerate(job.failures, start=1)),
        checkpoints=tuple(_checkpoints(job)),
        ettr_rows=tuple(_ettr_rows(ratio)),
        undisturbed=account(undisturbed).losses if undisturbed else (),
    )


def one_line(text: str, limit: int = MAX_TEXT) -> str:
    """`text` without control characters and line breaks, and cut where it is too long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _mark(good: bool | None) -> Mark:
    return "" if good is None else "good" if good else "bad"


def _time(ns: int) -> str:
    return "0 s" if ns == 0 else format_duration(ns)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _headline(job: JobAccount) -> str:
    wall = format_duration(job.wall_ns)
    if job.exit_code is None:
        start = f"Not finished: the log covers {wall}"
    elif job.exit_code == 0:
        start = f"Finished in {wall}"
    elif job.suspended:
        start = f"Suspended after {wall} ({one_line(job.reason)})"
    elif job.stopped:
        start = f"Ended after {wall} on request ({one_line(job.reason)})"
    else:
        start = f"Failed after {wall} with exit code {job.exit_code} ({one_line(job.reason)})"
    said = [_count(job.steps, "step")]
    if not job.reported:
        said = [_count(job.attempts, "attempt")]
    if job.losses:
        said.append(f"loss {job.losses[0].loss:.4g} → {job.losses[-1].loss:.4g}")
    survived = sum(failure.resumed_step is not None for failure in job.failures)
    if not job.reported and job.exit_code == 0:
        survived = len(job.failures)  # nobody said when the ranks went on, but in the end all succeeded
    failures = _count(len(job.failures), "failure")
    if not job.failures or (not job.reported and not survived):
        said.append(failures)
    elif survived == len(job.failures):
        said.append(f"{failures} survived")
    else:
        said.append(f"{failures}, {survived} survived")
    unknown = "" if job.reported else f" {_why_unknown(job)}: steps and loss are unknown."
    return f"{start}: {', '.join(said)}.{unknown}"


def _why_unknown(job: JobAccount) -> str:
    """A script that uses Reporter may have ended before its first step, but then it has not succeeded."""
    return "This script does not use Reporter" if job.exit_code == 0 else "No step was reported"


def _summary(job: JobAccount) -> list[Row]:
    world = sum(job.node_ranks) or job.nodes * job.ranks_per_node
    rows = [Row("Command", one_line(" ".join(job.command)) or UNKNOWN)]
    if world:
        ranks = counts_text(job.node_ranks) if job.node_ranks else _count(job.ranks_per_node, "rank")
        size = f"{_count(job.nodes, 'node')}{', ranks: ' if job.node_ranks else ' × '}{ranks}"
        rows.append(Row("Ranks", size, f"world size {world}"))
    rows.append(Row("Wall time", format_duration(job.wall_ns), _count(job.attempts, "attempt")))
    rows += _saturation(job)
    if not job.reported:
        rows.append(Row("Steps", UNKNOWN, "call fireflyer.cluster.Reporter in the script: docs/how-to/report-steps.md"))
        return rows
    resumed = f", {job.first_step:,} done before this run" if job.first_step else ""
    lost = sum(failure.lost_steps for failure in job.failures)
    rows.append(Row("Steps", f"{job.steps:,}", f"up to step {job.last_step:,}{resumed}; {lost:,} repeated"))
    if job.losses:
        first, last = job.losses[0], job.losses[-1]
        value = f"{first.loss:.6g} → {last.loss:.6g}"
        rows.append(Row("Loss", value, f"step {first.step:,} → step {last.step:,}"))
    if job.tokens and job.parts.productive_ns:
        speed = job.tokens * SECOND / job.parts.productive_ns
        over_all = job.tokens * SECOND / max(1, job.wall_ns)
        rows.append(Row("Throughput", f"{speed:,.0f} tokens/s", f"{over_all:,.0f} tokens/s over the wall time"))
    if job.allreduce_ns and job.rank_step_ns:
        share = min(1.0, job.allreduce_ns / job.rank_step_ns)
        size = format_bytes(job.allreduce_bytes / job.rank_steps)
        rate = format_rate(job.allreduce_bytes * SECOND / job.allreduce_ns)
        note = (
            f"a lower bound; in flight for {share:.0%} of the step time, also beside the backward pass and while "
            f"waiting for slower ranks; {size} per step and rank"
        )
        rows.append(Row("Allreduce", f"≥ {rate}", note))
    if job.exit_code and job.last_step:
        saved = max((c.step for c in job.checkpoints if c.error is None), default=job.first_step)
        unsaved = max(0, job.last_step - saved)
        rows.append(Row("Not saved", _count(unsaved, "step"), f"since the last checkpoint, step {saved:,}"))
    return rows


def _saturation(job: JobAccount) -> list[Row]:
    if not job.saturated:
        return []
    ranks = ", ".join(map(str, job.saturated_ranks[:_MAX_RANKS])) + (
        ", ..." if len(job.saturated_ranks) > _MAX_RANKS else ""
    )
    share = f" ({job.saturated / job.saturable:.2%})" if job.saturable >= job.saturated else ""
    value = f"{job.saturated:,} of {job.saturable:,} values{share}"
    note = f"sums that did not fit their type were clipped or became infinite; rounded by rank {ranks}"
    return [Row("fp8 overflow", value, note, "bad")]


_MEANINGS = (
    ("productive", "Productive", "step time of steps that were kept"),
    ("lost", "Lost", "steps that were repeated, and the step in progress at a failure"),
    ("restart", "Restart", "from the detection of a failure until all ranks resumed"),
    ("checkpoint", "Checkpoint", "training was blocked by a checkpoint"),
    ("startup", "Startup", "from the job's start until all ranks were ready"),
    ("other", "Other", "between steps, after the last step, shutting down"),
    ("unknown", "Not reported", "ranks ran without reports of steps"),
)


def _parts(job: JobAccount) -> list[PartRow]:
    rows = []
    for kind, label, meaning in _MEANINGS:
        spent_ns: int | None = getattr(job.parts, f"{kind}_ns")
        if kind == "unknown" and not spent_ns:
            continue
        if kind == "restart" and not job.reported:
            meaning = "until the ranks were started again; when they resumed is unknown"
        elif not job.reported and kind not in ("other", "unknown"):
            spent_ns = None
        share = spent_ns / job.wall_ns if spent_ns is not None and job.wall_ns else None
        rows.append(PartRow(kind, label, spent_ns, share, meaning))
    return rows


def _story(job: JobAccount, number: int, failure: Failure) -> FailureStory:
    if failure.rank is not None:
        who = f"rank {failure.rank} failed"
    elif failure.node is not None:
        who = f"node {failure.node} lost"
    else:
        who = "attempt failed"
    where = f" at step {failure.broken_step:,}" if failure.broken_step is not None else ""
    rows = [Row("Detected", f"{format_duration(failure.noticed_ns)} into the job", one_line(failure.reason))]
    if failure.injected is not None:
        took = UNKNOWN if failure.detection_ns is None else format_duration(failure.detection_ns)
        rows.append(Row("Delay", took, f"from the injection to the detection ({one_line(failure.injected)})"))
    if failure.resumed_step is not None:
        nothing = "the ranks reported no checkpoint name" if failure.resumed_step else "no checkpoint: from step 0"
        source = one_line(failure.resumed_checkpoint) if failure.resumed_checkpoint else nothing
        rows.append(Row("Resumed", f"from step {failure.resumed_step:,}", source))
    elif failure.restarted and not job.reported:
        rows.append(Row("Resumed", UNKNOWN, "all ranks were started again; no step was reported"))
    else:
        why = "no later attempt reached training" if failure.restarted else "no attempt followed"
        rows.append(Row("Resumed", "no", why, mark="bad"))
    rows.extend(
        Row("Skipped", one_line(passed.name), one_line(passed.reason), mark="bad")
        for passed in failure.passed_over[:MAX_CHECKPOINT_NOTES]
    )
    if failure.broken_step is not None:
        rows.append(Row("Repeated", _count(failure.lost_steps, "step"), "and the step in progress"))
    if failure.restart_ns is not None:
        rows.append(Row("Restart", format_duration(failure.restart_ns), "until all ranks resumed"))
    elif failure.resumed_step is not None:
        rows.append(Row("Restart", "failed", "the next attempt failed before it reached training", mark="bad"))
    return FailureStory(f"Failure {number}: {who}{where}", tuple(rows))


def _checkpoints(job: JobAccount) -> list[Row]:
    committed = [checkpoint for checkpoint in job.checkpoints if checkpoint.error is None]
    failed = [checkpoint for checkpoint in job.checkpoints if checkpoint.error is not None]
    if not job.reported:
        return [Row("Committed", UNKNOWN)]
    rows = [Row("Committed", f"{len(committed):,}", f"last at step {committed[-1].step:,}" if committed else "")]
    if committed:
        size = sum(c.bytes for c in committed) / len(committed)
        stall_ns = job.parts.checkpoint_ns // len(committed)
        write_ns = sum(c.write_ns for c in committed) // len(committed)
        rows.append(Row("Size", format_bytes(size), "mean"))
        rows.append(Row("Stall", _time(stall_ns), "mean time that training was blocked"))
        rows.append(Row("Write", _time(write_ns), "mean, in the background"))
    rows.extend(
        Row(f"Failed, step {checkpoint.step:,}", one_line(checkpoint.error or ""), mark="bad")
        for checkpoint in failed[:MAX_CHECKPOINT_NOTES]
    )
    if len(failed) > MAX_CHECKPOINT_NOTES:
        rows.append(Row("Failed", f"{len(failed) - MAX_CHECKPOINT_NOTES:,} more", mark="bad"))
    return rows


def _ettr_rows(ratio: Ettr) -> list[Row]:
    measured = UNKNOWN if ratio.measured is None else f"{ratio.measured:.3f}"
    computed = UNKNOWN if ratio.expected is None else f"{ratio.expected:.3f}"
    rows = [
        Row("Measured", measured, "productive time / wall time"),
        Row("Computed", computed, f"formula 1 of Kokolis et al. 2024; {ratio.note}"),
    ]
    return rows + _input_rows(ratio.inputs) if ratio.inputs is not None else rows


def _input_rows(inputs: EttrInputs) -> list[Row]:
    def seconds(value: float) -> str:
        return _time(round(value * SECOND))

    rate = f"one per {seconds(1 / inputs.failures_per_s)}" if inputs.failures_per_s else "none"
    rows = [
        Row("Failures", f"{inputs.failures}", f"N·r_f: {rate}"),
        Row("Restart overhead", seconds(inputs.restart_s), "u0: mean of the first start and the restarts"),
        Row("Checkpoint period", seconds(inputs.period_s), "Δt: productive time between checkpoints"),
        Row("Checkpoint stall", seconds(inputs.stall_s), "w: mean"),
        Row("Productive time", seconds(inputs.productive_s), "R: time of kept steps"),
        Row("Queue time", seconds(inputs.queue_s), "q: `ff run` has no queue"),
    ]
    if inputs.failures_per_s:
        best_s = daly_young_interval_s(stall_s=inputs.stall_s, failures_per_s=inputs.failures_per_s)
        rows.append(Row("Daly–Young period", seconds(best_s), "√(2w / N·r_f): nearly the best Δt at this rate"))
    return rows
