"""A job's report on a terminal: the same rows as the HTML page, laid out by rich.

Of a job that reported no step nearly every row is *unknown*: a terminal then gets how it ended and how to get the
rest, and the page keeps all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fireflyer.analytics.report import JobReport, PartRow, Row

__all__ = ["print_report", "print_rows"]

_STYLES = {
    "productive": "green",
    "lost": "red",
    "restart": "yellow",
    "checkpoint": "blue",
    "startup": "magenta",
    "other": "bright_black",
    "unknown": "bright_black",
}
BAR_CELLS = 20
MEANING_WIDTH = 84
"""A console narrower than this gets no explanation beside the parts."""


HOW_TO_REPORT = (
    "For steps, loss and checkpoints call fireflyer.cluster.Reporter in the script: docs/how-to/report-steps.md"
)


def print_report(console: Console, report: JobReport) -> None:
    """Prints all that is known. Colours and symbols are rich's to leave out where the console is no terminal."""
    undecided = "Suspended" if report.account.suspended else "Stopped" if report.account.stopped else "Incomplete"
    status = {None: (undecided, "bold yellow"), True: ("Succeeded", "bold green"), False: ("Failed", "bold red")}
    word, style = status[report.succeeded]
    console.print(Text.assemble((report.title, "bold"), " · ", (word, style)))
    console.print(Text(report.headline))
    if not report.account.reported:
        print_rows(console, "Checks", report.facts)
        console.print(Text(HOW_TO_REPORT, style="bright_black"))
        return
    sections: list[tuple[str, Sequence[Row]]] = [
        ("Checks", report.facts),
        ("Summary", report.summary),
        *((story.title, story.rows) for story in report.failures),
        ("Checkpoints", report.checkpoints),
    ]
    for title, rows in sections:
        print_rows(console, title, rows)
    _print_parts(console, report.parts)
    print_rows(console, "Effective training time ratio", report.ettr_rows)


def _grid(console: Console, title: str) -> Table:
    console.print()
    console.print(Text(title, style="bold"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=17)
    return table


def print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    table = _grid(console, title)
    table.add_column(overflow="fold")
    marks = {"": ("", ""), "good": ("✓ ", "green"), "bad": ("✗ ", "red")}
    for row in rows:
        symbol, style = marks[row.mark]
        value = Text.assemble((f"{symbol}{row.value}", style))
        if row.note:
            value.append(f"  {row.note}", style="bright_black")
        table.add_row(Text(f"  {row.label}"), value)
    console.print(table)


def _print_parts(console: Console, parts: Sequence[PartRow]) -> None:
    table = _grid(console, "Where the time went")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, width=BAR_CELLS)
    wide = console.width >= MEANING_WIDTH
    if wide:
        table.add_column(overflow="fold", style="bright_black")
    for part in parts:
        share = part.share or 0.0
        bar = Text("█" * round(share * BAR_CELLS) or ("▏" if share else ""), style=_STYLES[part.kind])
        meaning = (Text(part.meaning),) if wide else ()
        table.add_row(Text(f"  {part.label}"), Text(part.duration), Text(part.percent), bar, *meaning)
    console.print(table)
