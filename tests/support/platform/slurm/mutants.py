"""Mutants of what managers do with Slurm: its engine, or the loop that asks it, with one bug each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fireflyer.cluster.core.platform.slurm import engine, job_endings
from fireflyer.cluster.core.platform.slurm.engine import SlurmEngine
from fireflyer.cluster.core.platform.slurm.reconcile import AskAgain, Nothing, reconcile
from fireflyer.cluster.core.platform.store.rows import JobRow, JobState
from fireflyer.cluster.manager.slurm.loop import SlurmLoop

__all__ = ["SLURM_MUTANTS"]

Patch = pytest.MonkeyPatch


def asked_again_at_once(patch: Patch) -> None:
    """A job that is not found is asked for again, though the asking may be under way."""

    def hasty(row: JobRow, said: Any, now_ns: int) -> Any:
        found = reconcile(row, said, now_ns)
        return AskAgain() if isinstance(found, Nothing) and row.retry_ns is not None else found

    patch.setattr(engine, "reconcile", hasty)


def what_was_submitted_is_not_told_again(patch: Patch) -> None:
    """Where the manager did not lead when `sbatch` had ended."""
    original = SlurmLoop._tell_outcome

    async def tell(self: SlurmLoop) -> None:
        try:
            await original(self)
        finally:
            self._untold = None

    patch.setattr(SlurmLoop, "_tell_outcome", tell)


def a_row_that_nobody_submits_stays(patch: Patch) -> None:
    """Its task was stopped between the commit of the row and `sbatch`."""
    original = SlurmEngine._reconcile

    def one(self: SlurmEngine, row: JobRow, now_ns: int) -> None:
        if not (row.state is JobState.ASKED and row.leave is not None and row.term == self._ledger.term):
            original(self, row, now_ns)

    patch.setattr(SlurmEngine, "_reconcile", one)


def every_node_is_certain(patch: Patch) -> None:
    """Where Slurm says that a job has ended, nothing of it is left on any node, whether Slurm hears that or not."""
    patch.setattr(job_endings, "_is_certain", lambda _slot, _nodes: True)


def a_job_that_is_not_shown_is_dead(patch: Patch) -> None:
    patch.setattr(job_endings, "FORGOTTEN", "")


def every_cancelled_job_was_wanted(patch: Patch) -> None:
    """Also where slurmd did it."""
    patch.setattr(engine, "is_wanted", lambda row, job: job.state == "CANCELLED" and row.leave is None)


SLURM_MUTANTS: dict[str, Callable[[Patch], None]] = {
    mutant.__name__: mutant
    for mutant in (
        asked_again_at_once,
        what_was_submitted_is_not_told_again,
        a_row_that_nobody_submits_stays,
        every_node_is_certain,
        a_job_that_is_not_shown_is_dead,
        every_cancelled_job_was_wanted,
    )
}
