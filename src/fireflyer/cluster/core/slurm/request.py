"""What Slurm is asked for a task: the arguments of `sbatch`, and the script that starts an agent on each node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.tasks import TaskSpec

__all__ = ["JobOrders", "JobRequest", "arguments", "job_token_name", "node_of", "script", "slot_name"]

START_SLACK_NS: Final = 600 * SECOND
"""Agents come up and go within it: more than the task declares."""
_SIGNAL_S: Final = 1
"""Slurm sends the signal before the time limit of the job, too, and sends it once: a preemption after that is one by
SIGTERM. So this is as late as can be."""


class JobOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What the agents of a job read from their standard input."""

    token: Annotated[str, msgspec.Meta(max_length=512)]
    """Lets each node of the job join once."""
    managers: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=300)], ...], msgspec.Meta(max_length=16)]
    """`host:port` of all managers."""
    job: Annotated[str, msgspec.Meta(pattern=r"^t[0-9]{1,16}-[0-9]{1,9}$")]

    def __repr__(self) -> str:
        return f"JobOrders({self.job})"


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides how `sbatch` is called. `exclude`: names that Slurm knows."""

    name: str
    """Of the job: by it the job is found again."""
    task: int
    spec: TaskSpec
    exclude: tuple[str, ...] = ()
    output: str = "/dev/null"
    options: tuple[str, ...] = ()
    """The site's."""


def job_token_name(task: int, number: int) -> str:
    """Of one job of a task: part of the names of its nodes."""
    return f"t{task}-{number}"


def slot_name(node: str, job: str) -> str:
    """A node of Slurm as the platform calls it while a job has it: never given twice."""
    return f"{node}.{job}"


def node_of(slot: str) -> tuple[str, str]:
    """The node of Slurm, and the job; an empty job: it is no such name."""
    node, dot, job = slot.rpartition(".")
    task, dash, number = job.removeprefix("t").partition("-")
    is_slot = bool(dot and dash) and job.startswith("t") and task.isdigit() and number.isdigit()
    return (node, job) if is_slot else (slot, "")


def arguments(request: JobRequest) -> tuple[str, ...]:
    """Of `sbatch`, which reads the script from its standard input.

    `singleton`: Slurm starts no second job of this name and user while one lives, so one that was submitted twice, by
    a manager that was killed in between, never has two allocations. `no-requeue`: a job that Slurm preempts ends, and
    the manager submits another, since a join token serves once. `signal`: where Slurm is set to send this signal to a
    job that it preempts (`preempt_send_user_signal`), it sends no SIGTERM to the job's processes, which have the
    partition's GraceTime then. The script ignores it: the manager sees the preemption, and suspends the run."""
    spec = request.spec
    nodes = f"{spec.least_nodes}-{spec.most_nodes}" if spec.most_nodes > spec.least_nodes else str(spec.least_nodes)
    given = [
        "--parsable",
        f"--job-name={request.name}",
        f"--comment=Fire-Flyer task {request.task} {spec.name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--no-requeue",
        "--dependency=singleton",
        f"--signal=B:USR1@{_SIGNAL_S}",
        "--export=ALL",
        "--chdir=/",
        f"--output={request.output}",
    ]
    if spec.node_group != "default":
        given.append(f"--partition={spec.node_group}")
    if spec.labels:
        given.append(f"--constraint={'&'.join(spec.labels)}")
    if request.exclude:
        given.append(f"--exclude={','.join(request.exclude)}")
    if spec.time_ns is not None:
        minutes = -(-(spec.time_ns + spec.grace_ns + START_SLACK_NS) // (60 * SECOND))
        given.append(f"--time={minutes}")
    return (*given, *request.options)


def script(python: Sequence[str], orders: JobOrders) -> str:
    """The orders are the input of each agent: they are in no argument and in no environment variable."""
    program = shlex.join([*python, "-P", "-m", "fireflyer.cluster.agent.job"])
    said = msgspec.json.encode(orders).decode()
    return (
        "#!/bin/sh\n"
        "export PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}\n"
        "trap '' USR1\n"
        f"srun --kill-on-bad-exit=0 --ntasks-per-node=1 --export=ALL --input=all --wait=0 {program} <<'ORDERS'\n"
        f"{said}\n"
        "ORDERS\n"
    )
