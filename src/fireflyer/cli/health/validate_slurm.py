"""`ff validate slurm`: validations of idle nodes of Slurm, as jobs of the lowest priority."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.health.validation import (
    MAX_REASON,
    SLACK_NS,
    at_fault,
    check_names,
    common,
    held,
    keep,
    measure,
    of_nodes,
    say,
    told,
    worst_of,
)

if TYPE_CHECKING:
    from fireflyer.base.health_event import HealthEvent
    from fireflyer.cluster.core.slurm.fleet import FleetNode
    from fireflyer.cluster.manager.slurm.commands import SlurmCommands
    from fireflyer.validators.cluster_tasks import Ended, Job
    from fireflyer.validators.core.validation.reports import NodeReport

__all__ = ["slurm_nodes_command"]

_SLURM_LIMIT_NS: Final = 30 * SECOND
_SERVES: Final = ("idle", "allocated", "mixed", "completing", "planned")
_RESERVED: Final = ("reserved", "maint")


@click.command("slurm", short_help="Validate idle nodes of Slurm.", epilog="""\b
Examples:
  ff validate slurm --partition idle --output /shared/validation  # those not validated for a week
  ff validate slurm --sbatch=--qos=idle --sbatch=--gres=gpu:8 --output /shared/validation --drain
\b
Exit codes: 0 all are in order; 1 a warning; 2 a node is at fault; 3 some could not be validated.""")  # fmt: skip
@of_nodes
@click.option("--output", "outputs", metavar="DIR", default=".", show_default=True, shell_complete=complete_directory,
              help="For the files of the jobs: the nodes must have it at the same path.")  # fmt: skip
@click.option("--partition", metavar="NAME", help="Of the jobs; only its nodes are validated.")
@click.option("--sbatch", "options", metavar="OPTION", multiple=True,
              help="Further option of sbatch, as --sbatch=--qos=idle; may be repeated.")  # fmt: skip
@click.option("--drain", is_flag=True, help="Drain nodes at fault, as `ff health slurm`; else it is proposed.")
@click.option(
    "--breaker-share", type=click.FloatRange(0, 1), metavar="SHARE", default=0.05, show_default=True,
    help="Of the nodes of a partition, that may be drained by ff at one time; one may be in any case.",
)  # fmt: skip
@common
def slurm_nodes_command(
    *, every: int, only: tuple[str, ...], each: int, directory: str, records: str, outputs: str, partition: str | None,
    options: tuple[str, ...], apart: tuple[str, ...], drain: bool, breaker_share: float, names: tuple[str, ...],
    at_once: int | None, limit: int, as_json: bool,
) -> int:  # fmt: skip
    """Validate nodes of Slurm that have no job, those first that were validated longest ago.

    Each validation is a job that has its node alone, of the lowest priority, and is not requeued. Jobs that Slurm
    preempts for others begin again when the node is idle: give a partition or QOS that is preempted. With
    --sbatch=--reservation=NAME the nodes of a reservation are validated, also for maintenance; of the others none.
    Nodes are compared with those of their model, also those of earlier days. Run it from a timer, as who may drain
    nodes."""
    from fireflyer.cluster.manager.slurm.commands import SlurmCommands
    from fireflyer.validators.cluster_tasks import Job
    from fireflyer.validators.core.validation.node_measurements import NodeMeasurements
    from fireflyer.validators.core.validation.queue import due_nodes
    from fireflyer.validators.slurm_job_files import cancel_left_jobs
    from fireflyer.validators.slurm_jobs import check_outputs, reservations_of, run_slurm_jobs
    from fireflyer.validators.stress import run
    from fireflyer.validators.stress.record_file import read_records

    check_names(only)
    check_outputs(outputs)
    slurm = SlurmCommands(os.environ.get("PATH", os.defpath), _SLURM_LIMIT_NS)
    click.get_current_context().with_resource(held(records))
    asyncio.run(cancel_left_jobs(slurm, os.path.abspath(outputs), say))
    known = read_records(records)
    reservations = reservations_of(options)
    of_them = asyncio.run(_reserved(slurm, reservations)) if reservations and not names else None
    chosen = _chosen(asyncio.run(slurm.fleet()), partition, names, of_them)
    due = chosen if names else due_nodes(chosen, known, time.time_ns(), every)
    if not due:
        say(f"all {len(chosen)} nodes were validated within {format_duration(every)}")
        return 0
    limit_ns = (len(only) or len(run.VALIDATORS)) * 2 * each + SLACK_NS
    given = (*((f"--partition={partition}",) if partition else ()), *options)
    most = at_once or max(1, len(chosen) // 20)
    groups = [frozenset(group.split(",")) for group in apart]

    def job(name: str, validators: Sequence[str]) -> Job:
        words = ("node", "--time", f"{max(1, each // SECOND)}s", "--directory", directory)
        return Job((name,), partition or "", (*words, *(f"--only={one}" for one in validators)), directory, limit_ns)

    def validated(jobs: Sequence[Job]) -> Iterator[Ended[NodeReport]]:
        return run_slurm_jobs(
            slurm, jobs, os.path.abspath(outputs), groups, most_nodes=most, limit_ns=limit, options=given, say=say
        )

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cancels what was submitted, as Ctrl-C
    ended: list[Ended[NodeReport]] = []
    measured = NodeMeasurements(known, only)
    try:
        try:
            measure(validated, [job(name, only) for name in due], job, measured, ended)
        finally:  # what was measured before Ctrl-C, or before Slurm did not answer, counts
            code, found = told(measured, ended, as_json=as_json)
        failed: FireflyerError | None = None
        for name, events in found.items():
            if at_fault(events):
                try:
                    _drain(slurm, name, worst_of(events), breaker_share, drain=drain)
                except FireflyerError as error:  # the others are at fault all the same
                    failed = failed or error
        if failed is not None:
            raise failed
    finally:
        try:
            keep(measured, records)
        finally:
            with contextlib.suppress(FireflyerError):  # the next command does it
                asyncio.run(cancel_left_jobs(slurm, os.path.abspath(outputs), say))  # which Slurm has shown since
    return code


def _chosen(
    fleet: dict[str, FleetNode], partition: str | None, names: Sequence[str], reserved: frozenset[str] | None
) -> list[str]:
    """Nodes that a job could get, of those that are `reserved` for it, or that were named."""
    for name in names:
        if name not in fleet:
            raise UsageError(f"Slurm knows no node {name}; `sinfo --Node` lists them")
    there = [node for node in fleet.values() if partition is None or partition in node.partitions]
    if not there:
        raise UsageError(f"Slurm has no node in a partition {partition}; `sinfo` lists them")
    states = _SERVES if reserved is None else _RESERVED
    free = [
        node.name
        for node in there
        if node.answers and node.powered and node.state in states and (reserved is None or node.name in reserved)
    ]
    if reserved is not None and not free:
        raise UsageError("no node of the reservation is idle now; `scontrol show reservation` lists them")
    return list(names) or free


async def _reserved(slurm: SlurmCommands, reservations: Sequence[str]) -> frozenset[str]:
    return frozenset([node for name in reservations for node in await slurm.reserved(name)])


def _drain(slurm: SlurmCommands, name: str, fault: HealthEvent, share: float, *, drain: bool) -> None:
    """By the rules of `ff health slurm`, whose rounds on the node then have its repair. Raises `FireflyerError`."""
    from fireflyer.cli.health.slurm_validate import as_happened
    from fireflyer.cluster.core.slurm.drains import DrainLimits, decide
    from fireflyer.cluster.core.slurm.findings import Evidence
    from fireflyer.cluster.core.slurm.node_record import DrainRecord

    if not drain:
        reason = quote(f"validation: {fault.words}"[:MAX_REASON])
        say(f"proposed: scontrol update nodename={name} state=drain reason={reason}")
        return
    evidence = Evidence((as_happened(fault),), passed=False)
    limits = DrainLimits(breaker_share=share)
    decision = decide("check", name, asyncio.run(slurm.fleet()), evidence, DrainRecord(), limits, int(time.time()))
    if decision.drain:
        asyncio.run(slurm.drain(name, decision.drain))
    say(f"{name}: {'drained: ' if decision.drain else ''}{decision.words}")
