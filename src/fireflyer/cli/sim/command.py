"""`ff sim`: replay a trace of tasks under the scheduler and under the policies that others use."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_file
from fireflyer.cli.new_file import replaced_file
from fireflyer.cli.numbers import Duration, WholeNumber

if TYPE_CHECKING:
    from fireflyer.cluster.core.replay.summary import Summary
    from fireflyer.cluster.core.replay.trace import TraceTask

__all__ = ["command", "to_json"]

POLICIES: Final = ("sharing", "fifo", "backfill", "preemption")
WARM_UP_SHARE: Final = 10
"""Of the trace, where none is given: the first tenth."""


@click.command(
    "sim",
    short_help="Replay a trace of tasks: utilisation, waits and lost work of scheduling policies.",
    epilog="""\b
Examples:
  ff sim month.csv --generate --nodes 2000 --demand 1.1  # write a trace like that of a research cluster
  ff sim month.csv --nodes 2000 --html month.html        # what four policies make of it
  ff sim month.csv --nodes 2200 --policy sharing         # and with 200 nodes more""",
)
@click.argument("trace", metavar="TRACE", shell_complete=complete_file)
@click.option("--nodes", metavar="N", type=WholeNumber(min=1, max=100_000), required=True, help="Nodes of the cluster.")
@click.option("--generate", is_flag=True, help="Write a trace for this cluster to TRACE; nothing is replayed.")
@click.option(
    "--days",
    metavar="N",
    type=WholeNumber(min=1, max=3660),
    default=30,
    show_default=True,
    help="Generate: its length.",
)
@click.option(
    "--demand",
    metavar="X",
    type=float,
    default=1.1,
    show_default=True,
    help="Generate: work over the node-time of the cluster.",
)
@click.option(
    "--seed",
    metavar="N",
    type=WholeNumber(min=0, max=2**62),
    default=1,
    show_default=True,
    help="Of the generated trace; of the failures of a replay.",
)
@click.option(
    "--policy",
    "policies",
    metavar="NAME",
    type=click.Choice(POLICIES),
    multiple=True,
    help="sharing, fifo, backfill or preemption; may be given several times.  [default: all]",
)
@click.option(
    "--zones", metavar="N", type=WholeNumber(min=1, max=100_000), default=1, show_default=True, help="Network zones."
)
@click.option(
    "--failures",
    metavar="X",
    type=float,
    default=6.5,
    show_default=True,
    help="Failures of nodes for 1,000 node-days; 0 for none.",
)
@click.option("--repair", metavar="TIME", type=Duration(), default="6h", show_default=True, help="Median of a repair.")
@click.option(
    "--start", metavar="TIME", type=Duration(), default="120s", show_default=True, help="From nodes to the first step."
)
@click.option(
    "--interval", metavar="TIME", type=Duration(), default="300s", show_default=True, help="Between two checkpoints."
)
@click.option(
    "--checkpoint", metavar="TIME", type=Duration(), default="2s", show_default=True, help="Stall of a checkpoint."
)
@click.option(
    "--save", metavar="TIME", type=Duration(), default="10s", show_default=True, help="From interruption to free nodes."
)
@click.option(
    "--guaranteed",
    metavar="TIME",
    type=Duration(),
    default="2h",
    show_default=True,
    help="Run time before an interruption.",
)
@click.option(
    "--warm-up",
    metavar="TIME",
    type=Duration(),
    help="Left out of utilisation and goodput: the first runs find the cluster empty.  [default: a tenth of the trace]",
)
@click.option("--html", "html_path", metavar="FILE", shell_complete=complete_file, help="Write a page with charts.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    *,
    trace: str,
    nodes: int,
    generate: bool,
    days: int,
    demand: float,
    seed: int,
    policies: tuple[str, ...],
    zones: int,
    failures: float,
    repair: int,
    start: int,
    interval: int,
    checkpoint: int,
    save: int,
    guaranteed: int,
    warm_up: int | None,
    html_path: str | None,
    as_json: bool,
) -> None:
    """Replay TRACE, a CSV file of tasks, on a cluster of N nodes that fail and are repaired: under the scheduler of the
    platform (`sharing`), and beside it FIFO, FIFO with backfill, and priorities with preemption. The same trace and
    options give the same numbers on any machine.

    Columns of the trace and how to read the table: docs/how-to/simulate-a-cluster.md.
    """
    from fireflyer.cli.sim.replays import Chosen, replay_all
    from fireflyer.cluster.core.replay.failures import FailureSettings
    from fireflyer.cluster.core.replay.life import Costs
    from fireflyer.cluster.core.replay.policy import ClusterSettings
    from fireflyer.cluster.core.replay.replay import ReplaySettings

    if generate:
        _generate(trace, nodes, days, demand, seed)
        return
    tasks = _read(trace)
    settings = ReplaySettings(
        cluster=ClusterSettings(nodes=nodes, zones=zones, guaranteed_ns=guaranteed),
        costs=Costs(start_ns=start, interval_ns=interval, checkpoint_ns=checkpoint, save_ns=save),
        failures=FailureSettings(per_1000_node_days=failures, repair_median_ns=repair),
        seed=seed,
        warm_up_ns=tasks[-1].submit_ns // WARM_UP_SHARE if warm_up is None else warm_up,
    )
    chosen = [Chosen(name) for name in (policies or POLICIES)]
    summaries = replay_all(tasks, settings, chosen, tell=lambda line: print(line, file=sys.stderr, flush=True))
    if html_path is not None:
        from fireflyer.cli.sim.page import render_page

        with replaced_file(html_path) as file:
            file.write(render_page(os.path.basename(trace), nodes, summaries))
    if as_json:
        click.echo(to_json(summaries))
    else:
        from fireflyer.cli.output import stdout_console
        from fireflyer.cli.sim.tables import print_summaries

        print_summaries(stdout_console(), summaries)
    if html_path is not None and not as_json:
        click.echo(f"Page: {os.path.abspath(html_path)}")


def to_json(summaries: tuple[Summary, ...]) -> bytes:
    """One object for each policy."""
    import msgspec

    return msgspec.json.encode({"policies": summaries})


def _generate(path: str, nodes: int, days: int, demand: float, seed: int) -> None:
    from fireflyer.cluster.core.replay.generator import TraceSettings, generate
    from fireflyer.cluster.core.replay.trace import write_trace

    tasks = generate(TraceSettings(nodes=nodes, days=days, demand=demand), seed)
    with replaced_file(path) as file:
        file.writelines(write_trace(tasks))
    work = sum(task.nodes * task.work_ns for task in tasks) / (nodes * days * 86400 * SECOND)
    click.echo(f"{path}: {len(tasks):,} tasks, work of {work:.3f} times the node-time of {nodes} nodes in {days} days")


def _read(path: str) -> tuple[TraceTask, ...]:
    from fireflyer.cluster.core.replay.trace import read_trace

    try:
        with open(path, encoding="utf-8", newline="") as file:
            return read_trace(file)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: no text in UTF-8; a trace is a CSV file") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
