"""`ff reliability mttf`: mean time to failure by size of a job."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import click

from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.analytics.reliability.published import PublishedFigure

__all__ = ["MAX_GPUS", "gpus_per_node_option", "mttf_command", "node_count", "rate_option"]

SIZES: Final = (8, 64, 512, 1024, 4096, 16_384, 131_072)
MAX_GPUS: Final = 100_000_000

rate_option = click.option(
    "--rate",
    metavar="FAILURES",
    type=click.FloatRange(min=0, max=1e6),
    default=6.5,
    show_default=True,
    help="Failures per 1000 node-days. 6.5 and 2.34 are those of two clusters of 16,000 and 8,000 GPUs.",
)
gpus_per_node_option = click.option(
    "--gpus-per-node", metavar="N", type=WholeNumber(min=1, max=1024), default=8, show_default=True, help="Of a node."
)


def node_count(gpus: int, gpus_per_node: int) -> int:
    return math.ceil(gpus / gpus_per_node)


@click.command(
    "mttf",
    short_help="Mean time to failure by size of a job.",
    epilog="""\b
Examples:
  ff reliability mttf
  ff reliability mttf --gpus 1024 --gpus 2048 --rate 2.34
  ff reliability mttf --published  # figures of two papers beside what they follow from""",
)
@click.option(
    "--gpus", metavar="N", type=WholeNumber(min=1, max=MAX_GPUS), multiple=True,
    help="Of a job; may be repeated.  [default: 8 to 131072]",
)  # fmt: skip
@rate_option
@gpus_per_node_option
@click.option("--published", is_flag=True, help="Print published figures beside computed ones instead.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def mttf_command(gpus: tuple[int, ...], rate: float, gpus_per_node: int, published: bool, as_json: bool) -> int:
    """Print how long a job of each size runs until one of its nodes fails, in the mean: 1 / (nodes · rate), and how
    likely one unhealthy node in a hundred is among its own."""
    from fireflyer.analytics.ettr import mttf_s
    from fireflyer.analytics.reliability.planning import unhealthy_probability
    from fireflyer.analytics.reliability.published import published_figures
    from fireflyer.analytics.reliability.published_failures import published_networks

    if published:
        papers = {"arXiv:2410.21680": published_figures(), "arXiv:2408.14158": published_networks()}
        _print_published(papers, as_json=as_json)
        return 0
    rows = []
    for one in gpus or SIZES:
        nodes = node_count(one, gpus_per_node)
        rows.append((one, nodes, mttf_s(nodes, rate / 1000), unhealthy_probability(nodes, 0.01)))
    if as_json:
        import msgspec

        keys = ("gpus", "nodes", "mttf_s", "unhealthy_probability_at_1_percent")
        found = [
            dict(zip(keys, (*row[:2], None if math.isinf(row[2]) else row[2], row[3]), strict=True)) for row in rows
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return 0
    click.echo(f"{rate:g} failures per 1000 node-days, {gpus_per_node} GPUs per node")
    click.echo(f"{'GPUs':>10}{'nodes':>9}{'MTTF':>12}   has an unhealthy node, if 1 in 100 is")
    for one, nodes, seconds, probability in rows:
        click.echo(f"{one:>10,}{nodes:>9,}{_hours(seconds):>12}   {probability:.1%}")
    return 0


def _hours(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    hours = seconds / 3600
    return f"{hours / 24:,.1f} d" if hours >= 48 else f"{hours:.2f} h" if hours >= 1 else f"{hours * 60:.2f} min"


def _print_published(papers: dict[str, tuple[PublishedFigure, ...]], *, as_json: bool) -> None:
    if as_json:
        import msgspec

        rows = [
            {"paper": paper, **figure._asdict(), "verdict": figure.verdict}
            for paper, figures in papers.items()
            for figure in figures
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
        return
    from rich.table import Table

    from fireflyer.cli.output import stdout_console

    for paper, figures in papers.items():
        table = Table(title=f"Figures of {paper}", title_justify="left")
        for heading in ("", "printed", "computed", "", "", "how"):
            table.add_column(heading, justify="right" if heading in ("printed", "computed") else "left")
        for figure in figures:
            table.add_row(
                figure.what, figure.printed, f"{figure.computed:,.4g}", figure.unit, figure.verdict, figure.why
            )  # fmt: skip
        stdout_console().print(table)
