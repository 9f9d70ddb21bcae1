"""`ff reliability simulate`: weeks of a fleet with lemon nodes, with checks and repairs beside without."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click

from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.reliability.mttf import rate_option

if TYPE_CHECKING:
    from fireflyer.cluster.core.replay.fleet.simulation import FleetOutcome

__all__ = ["simulate_command"]

FACTORS: Final = (5.0, 10.0, 20.0)


@click.command(
    "simulate",
    short_help="Weeks of a fleet with lemon nodes, with checks and repairs beside without.",
    epilog="""\b
Examples:
  ff reliability simulate --nodes 200 --days 30 --factor 20
  ff reliability simulate --factor 20 --seed 3
  ff reliability simulate --json  # 2000 nodes, 90 days, lemons of 5, 10 and 20 times: half an hour""",
)
@click.option(
    "--nodes", metavar="N", type=WholeNumber(min=1, max=100_000), default=2000, show_default=True, help="Of 8 GPUs."
)
@click.option("--days", metavar="N", type=WholeNumber(min=1, max=3660), default=90, show_default=True, help="Length.")
@rate_option
@click.option(
    "--factor",
    "factors",
    metavar="X",
    type=click.FloatRange(min=1, max=1000),
    multiple=True,
    help="Faults of a lemon over those of another node; may be repeated.  [default: 5, 10 and 20]",
)
@click.option(
    "--lemon-share",
    metavar="SHARE",
    type=click.FloatRange(min=0, max=0.5),
    default=0.012,
    show_default=True,
    help="Of the nodes.",
)
@click.option(
    "--large", metavar="GPUS", type=WholeNumber(min=1, max=800_000), default=512, show_default=True,
    help="Runs of so many and more are called large.",
)  # fmt: skip
@click.option(
    "--demand", metavar="X", type=click.FloatRange(min=0.01, max=100), default=0.83, show_default=True,
    help="Work over the node-time of the cluster.",
)  # fmt: skip
@click.option(
    "--again",
    metavar="TIME",
    type=Duration(),
    default="4h",
    show_default=True,
    help="Until a fault that lasts ends the next run on its node, in the mean.",
)
@click.option(
    "--noticed",
    metavar="TIME",
    type=Duration(),
    default="6h",
    show_default=True,
    help="Until a person takes out a node with a fault that lasts, if no check does; the median.",
)
@click.option(
    "--seed", metavar="N", type=WholeNumber(min=0, max=2**62), default=1, show_default=True,
    help="Of tasks, lemons and faults.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def simulate_command(*, nodes: int, days: int, rate: float, factors: tuple[float, ...], lemon_share: float,
                     large: int, demand: float, again: int, noticed: int,
                     seed: int, as_json: bool) -> int:  # fmt: skip
    """Simulate a fleet under the scheduler of the platform, twice: nodes that failed take the next run at once (off);
    and checks, repairs and lemon nodes that are replaced, as decided by the health machine and `ff reliability lemons`
    (on). Both have the same tasks, lemons and faults. What is assumed: docs/how-to/reliability.md."""
    from fireflyer.cluster.core.replay.fleet.lemon_watch import Loop
    from fireflyer.cluster.core.replay.fleet.settings import FleetSettings
    from fireflyer.cluster.core.replay.fleet.simulation import simulate

    found = []
    for factor in factors or FACTORS:
        settings = FleetSettings(
            nodes=nodes, days=days, demand=demand, per_1000_node_days=rate, lemon_share=lemon_share,
            lemon_factor=factor, large_nodes=-(-large // 8), again_ns=again, noticed_ns=noticed,
        )  # fmt: skip
        for loop in (None, Loop()):
            began_s = time.process_time()
            found.append(simulate(settings, seed, loop))
            took_s = time.process_time() - began_s
            said = f"lemons of {factor:g} times, {'off' if loop is None else 'on'}: {took_s:.0f} s of a processor"
            print(said, file=sys.stderr, flush=True)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return 0
    click.echo(
        f"{nodes:,} nodes, {days} days, {rate:g} faults per 1000 node-days, {lemon_share:.1%} lemons, seed {seed}"
    )
    _print(found)
    return 0


_ROWS: Final[tuple[tuple[str, Callable[[FleetOutcome], str]], ...]] = (
    ("Runs of large tasks", lambda one: f"{one.large.runs:,}"),
    ("  failed", lambda one: f"{one.large.failed:,}"),
    ("    the first by a fault", lambda one: f"{one.large.by_fault:,}"),
    ("    again by the same fault", lambda one: f"{one.large.by_same_fault:,}"),
    ("    moved by a check", lambda one: f"{one.large.by_check:,}"),
    ("    on lemons", lambda one: f"{one.large.of_lemons:,}"),
    ("  failure share", lambda one: f"{one.large.failure_share:.1%}"),
    ("    of the last 30 days", lambda one: f"{one.large_last.failure_share:.1%}"),
    ("Failure share of other runs", lambda one: f"{one.small.failure_share:.2%}"),
    ("ETTR of large tasks", lambda one: f"{one.large_ettr:.3f}"),
    ("Goodput", lambda one: f"{one.goodput:.2%}"),
    ("Node-time open to tasks", lambda one: f"{one.open_share:.2%}"),
    ("Drains by checks", lambda one: f"{one.drains:,}"),
    ("Lemons", lambda one: "" if one.lemons is None else f"{one.lemons.lemons}"),
    ("  accused, of them right", lambda one: "" if one.lemons is None else f"{one.lemons.accused}, {one.lemons.right}"),
    ("  precision", lambda one: "" if one.lemons is None else _share(one.lemons.precision)),
    ("  recall", lambda one: "" if one.lemons is None else _share(one.lemons.recall)),
    ("  recall, rates known", lambda one: "" if one.lemons is None else _share(one.lemons.known_rates_recall)),
)


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _print(outcomes: Sequence[FleetOutcome]) -> None:
    heads = [f"{one.lemon_factor:g}x {'on' if one.loop else 'off'}" for one in outcomes]
    click.echo(f"{'':30}" + "".join(f"{head:>10}" for head in heads))
    for label, value in _ROWS:
        click.echo(f"{label:30}" + "".join(f"{value(one):>10}" for one in outcomes))
    pairs = zip(outcomes[::2], outcomes[1::2], strict=True)
    falls = [1 - on.large.failure_share / off.large.failure_share for off, on in pairs if off.large.failed]
    if falls:
        click.echo("The failure share of large runs falls by " + ", ".join(f"{fall:.0%}" for fall in falls))
