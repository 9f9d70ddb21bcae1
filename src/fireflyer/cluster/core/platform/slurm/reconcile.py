"""What follows for a job's row from what Slurm says of the jobs of its name. Pure.

row            Slurm shows                      then
──────────────────────────────────────────────────────────────────────────────────────
any            its job                          the row takes that over
without id     jobs of its name                 one is adopted: one that runs, else the first
without id     none, and the pause is over      it is asked for again
with id        not its job                      Slurm has forgotten it: it ended
any            further jobs of its name         they are cancelled
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from fireflyer.cluster.core.platform.store.rows import JobRow
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob

__all__ = ["FORGOTTEN", "AskAgain", "Finding", "Found", "Nothing", "reconcile"]

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
        known = next((job for job in said if job.id == row.slurm_id), None)
        mine = known or SlurmJob(id=row.slurm_id, name=row.name, uid=0, state=FORGOTTEN)
    elif said:
        mine = min(said, key=_preference)
    else:
        return AskAgain() if row.retry_ns is not None and now_ns >= row.retry_ns else Nothing()
    surplus = tuple(sorted(job.id for job in said if job.id != mine.id and job.phase is not Phase.ENDED))
    return Found(mine, surplus)


def _preference(job: SlurmJob) -> tuple[int, int]:
    order = {Phase.RUNNING: 0, Phase.UNCLEAR: 1, Phase.WAITING: 2, Phase.ENDED: 3}
    return order[job.phase], job.id
