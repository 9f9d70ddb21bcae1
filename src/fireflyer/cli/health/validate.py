"""`ff validate`: loads the parts of this machine, checks what comes out, and compares how fast with its peers."""

from __future__ import annotations

import os
import time

import click
import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.health.command import print_events, refuse_options
from fireflyer.cli.health.validate_cluster import links_command, nodes_command
from fireflyer.cli.health.validate_history import history_command
from fireflyer.cli.health.validate_slurm import slurm_nodes_command
from fireflyer.cli.nagios import NagiosGroup
from fireflyer.cli.numbers import Duration

__all__ = ["command"]


@click.group(
    "validate",
    cls=NagiosGroup,
    all_commands=True,
    invoke_without_command=True,
    short_help="Load this machine, and compare it.",
    epilog="""\b
Examples:
  ff validate --time 1m                                     # every validator for a minute
  ff validate --only storage --directory /scratch           # one of them
  ff validate --record records.jsonl                        # what was measured, for others to compare with
  ff validate --record records.jsonl --peers records.jsonl  # and compared with them
  ff validate nodes --every 7d                              # idle nodes of the platform, as tasks
  ff validate links                                         # links between them, in pairs
  ff validate slurm --output /shared/validation             # idle nodes of Slurm, as jobs
  ff validate history --low                                 # what was too low at first
\b
Exit codes, those of Nagios: 0 ok; 1 warning; 2 a fault; 3 nothing could be run, or one of --only could not,
or an option or a file is wrong.""",
)
@click.option("--only", metavar="NAME", multiple=True, help="Only this validator; may be repeated.")
@click.option("--time", "limit", type=Duration(), default="10s", show_default=True, help="Of each validator.")
@click.option(
    "--directory", metavar="DIR", default=".", show_default=True, shell_complete=complete_directory,
    help="On the storage that is tested.",
)  # fmt: skip
@click.option(
    "--peers", metavar="FILE", shell_complete=complete_file,
    help="Records of other nodes, one JSON object a line; those of this node's model count.",
)  # fmt: skip
@click.option("--record", metavar="FILE", shell_complete=complete_file, help="Append what was measured.")
@click.option("--model", metavar="NAME", help="Of this node.  [default: of its board, processors and GPUs]")
@click.option("--policy", "policy_path", metavar="FILE", shell_complete=complete_file, help="As for `ff health`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each event.")
@click.option("--pairs", metavar="NODES", help="Print which of these nodes (a,b,c) test their link when; run nothing.")
@click.pass_context
def command(
    ctx: click.Context, *, only: tuple[str, ...], limit: int, directory: str, peers: str | None, record: str | None,
    model: str | None, policy_path: str | None, as_json: bool, pairs: str | None,
) -> int:  # fmt: skip
    """Load the parts of this machine, check the results, and compare the speeds with those of nodes of its model.

    It takes all processors and GPUs, and half of the memory: run it on a node that has no task.

    Validators: links, cpu_stress, memory_bandwidth, memory, paths, allreduce, storage, repeated, gpu_memory, gpu_gemm,
    gpu_paths, gpu_allreduce."""
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return 0
    from fireflyer.cli.health.policy_file import read_policy
    from fireflyer.validators.core.checks.health_round import nagios_exit_code
    from fireflyer.validators.core.validation.node_models import as_recorded, usual_model
    from fireflyer.validators.stress import cuda, run
    from fireflyer.validators.stress.record_file import append_record, read_records

    if pairs is not None:
        _print_pairs(pairs.split(","))
        return 0
    for name in only:
        if name not in ("links", *run.VALIDATORS):
            known = ", ".join(("links", *run.VALIDATORS))
            raise click.UsageError(f"no validator {name!r}; validators are {known}", ctx)
    policy = read_policy(policy_path)
    records = read_records(peers) if peers is not None else []
    chosen = [name for name in run.VALIDATORS if not only or name in only]
    torch = cuda.usable_torch() if any(name.startswith("gpu_") for name in chosen) else None
    load = run.Load(limit / SECOND, os.path.abspath(directory), torch)
    name_of_model = model or run.model_of_node()
    found = list(run.validate(chosen, load))
    if records:
        first = run.record_of(found, name_of_model, time.time_ns())
        found = run.repeat_low(found, first, records, lambda names: run.validate(names, load))
    now_ns = time.time_ns()
    mine = run.record_of(found, name_of_model, now_ns)
    events = [
        *(run.links(policy) if not only or "links" in only else ()),
        *run.events_of(found, mine, records, now_ns, run.gpu_serials() if torch is not None else {}),
    ]
    usual = usual_model(mine, records)
    if record is not None and (usual is None or not usual.is_fault):  # else it would be meant to have fewer GPUs
        append_record(record, as_recorded(mine, usual))
    if as_json:
        for event in events:
            click.echo(msgspec.json.encode(event))
    else:
        print_events(events)
        for name, value in sorted(mine.figures.items()):
            click.echo(f"{name} {value:.4g}")
    return nagios_exit_code(events, asked=bool(only))


for one in (nodes_command, links_command, slurm_nodes_command, history_command):
    command.add_command(one)


def _print_pairs(nodes: list[str]) -> None:
    from fireflyer.validators.core.validation.pairs import rounds_of_pairs

    for number, pairs in enumerate(rounds_of_pairs(len(nodes)), 1):
        click.echo(f"round {number}: {' '.join(f'{nodes[a]}-{nodes[b]}' for a, b in pairs)}")
