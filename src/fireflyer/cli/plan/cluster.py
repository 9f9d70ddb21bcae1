"""`ff plan cluster`: what a training run takes on a cluster that may not exist yet, and what it costs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.plan.network import cable_rows, read_network, read_prices
from fireflyer.cli.train.plan import read_node, read_plan

if TYPE_CHECKING:
    from fireflyer.planning import Amount, ClusterAnswer, ClusterPlan, NetworkFile

__all__ = ["PlannedCluster", "cluster_command", "plan_of"]

MANUAL: Final = "docs/how-to/plan-cluster.md"
EXIT_DOES_NOT_SUFFICE: Final = 1


@click.command(
    "cluster",
    short_help="Time, failures, storage and cost of a training run on a cluster.",
    epilog="""\b
Examples:
  ff plan cluster cluster.toml
  ff plan cluster cluster.toml --queue-pairs 4 --json""",
)
@click.argument("file", metavar="FILE", shell_complete=complete_file)
@click.option(
    "--queue-pairs",
    metavar="N",
    type=WholeNumber(min=1, max=256),
    default=1,
    show_default=True,
    help="Flows of a transfer, which switches divide over links.",
)
@click.option("--seed", metavar="N", type=WholeNumber(min=0), default=0, show_default=True, help="Of hash and order.")
@click.option(
    "--most-transfers",
    metavar="N",
    type=WholeNumber(min=0, max=1 << 22),
    default=100_000,
    show_default=True,
    help="A step with more is not simulated; 0: none is.",
)
@click.option(
    "--ettr-goal",
    metavar="RATIO",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Also print what failures, stall or restart must be for this ETTR.",
)
@click.option("--html", metavar="PAGE", help="Also write one HTML file with tables and plots.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, in SI units.")
def cluster_command(
    *,
    file: str,
    queue_pairs: int,
    seed: int,
    most_transfers: int,
    ettr_goal: float | None,
    html: str | None,
    as_json: bool,
) -> int:
    """Print how long the training run in the TOML file FILE takes on its cluster, what its failures and checkpoints add
    to that, whether network and storage suffice, and what it costs. Nothing is started, and no GPU is needed.

    Exit code 1: the plan does not fit into the memory of a GPU, or storage or restarts do not suffice.
    """
    import msgspec

    planned = plan_of(file, queue_pairs=queue_pairs, seed=seed, most_transfers=most_transfers, ettr_goal=ettr_goal)
    if html is not None:
        _write_page(html, planned, queue_pairs, seed)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(planned.answer), indent=2))
    else:
        _print(planned.given, planned.answer)
    return 0 if planned.answer.suffices else EXIT_DOES_NOT_SUFFICE


class PlannedCluster(NamedTuple):
    given: ClusterPlan
    network: NetworkFile
    answer: ClusterAnswer


def plan_of(
    file: str, *, queue_pairs: int = 1, seed: int = 0, most_transfers: int = 0, ettr_goal: float | None = None
) -> PlannedCluster:
    """Of the cluster that the file describes; 0 transfers: no step is simulated. Raises `UsageError`."""
    from fireflyer.cli.toml_files import read_toml
    from fireflyer.codesign.parallel import node_names
    from fireflyer.planning import ClusterPlan, network_names, plan_cluster, with_simulation

    given = read_toml(file, ClusterPlan, name="FILE", advice=f"give a TOML file, see {MANUAL}", keys=MANUAL)
    directory = os.path.dirname(file)

    def beside(name: str, shipped: tuple[str, ...]) -> str:
        return name if name in shipped else os.path.join(directory, name)

    network = read_network(beside(given.network, network_names()))
    node = read_node(beside(given.node, node_names()))
    training, shape = read_plan(os.path.join(directory, given.training.plan))
    prices = None if given.prices is None else read_prices(os.path.join(directory, given.prices))
    answer = plan_cluster(given, network, node, training.plan, shape, prices, queue_pairs=queue_pairs, seed=seed,
                          ettr_goal=ettr_goal)  # fmt: skip
    if most_transfers:
        answer = with_simulation(
            answer, given, network, node, training.plan, shape, most_transfers=most_transfers, queue_pairs=queue_pairs,
            seed=seed,
        )  # fmt: skip
    return PlannedCluster(given, network, answer)


def _write_page(path: str, planned: PlannedCluster, queue_pairs: int, seed: int) -> None:
    from fireflyer.cli.new_file import replaced_file
    from fireflyer.planning import link_loads, render_cluster, ring_of

    given, network, answer = planned
    fabric = network.build()
    nodes, settings = ring_of(fabric, given.gpu_kind, answer.job_nodes, queue_pairs, seed)
    loads = link_loads(fabric, nodes, settings) if len(nodes) > 1 else None
    with replaced_file(path) as file:
        file.write(render_cluster(given.name, _sections(given, answer), answer, loads))


def _sections(given: ClusterPlan, answer: ClusterAnswer) -> dict[str, dict[str, str]]:
    return {
        "cluster": _cluster_rows(given, answer),
        "step": _step_rows(answer),
        "run": _run_rows(given, answer),
        "for the ETTR that is wanted, each of these alone suffices": _goal_rows(answer),
        "checkpoints": _checkpoint_rows(answer),
        "cost": _cost_rows(answer),
        "cables by length": _cable_rows(answer),
    }


def _print(given: ClusterPlan, answer: ClusterAnswer) -> None:
    for title, rows in _sections(given, answer).items():
        if rows:
            click.echo(f"{title}:")
        for name, words in rows.items():
            click.echo(f"  {name}: {words}")
    for words in answer.notes:
        click.echo(f"note: {words}")


def _cluster_rows(given: ClusterPlan, answer: ClusterAnswer) -> dict[str, str]:
    return {
        "name": given.name,
        "GPU nodes": f"{answer.gpu_nodes:,} with {answer.gpus:,} GPUs; the run has {answer.job_nodes:,} nodes",
        "network rate of a node": f"{answer.nic_bytes_per_s / 1e9:g} GB/s",
        "slowest flow of a ring in random order": f"{answer.ring_share:.0%} of its ports",
    }


def _step_rows(answer: ClusterAnswer) -> dict[str, str]:
    rows = {}
    for name, step in (("with the whole rate", answer.alone), ("with the slowest flow", answer.contended)):
        speed = f"{step.tokens_per_s:,.0f} tokens/s, MFU {step.mfu:.1%}"
        rows[name] = f"{step.step_s:.3f} s, {speed}, limited by {step.limit}"
    rows["memory of the fullest rank"] = f"{answer.alone.peak_memory.total / 1e9:.1f} GB of a GPU"
    if answer.alone.computing_share < 1:
        lent = 1 - answer.alone.computing_share
        rows["SMs that move tokens of experts"] = f"{lent:.0%}: computation takes {1 / (1 - lent):.2f} times as long"
    one = answer.simulated
    if one is not None:
        closed = f"closed form with the whole rate: {answer.alone.step_s:.3f} s"
        rows["simulated"] = f"{one.step_s:.3f} s; {closed}; {one.transfers:,} transfers"
        if one.beside_checkpoint_s is not None:
            rows["simulated while a checkpoint is written"] = (
                f"{one.beside_checkpoint_s:.3f} s; the network has carried it in {one.checkpoint_s:.1f} s"
            )
    return rows


def _run_rows(given: ClusterPlan, answer: ClusterAnswer) -> dict[str, str]:
    failures = answer.failures
    return {
        "tokens": f"{given.training.tokens:,.0f}",
        "without failures": f"{answer.days_without_failures} days",
        "mean time to failure": _seconds(failures.mttf_s),
        "between checkpoints": _seconds(failures.period_s),
        "ETTR": f"{failures.ettr}",
        "best between checkpoints": f"{_seconds(failures.optimal_period_s)}, which gives {failures.best_ettr}",
        "with failures": f"{answer.days} days",
    }


def _goal_rows(answer: ClusterAnswer) -> dict[str, str]:
    from fireflyer.planning import Amount

    goal = answer.failures.goal
    if goal is None:
        return {}

    def most(seconds: float | None) -> str:
        return "none suffices" if seconds is None else f"{seconds:,.3g} s at most"

    nodes = "any number" if goal.nodes is None else f"{goal.nodes:,} at most"
    periods, rate = goal.period_s, goal.failures_per_node_day * 1000
    period = "the optimal period" if goal.at_period_s is None else f"{goal.at_period_s:,.3g} s between checkpoints"
    return {
        "ETTR": f"{goal.ettr:g}, with {period}; the best with the inputs as they are is {goal.best:.4f}",
        "failures per 1000 node-days": f"{rate:.3g} at most" if rate else "none suffices",
        "stall of a checkpoint": most(goal.stall_s),
        "restart": most(goal.restart_s),
        "nodes": "none suffices" if goal.nodes == 0 else nodes,
        "between checkpoints": "none suffices" if periods is None else _seconds(Amount(*periods)),
    }


def _checkpoint_rows(answer: ClusterAnswer) -> dict[str, str]:
    saved = answer.checkpoint
    if saved is None:
        return {}
    return {
        "size": f"{saved.size_bytes / 1e9:,.1f} GB",
        "written in": f"{saved.written_s:.1f} s, by {saved.write_bytes_per_s / 1e9:,.1f} GB/s",
        "needed to write one before the next": f"{saved.needed_bytes_per_s / 1e9:,.3g} GB/s of storage",
    }


def _cost_rows(answer: ClusterAnswer) -> dict[str, str]:
    cost = answer.cost
    if cost is None:
        return {}
    own = cost.ownership
    rows: dict[str, Any] = {
        "currency": cost.currency,
        "network": cost.network,
        "purchase": own.purchase,
        "energy": own.energy,
        "upkeep": own.upkeep,
        "total": own.total,
        "kilowatts of switches and cables": cost.network_watts.times(0.001),
        "kilowatts of nodes at work": cost.node_watts.times(0.001),
        "kilowatts of the building": own.mean_watts.times(0.001),
        "GPU hour": own.per_gpu_hour,
        **({} if own.per_pflops_hour is None else {"hour of a PFLOP per second": own.per_pflops_hour}),
        "the run": cost.run,
        "a million tokens": cost.million_tokens,
    }
    if cost.rented_run is not None:
        hours = cost.owning_is_cheaper_after_hours
        rows["the run, rented"] = cost.rented_run
        rows["owning is cheaper after"] = "never" if hours is None else f"{hours} hours of use"
    return {name: str(value) for name, value in rows.items()}


def _cable_rows(answer: ClusterAnswer) -> dict[str, str]:
    if answer.cost is None:
        return {}
    return {
        name: ", ".join(
            f"{what} {value:,}" if isinstance(value, int) else f"{what} {value}" for what, value in row.items()
        )
        for name, row in cable_rows(answer.cost.cables).items()
    }


def _seconds(value: Amount) -> str:
    low, high = (format_duration(int(one * SECOND)) if one < 1e9 else "never" for one in value)
    return low if low == high else f"{low} to {high}"
