"""What the end of a job of Slurm means for the run that it had, or for the task that it had none for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.life.progress import Progress
from fireflyer.cluster.core.platform.life.states import pause_ns
from fireflyer.cluster.core.platform.life.tasks import Tasks
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.slurm.reconcile import FORGOTTEN
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import JobRow, RunState, TaskRow, Wish
from fireflyer.cluster.core.slurm.output import SlurmJob, SlurmNode
from fireflyer.cluster.core.slurm.request import node_of
from fireflyer.cluster.schema.sync import EndedRun
from fireflyer.cluster.schema.tasks import Cause, Outcome, RunParts

__all__ = ["JobEndings", "code_words"]

_INTERRUPTED: Final = ("PREEMPTED", "TIMEOUT", "DEADLINE", "REVOKED")
"""Not the fault of anything: the task is queued again, and that is not counted."""


class JobEndings:
    def __init__(self, ledger: Ledger, tasks: Tasks, progress: Progress, settings: Settings) -> None:
        self._ledger, self._tasks, self._progress, self._settings = ledger, tasks, progress, settings

    def run_ended(self, row: JobRow, job: SlurmJob, words: str, nodes: Mapping[str, SlurmNode], now_ns: int) -> None:
        run = self._ledger.runs.get((row.task, row.run)) if row.run is not None else None
        if run is None or run.state is RunState.OVER:
            return
        cause = Cause.INTERRUPTED if _is_interrupted(job) else Cause.INFRASTRUCTURE
        if job.state == FORGOTTEN:
            # slurmctld may have lost a job that lives on: agents say that the run is gone, or their leases end.
            self._tasks.leave(run, "stop", Wish.LOST, words)
            return
        bad = tuple(name for name in run.nodes if not _is_certain(name, nodes))
        at_ns = min(self._tasks.now_ns, job.end_s * SECOND) if job.end_s is not None else self._tasks.now_ns
        ran_ns = max(0, at_ns - run.started_ns) if run.started_ns is not None else 0
        parts = RunParts(unknown_ns=ran_ns)
        ended = EndedRun(cause=cause, exit_code=1, reason=words, bad_nodes=bad, parts=parts)
        free = tuple(name for name in run.nodes if _is_certain(name, nodes))
        self._progress.job_ended((run.task, run.number), free, ended, at_ns, now_ns)

    def never_ran(self, task: TaskRow, job: SlurmJob, words: str) -> None:
        """Its job ended before the run could begin."""
        if task.stopping:
            self._tasks.finish(task, Outcome.STOPPED, task.stopping, cause=Cause.STOPPED)
            return
        if _is_interrupted(job):
            return
        requeues, settings = task.requeues + 1, self._settings
        if requeues > self._tasks.spec(task).max_requeues:
            words = f"{words}, before its agents had joined; {requeues} jobs ended so"
            reason = f"{words}; they printed to {self._settings.slurm_output}"
            self._tasks.finish(task, Outcome.FAILED, reason, cause=Cause.INFRASTRUCTURE)
            return
        pause = pause_ns(requeues, settings.requeue_pause_ns, settings.requeue_pause_max_ns)
        self._tasks.put(msgspec.structs.replace(task, requeues=requeues, not_before_ns=self._tasks.now_ns + pause))


def _is_interrupted(job: SlurmJob) -> bool:
    """Also by the SIGTERM that Slurm sends when a grace time begins and it sends no other signal: the job FAILED."""
    return job.state in _INTERRUPTED or job.preempt_s is not None


def code_words(job: SlurmJob) -> str:
    """With what its batch script ended; empty: with 0, or nobody knows."""
    if job.signal:
        return f", signal {job.signal}"
    return f", exit code {job.exit_code}" if job.exit_code else ""


def _is_certain(slot: str, nodes: Mapping[str, SlurmNode]) -> bool:
    """Slurm has heard of the end of the job there."""
    node = nodes.get(node_of(slot)[0])
    return node is not None and node.is_certain
