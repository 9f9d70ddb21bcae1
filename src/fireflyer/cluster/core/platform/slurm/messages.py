"""What the engine for Slurm is told, and what it wants done. The shell does that as often as it is asked: each is
either safe to repeat, or named so that it is done once."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.slurm.output import SlurmJob, SlurmNode
from fireflyer.cluster.core.slurm.request import JobRequest

__all__ = [
    "Cancel",
    "JobNotSubmitted",
    "JobSubmitted",
    "SlurmEvent",
    "SlurmSaid",
    "SlurmSettings",
    "SlurmSilent",
    "Submit",
    "WatchedJob",
    "Work",
]


class SlurmSettings(msgspec.Struct, frozen=True, kw_only=True):
    most_jobs: int = 1000
    """In Slurm at a time; further tasks wait here."""
    submit_slack_ns: int = 60 * SECOND
    """An `sbatch` of which nobody knows the outcome has been refused or carried out after so long."""
    refusal_pause_ns: int = 30 * SECOND
    agents_timeout_ns: int = 300 * SECOND
    """From the start of a job until all of its agents have joined."""
    leave_timeout_ns: int = 120 * SECOND
    """From the wish that agents go until the job is cancelled: their logs are sent meanwhile."""


# --- events ---


class SlurmSaid(msgspec.Struct, frozen=True, tag="SlurmSaid"):
    """All jobs that were watched, of the right user, and all nodes. The asking began after everything that was told
    before it."""

    jobs: tuple[SlurmJob, ...]
    nodes: tuple[SlurmNode, ...]


class SlurmSilent(msgspec.Struct, frozen=True, tag="SlurmSilent"):
    """Slurm did not answer, or not in a form that can be read: nothing follows."""

    reason: str


class JobSubmitted(msgspec.Struct, frozen=True, tag="JobSubmitted"):
    task: int
    number: int
    slurm_id: int


class JobNotSubmitted(msgspec.Struct, frozen=True, tag="JobNotSubmitted"):
    """`certain`: Slurm refused it; else nobody knows whether it has the job. `attempt`: of `Submit`."""

    task: int
    number: int
    reason: str
    certain: bool
    attempt: int


SlurmEvent: TypeAlias = SlurmSaid | SlurmSilent | JobSubmitted | JobNotSubmitted


# --- what is to be done ---


class WatchedJob(msgspec.Struct, frozen=True):
    """Slurm is asked for jobs of this name; the user's job it must be."""

    name: str
    user: str
    job: str
    """As in the names of its nodes."""
    slurm_id: int = 0
    """0: not known yet."""
    submit_s: int | None = None


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """Once for each `attempt`: what became of it is told before the work is asked for again."""

    task: int
    number: int
    attempt: int
    user: str
    job: str
    most_nodes: int
    request: JobRequest


class Cancel(msgspec.Struct, frozen=True):
    slurm_id: int
    name: str
    """A job of another name that has this number meanwhile is left alone."""
    reason: str


Work: TypeAlias = Submit | Cancel
