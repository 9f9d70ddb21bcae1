"""`ff validate history`: what was measured, and which figures were too low at first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import msgspec

from fireflyer.base.units import SECOND, counted
from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.validators.core.validation.records import NodeRecord

__all__ = ["history_command"]


@click.command("history", short_help="Show records of validations.", epilog="""\b
Examples:
  ff validate history                              # records of all nodes, the newest last
  ff validate history --node gpu-7 --last 1000     # of one node, for longer
  ff validate history --records links.jsonl --low  # links that were slow at first""")  # fmt: skip
@click.option("--records", metavar="FILE", default="validation.jsonl", show_default=True, shell_complete=complete_file,
              help="Of `ff validate nodes`, `slurm` or `links`.")  # fmt: skip
@click.option("--node", "names", metavar="NAME", multiple=True, help="Only this node, and its links; may be repeated.")
@click.option("--low", "only_low", is_flag=True, help="Only records with figures that were too low at first.")
@click.option("--last", type=WholeNumber(min=1), metavar="N", default=100, show_default=True,
              help="The newest N of the chosen records.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each record.")
def history_command(*, records: str, names: tuple[str, ...], only_low: bool, last: int, as_json: bool) -> int:
    """Show what was measured when, the newest last. A figure that was too low at first has been measured again: all its
    measurements are shown, and the one that counts."""
    from fireflyer.validators.stress.record_file import read_records

    chosen = [
        record
        for record in read_records(records)
        if (not names or set(names).intersection(record.node.split())) and (record.repeated or not only_low)
    ]
    if len(chosen) > last:
        click.echo(f"{counted(len(chosen) - last, 'older record')} not shown; --last shows more", err=True)
    for record in chosen[-last:]:
        if as_json:
            click.echo(msgspec.json.encode(record))
        else:
            for line in _lines(record):
                click.echo(line)
    return 0


def _lines(record: NodeRecord) -> list[str]:
    from fireflyer.cli.platform.connect import plain

    seen = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.seen_ns / SECOND))
    node, model = plain(record.node, 160), plain(record.model, 200)
    lines = [f"{seen} {node}: {counted(len(record.figures), 'figure')}, {model or 'no model'}"]
    for name, values in sorted(record.repeated.items()):
        told = ", ".join(f"{value:.4g}" for value in values)
        lines.append(f"  {name} was too low at first: {told}; {record.figures.get(name, 0):.4g} counts")
    return lines
