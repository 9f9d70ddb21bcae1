"""Why a task that waits for Slurm waits, in a line."""

from __future__ import annotations

from fireflyer.base.units import format_duration
from fireflyer.cluster.core.platform.store.rows import JobRow, JobState, TaskRow
from fireflyer.cluster.core.slurm.reasons import reason_words

__all__ = ["why_waits"]


def why_waits(task: TaskRow, job: JobRow | None, *, held: str, silent: str, time_ns: int) -> str:
    """`job`: one that has not ended. `held`: why it may not run, whatever is free. `silent`: why it is not known what
    Slurm does now."""
    if held:
        return held
    if job is None:
        if task.not_before_ns > time_ns:
            return f"it failed before, and Slurm is asked again in {format_duration(task.not_before_ns - time_ns)}"
        return f"it waits to be submitted to Slurm{f': {silent}' if silent else ''}"
    since = f"; {silent}" if silent else ""
    if job.state is JobState.ASKED:
        refused = f"Slurm did not take it, and is asked again: {job.refusal}" if job.refusal else "Slurm is being asked"
        return refused + since
    if job.leave is not None:
        return f"Slurm job {job.slurm_id} is ending, and another one is asked for then{since}"
    if job.state is JobState.RUNNING:
        return f"Slurm job {job.slurm_id} has {', '.join(job.nodes[:8])}, and its agents come up{since}"
    return f"Slurm job {job.slurm_id} waits: {reason_words(job.slurm_reason)}{since}"
