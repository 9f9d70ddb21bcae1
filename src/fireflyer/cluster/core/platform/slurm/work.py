"""What is to be done in Slurm now, from what is committed and from what Slurm said last. Asked for again and again."""

from __future__ import annotations

from collections.abc import Iterator

from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.slurm.engine import SlurmEngine
from fireflyer.cluster.core.platform.slurm.messages import Cancel, SlurmSettings, Submit, WatchedJob, Work
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import JobRow, JobState, TaskRow
from fireflyer.cluster.core.slurm.request import JobRequest, job_token_name, node_of
from fireflyer.cluster.schema.tasks import TaskSpec

__all__ = ["excluded", "watched", "work"]


def watched(ledger: Ledger) -> tuple[WatchedJob, ...]:
    """Jobs that have not ended."""
    return tuple(
        WatchedJob(
            row.name,
            ledger.tasks.committed[row.task].user,
            job_token_name(row.task, row.number),
            row.slurm_id,
            row.submit_s,
        )
        for row in ledger.jobs.committed.values()
        if row.state is not JobState.ENDED
    )


def work(
    ledger: Ledger, engine: SlurmEngine, settings: Settings, slurm: SlurmSettings, time_ns: int
) -> tuple[Work, ...]:
    """Nothing while Slurm does not answer."""
    if engine.silent:
        return ()
    done: list[Work] = list(engine.cancelled())
    for row in ledger.jobs.committed.values():
        if row.state is not JobState.ENDED:
            done += _of(row, ledger, engine, settings, slurm, time_ns)
    return tuple(done)


def _of(
    row: JobRow, ledger: Ledger, engine: SlurmEngine, settings: Settings, slurm: SlurmSettings, time_ns: int
) -> Iterator[Work]:
    if row.leave is not None:
        late = row.leave_ns is not None and time_ns - row.leave_ns >= slurm.leave_timeout_ns
        if row.slurm_id and (row.state is JobState.WAITING or late):
            yield Cancel(row.slurm_id, row.name, "its task needs it no more")
    elif row.state is JobState.ASKED and row.retry_ns is None and row.term == ledger.term:
        yield _submit(row, ledger, engine, settings)


def _submit(row: JobRow, ledger: Ledger, engine: SlurmEngine, settings: Settings) -> Submit:
    task = ledger.tasks.committed[row.task]
    spec = ledger.submissions.committed[task.submission].spec
    return Submit(
        task=row.task,
        number=row.number,
        attempt=row.asked_ns,
        user=task.user,
        job=job_token_name(row.task, row.number),
        most_nodes=spec.most_nodes,
        request=JobRequest(
            name=row.name,
            task=row.task,
            spec=spec,
            exclude=excluded(spec, task, tuple(engine.nodes)),
            output=settings.slurm_output,
            options=settings.slurm_options,
        ),
    )


def excluded(spec: TaskSpec, task: TaskRow, known: tuple[str, ...]) -> tuple[str, ...]:
    """Slurm takes names of its own nodes alone. `--nodelist` would demand all of `only`, so the others are excluded.
    Nodes on which the task failed are left out as long as enough remain."""
    never = set(spec.never) | (set(known) - set(spec.only) if spec.only else set())
    failed = {node_of(name)[0] for name in task.excluded}
    left = [name for name in known if name not in never and name not in failed]
    out = never | failed if len(left) >= spec.least_nodes else never
    return tuple(name for name in known if name in out)
