"""What follows for a job's row from what Slurm says of the jobs of its name. Pure.

row            Slurm shows                      then
──────────────────────────────────────────────────────────────────────────────────────
any            its job                          the row takes that over
without id     jobs of its name                 one is adopted: one that runs, else the first
without id     none, and the pause is over      it is asked for again
with id        not its job                      Slurm has forgotten it: it ended
with id        one of another submit time       the same: slurmctld has lost its job, and gave the number again
any            further jobs of its name         they are cancelled
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from fireflyer.cluster.core.platform.store.rows import JobRow
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob

__all__ = ["FORGOTTEN", "AskAgain", "Finding", "Found", "Nothing", "is_wanted", "reconcile"]

CANCELLED: Final = "CANCELLED"
FORGOTTEN: Final = "FORGOTTEN"
"""The state of a job that Slurm shows no more: `output` takes it for ended."""


class Nothing(msgspec.Struct, frozen=True):
    """The row stays as it is."""


class AskAgain(msgspec.Struct, frozen=True):
    """Slurm has no job of this name, and none can come any more."""


class Found(msgspec.Struct, frozen=True):
    job: SlurmJob
    surplus: tuple[int, ...] = ()
    """Other jobs of the same name that live."""


Finding: TypeAlias = Nothing | AskAgain | Found


def reconcile(row: JobRow, said: Sequence[SlurmJob], now_ns: int) -> Finding:
    """`said`: the jobs that have its name, and belong to the right user."""
    if row.slurm_id:
        known = next((job for job in said if _is_of(row, job)), None)
        mine = known or SlurmJob(id=row.slurm_id, name=row.name, uid=0, state=FORGOTTEN)
    elif said:
        mine = min(said, key=_preference)
    else:
        return AskAgain() if row.retry_ns is not None and now_ns >= row.retry_ns else Nothing()
    surplus = tuple(sorted(job.id for job in said if job is not mine and job.phase is not Phase.ENDED))
    return Found(mine, surplus)


def _is_of(row: JobRow, job: SlurmJob) -> bool:
    times = {row.submit_s, job.submit_s} - {None}
    return job.id == row.slurm_id and len(times) <= 1


def _preference(job: SlurmJob) -> tuple[int, bool, int]:
    """One that was cancelled is most likely the second job of its name, which the last leader cancelled."""
    order = {Phase.RUNNING: 0, Phase.UNCLEAR: 1, Phase.WAITING: 2, Phase.ENDED: 3}
    return order[job.phase], job.state == CANCELLED, job.id


def is_wanted(row: JobRow, job: SlurmJob) -> bool:
    """A user or an administrator cancelled it.

    `slurmd` cancels a job too, which it cannot start (a prolog that fails, a number that another job had) and which
    must not be queued again: that one has nodes, and its agents have not all come up. Slurm shows no difference, so a
    cancellation counts as wanted where no `slurmd` had to do with it, or all had started it, or where `sacct` says that
    its user did it. Those which had started it are those of its nodes now: slurmctld that goes on from an older state
    may start the job again on other nodes, whose `slurmd` cancel it when they still have its number."""
    if job.state != CANCELLED or row.leave is not None:
        return False
    if job.cancelled_by is not None and job.cancelled_by == job.uid != 0:
        return True
    if row.run is not None:
        return not (job.nodes and row.nodes) or set(job.nodes) == set(row.nodes)
    return not (job.nodes or row.nodes)
