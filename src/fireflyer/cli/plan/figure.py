"""`ff plan figure`: published tables beside what we compute."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import UsageError

if TYPE_CHECKING:
    from fireflyer.planning import PublishedFigure

__all__ = ["figure_command"]


@click.command(
    "figure",
    short_help="Compute a published table or figure again.",
    epilog="""\b
Examples:
  ff plan figure                 names of all
  ff plan figure v3-table-3
  ff plan figure all --json""",
)
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def figure_command(*, name: str | None, as_json: bool) -> int:
    """Print the table or figure NAME of the Fire-Flyer or the DeepSeek-V3 paper beside what we compute, with the
    difference, and whether it follows. `all` prints every one."""
    found = _figures()
    if name is None:
        for figure in found:
            click.echo(f"{figure.name:<16} {figure.title}")
        return 0
    if name != "all":
        found = tuple(figure for figure in found if figure.name == name)
        if not found:
            raise UsageError(f"no figure is called {name!r}; `ff plan figure` lists their names")
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


def _figures() -> tuple[PublishedFigure, ...]:
    import msgspec

    from fireflyer.codesign.model import shape_from_config
    from fireflyer.codesign.parallel import NodeModel
    from fireflyer.planning import published_figures

    models = files("fireflyer.planning").joinpath("models")
    shapes = {
        one.name.removesuffix(".json"): shape_from_config(json.loads(one.read_bytes())) for one in models.iterdir()
    }
    node = files("fireflyer.codesign.parallel").joinpath("nodes", "pcie-a100.toml").read_bytes()
    return published_figures(shapes, msgspec.toml.decode(node, type=NodeModel))


def _print(figure: PublishedFigure) -> None:
    from rich.table import Table
    from rich.text import Text

    from fireflyer.cli.output import stdout_console

    table = Table(title=Text(f"{figure.title} ({figure.source})"), title_justify="left")
    for heading in ("", "published", "computed", "", "difference", "", "how"):
        table.add_column(heading, justify="right" if heading in ("published", "computed", "difference") else "left")
    for row in figure.rows:
        computed = "" if row.computed is None else f"{row.computed:,.6g}"
        difference = "" if row.difference is None else f"{row.difference:+.2%}"
        table.add_row(row.what, f"{row.published:,.6g}", computed, row.unit, difference, row.verdict, row.how)
    stdout_console().print(table)
