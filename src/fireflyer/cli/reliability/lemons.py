"""`ff reliability lemons`: nodes that fail far more often than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.reliability.mttf import gpus_per_node_option
from fireflyer.cli.reliability.report import directory_argument

if TYPE_CHECKING:
    from fireflyer.analytics.reliability.lemons import LemonReport

__all__ = ["lemons_command"]


@click.command(
    "lemons",
    short_help="Nodes that fail far more often than the others.",
    epilog="""\b
Examples:
  ff reliability lemons failures
  ff reliability lemons failures --days 90 --nodes 2000
  ff reliability lemons failures --json""",
)
@directory_argument
@click.option(
    "--days",
    metavar="N",
    type=WholeNumber(min=1, max=3660),
    default=90,
    show_default=True,
    help="That are looked at, up to the last that the tables have.",
)
@click.option(
    "--nodes",
    metavar="N",
    type=WholeNumber(min=1, max=1_000_000),
    help="Of the cluster.  [default: those that jobs ran on or that reported something]",
)
@click.option(
    "--false-share",
    metavar="SHARE",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.2,
    show_default=True,
    help="Of the proposed nodes that may be none, in the mean.",
)
@gpus_per_node_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def lemons_command(*, directory: str, days: int, nodes: int | None, false_share: float, gpus_per_node: int,
                   as_json: bool) -> int:  # fmt: skip
    """Propose nodes to take out and to test, with the reasons, the most probable first. Nothing is done to them: take
    one out with `ff node drain NODE`, or with your scheduler."""
    from fireflyer.analytics.reliability.coverage import name_notes
    from fireflyer.analytics.reliability.lemons import find_lemons
    from fireflyer.analytics.reliability.signals import node_signals
    from fireflyer.analytics.reliability.tables import open_tables

    with open_tables(directory) as tables:
        fleet = node_signals(tables, days=days, nodes=nodes, gpus_per_node=gpus_per_node)
        notes = name_notes(tables)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    report = find_lemons(fleet, false_share=false_share)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
        return 0
    _print(report, max(one.days for one in fleet))
    return 0


def _print(report: LemonReport, days: float) -> None:
    per_1000 = 1000 * report.incidents_per_node_day
    said = f"{report.nodes:,} nodes over {days:.3g} days, {per_1000:.3g} incidents per 1000 node-days"
    if not report.proposals:
        click.echo(f"{said}: no node fails so much more often than the others that it can be told from chance")
        return
    sound = f"of which {report.expected_false:.1f} are sound in the mean"
    click.echo(f"{said}: {len(report.proposals)} proposed to be taken out, {sound}")
    for one in report.proposals:
        probability = f"{one.probability:.1%}" if one.probability < 0.9995 else "> 99.9%"
        click.echo(f"{one.signals.node}  a lemon with probability {probability}: fails {one.times:.0f} times as often")
        for line in one.why:
            click.echo(f"  - {line}")
