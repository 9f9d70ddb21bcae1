"""`ff reliability report`: what the tables say."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import click

from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.reliability.mttf import gpus_per_node_option
from fireflyer.runtime.disk import translate_os_error

if TYPE_CHECKING:
    from fireflyer.analytics.reliability.characterisation import Characterisation

__all__ = ["directory_argument", "nodes_option", "report_command"]

_TERMINAL_ROWS = 40
"""Of a table; the page has more."""

directory_argument = click.argument("directory", metavar="DIRECTORY", shell_complete=complete_directory)
nodes_option = click.option(
    "--nodes", metavar="N", type=WholeNumber(min=1, max=10_000_000),
    help="Of the cluster: rates are per day of all of them.  [default: per day of running jobs]",
)  # fmt: skip


@click.command(
    "report",
    short_help="Rates of failures, what they cost, and an HTML page.",
    epilog="""\b
Examples:
  ff reliability report failures
  ff reliability report failures --nodes 2000 --html failures.html
  ff reliability report failures --json""",
)
@directory_argument
@nodes_option
@gpus_per_node_option
@click.option(
    "--html", "html_path", metavar="FILE", shell_complete=complete_file,
    help="Where the HTML page is written.  [default: none]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def report_command(
    *, directory: str, nodes: int | None, gpus_per_node: int, html_path: str | None, as_json: bool
) -> int:
    """Print rates of failures by symptom with 90 % intervals, failures and mean time to failure by size of job, jobs
    that failed again and again, and the training that was lost; from the tables that `ff reliability import` made in
    DIRECTORY."""
    from fireflyer.analytics.reliability.characterisation import characterise
    from fireflyer.analytics.reliability.page import render_page
    from fireflyer.analytics.reliability.tables import open_tables

    with open_tables(directory) as tables:
        found = characterise(tables, nodes=nodes, gpus_per_node=gpus_per_node)
    if html_path is not None:
        _write(html_path, render_page(found))
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return 0
    _print(found)
    if html_path is not None:
        click.echo(f"\nReport: {os.path.abspath(html_path)}")
    return 0


def _write(path: str, page: str) -> None:
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(page)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise translate_os_error(error, f"write {path}") from error


def _print(found: Characterisation) -> None:
    from rich.table import Table
    from rich.text import Text

    from fireflyer.analytics.reliability.page import headline, tables_of
    from fireflyer.cli.output import stdout_console

    console = stdout_console()
    console.print(Text(headline(found)))
    for note in found.notes:
        console.print(Text(f"note: {note}"))
    for one in tables_of(found):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, heading in enumerate(one.headings):
            table.add_column(heading, justify="right" if number >= one.numbers else "left", header_style="bright_black")
        for row in one.rows[:_TERMINAL_ROWS]:
            table.add_row(*(Text(cell) for cell in row))
        console.print()
        console.print(Text(one.title, style="bold"))
        console.print(table)
        left = len(one.rows) - _TERMINAL_ROWS
        notes = [one.note] * bool(one.note) + [f"{left} more rows in --html and --json"] * (left > 0)
        for note in notes:
            console.print(Text(note, style="bright_black"))
