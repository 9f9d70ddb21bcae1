"""`ff plan figure`: published tables beside what we compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.completion import complete_file
from fireflyer.cli.plan.network import read_prices

if TYPE_CHECKING:
    from fireflyer.planning import PublishedFigure

__all__ = ["figure_command"]


@click.command(
    "figure",
    short_help="Compute a published table or figure again.",
    epilog="""\b
Examples:
  ff plan figure  # names of all
  ff plan figure v3-table-3
  ff plan figure v3-table-3 --prices prices.toml
  ff plan figure all --json""",
)
@click.argument("name", metavar="[NAME]", required=False)
@click.option(
    "--prices",
    metavar="FILE",
    shell_complete=complete_file,
    help="TOML file with prices for v3-table-3, which does not print them.  [default: fitted to four of its costs]",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def figure_command(*, name: str | None, prices: str | None, as_json: bool) -> int:
    """Print the table or figure NAME of the Fire-Flyer or the DeepSeek-V3 paper beside what we compute, with the
    difference, whether it follows, and on which inputs that depends. `all` prints every one."""
    from fireflyer.planning import published_figures

    found = published_figures(prices=None if prices is None else read_prices(prices))
    if name is None:
        for figure in found:
            click.echo(f"{figure.name:<16} {figure.title}")
        return 0
    if name != "all":
        near = ", ".join(figure.name for figure in found if name in figure.name)
        found = tuple(figure for figure in found if figure.name == name)
        if not found:
            advice = f"use {near}" if near else "`ff plan figure` lists their names"
            raise UsageError(f"no figure is called {name!r}; {advice}")
    if as_json:
        import msgspec

        rows = [
            {
                **figure._asdict(),
                "rows": [{**row._asdict(), "bounds": [one if abs(one) < 1e300 else None for one in row.bounds],
                          "verdict": row.verdict} for row in figure.rows],
            }
            for figure in found
        ]  # fmt: skip
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
        return 0
    for figure in found:
        _print(figure)
    return 0


def _print(figure: PublishedFigure) -> None:
    from rich.table import Table
    from rich.text import Text

    from fireflyer.cli.output import stdout_console

    table = Table(title=Text(f"{figure.title} ({figure.source})"), title_justify="left")
    for heading in ("", "published", "computed", "", "difference", "", "how"):
        table.add_column(heading, justify="right" if heading in ("published", "computed", "difference") else "left")
    for row in figure.rows:
        low, high = row.computed_bounds or (row.computed, row.computed)
        computed = _between(*(None if one is None else f"{one:,.6g}" for one in (low, high)))
        difference = _between(*(None if one is None else f"{one / row.published - 1:+.2%}" for one in (low, high)))
        verdict = f"{row.verdict}, depends on {row.depends_on}" if row.depends_on else row.verdict
        table.add_row(row.what, f"{row.published:,.6g}", computed, row.unit, difference, verdict, row.how)
    stdout_console().print(table)


def _between(low: str | None, high: str | None) -> str:
    if low is None or high is None:
        return ""
    return low if low == high else f"{low} to {high}"
