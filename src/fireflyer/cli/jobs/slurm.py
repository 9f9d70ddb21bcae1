"""The Slurm allocation in which `ff run` was started: its hosts, and how many ranks each has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.cluster.schema.hosts import expand_counts, expand_nodelist

__all__ = ["HOSTS_FROM_SLURM", "Allocation", "allocation_of", "notice_of_allocation"]

HOSTS_FROM_SLURM: Final = "slurm"
"""As a value of --hosts."""
_JOB: Final = "SLURM_JOB_ID"
_NODELIST: Final = "SLURM_JOB_NODELIST"
_STEP: Final = "SLURM_STEP_ID"
_SHELL_STEPS: Final = ("4294967290", "4294967291")
"""Steps of which there is one in an allocation: the shell of salloc, and the script of sbatch."""
_COUNTS: Final = ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_TASKS_PER_NODE")
"""What says how many ranks a node has; the first that is set counts."""


class Allocation(NamedTuple):
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    """On each host. Empty: Slurm says nothing."""


def notice_of_allocation(environ: Mapping[str, str]) -> str:
    """What the user is told where `ff run` takes hosts that nobody has named: it is the one program of an allocation of
    several nodes, started by its shell or its script. A program of srun is one of several, or was given a part of the
    nodes: empty. Raises `UsageError`."""
    job, nodes = environ.get(_JOB), environ.get(_NODELIST)
    if not job or not nodes or environ.get(_STEP, _SHELL_STEPS[0]) not in _SHELL_STEPS:
        return ""
    count = len(expand_nodelist(nodes))
    return f"hosts: the {count} nodes of Slurm job {job}; for this machine alone give --standalone" if count > 1 else ""


def allocation_of(environ: Mapping[str, str], *, ranks_wanted: bool) -> Allocation:
    """`ranks_wanted`: no number of ranks is given. Raises `UsageError`."""
    text = environ.get(_NODELIST)
    if not text:
        raise UsageError(
            f"--hosts slurm: {_NODELIST} is not set; start ff run inside of an allocation (salloc, sbatch), "
            "or name the hosts"
        )
    hosts = expand_nodelist(text)
    return Allocation(hosts, _ranks(environ, len(hosts)) if ranks_wanted else ())


def _ranks(environ: Mapping[str, str], hosts: int) -> tuple[int, ...]:
    name = next((name for name in _COUNTS if environ.get(name)), None)
    if name is None:
        return ()
    counts = expand_counts(environ[name])
    if len(counts) == 1:
        return counts * hosts
    if len(counts) != hosts:
        raise UsageError(
            f"{name}={environ[name][:80]} has numbers for {len(counts)} nodes, and the allocation has {hosts}; give "
            "--ranks-per-node N"
        )
    return counts
