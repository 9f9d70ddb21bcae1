"""`ff collectives`: what the flight recorders of a job's ranks say, and what a job's sums will do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fireflyer.cli.collectives.plan import plan_command
from fireflyer.cli.completion import complete_file
from fireflyer.cli.help_sections import OrderedGroup

if TYPE_CHECKING:
    from rich.console import Console

    from fireflyer.collectives.flight import Dump, Verdict

__all__ = ["EXIT_UNDECIDED", "command", "to_json"]

EXIT_UNDECIDED = 3
MAX_ROWS = 64


@click.group(
    "collectives",
    cls=OrderedGroup,
    short_help="Plan collectives; find the rank that made them hang.",
    epilog="""\b
Examples:
  ff collectives explain RUN_DIR/flight              # which rank failed, hung, or made another call
  ff collectives plan --nodes 16 --ranks-per-node 8  # algorithms and predicted times""",
)
def command() -> None:
    """Plan the collectives of a job, and read the flight recorder dumps that its ranks wrote when one failed."""


@command.command(
    "explain",
    short_help="Name the rank that failed, hung, or made another call than the others.",
    epilog="""\b
Examples:
  ff collectives explain runs/train-20260101-120000/flight
  ff collectives explain host-a/dumps host-b/dumps --json""",
)
@click.argument("dumps", metavar="DUMP...", nargs=-1, required=True, shell_complete=complete_file)
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as one JSON array.")
def explain_command(dumps: tuple[str, ...], as_json: bool) -> int:
    """Read the dumps of the ranks of a job and name the rank that held the others up.

    DUMP is a file (flight-3.json), a directory with dumps anywhere below it (RUN_DIR/flight), or a pattern. Give the
    dumps of all ranks: a rank without one is suspected. Each group of ranks gets a verdict.

    Exit code: 0 if every verdict is decided (a rank is named, or no rank waits); 3 if one is undecided; 1 or 2 if dumps
    are damaged, missing, or of different jobs.
    """
    from fireflyer.cli.output import stdout_console
    from fireflyer.collectives.flight import explain, find_dumps, read_dumps

    groups: dict[str, list[Dump]] = {}
    for _, dump in read_dumps(find_dumps(dumps)):
        groups.setdefault(dump.group, []).append(dump)
    ordered = sorted(groups.values(), key=lambda same: min(dump.snapshot.realtime_ns for dump in same))
    verdicts = [explain(same) for same in ordered]
    if as_json:
        click.echo(to_json(verdicts).decode())
    else:
        console = stdout_console()
        for number, verdict in enumerate(verdicts):
            if number:
                console.print()
            _print(console, verdict)
    return 0 if all(verdict.decided for verdict in verdicts) else EXIT_UNDECIDED


def to_json(verdicts: list[Verdict]) -> bytes:
    """Of `ff collectives explain --json`."""
    import msgspec

    rows = [
        {
            "group": verdict.group,
            "verdict": verdict.kind,
            "summary": verdict.summary,
            "culprits": [culprit._asdict() for culprit in verdict.culprits],
            "evidence": verdict.evidence,
            "ranks": [row._asdict() for row in verdict.table],
            "links": [link._asdict() for link in verdict.links],
            "stragglers": [each._asdict() for each in verdict.stragglers],
        }
        for verdict in verdicts
    ]
    return msgspec.json.format(msgspec.json.encode(rows), indent=2)


def _print(console: Console, verdict: Verdict) -> None:
    from rich.text import Text

    style = "bold green" if verdict.kind == "nothing" else "bold red" if verdict.decided else "bold yellow"
    console.print(Text.assemble((verdict.kind.upper(), style), f" in group {verdict.group}"), soft_wrap=True)
    console.print(Text(verdict.summary), soft_wrap=True)
    for line in verdict.evidence:
        console.print(Text(f"  - {line}"), soft_wrap=True)
    console.print()
    console.print(_table(verdict))


def _table(verdict: Verdict) -> object:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("rank", "operation", "state"):
        table.add_column(name, overflow="fold")
    for name in ("chunks", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waits for", overflow="fold")
    table.add_column("late", justify="right", no_wrap=True)
    culprits = {culprit.rank for culprit in verdict.culprits}
    rows = sorted(verdict.table, key=lambda row: (row.rank not in culprits, row.rank))
    for row in rows[:MAX_ROWS]:
        progress = f"{row.chunks_done}/{row.chunks}" if row.chunks else ""
        cells = (
            row.label,
            row.operation or (f"after #{row.finished - 1}" if row.finished else "before #0"),
            row.state,
            progress,
            _duration(row.idle_ns),
            ", ".join(map(str, row.waits_for[:8])) + (", ..." if len(row.waits_for) > 8 else ""),
            _duration(row.late_ns),
        )
        table.add_row(*(Text(cell) for cell in cells), style="red" if row.rank in culprits else None)
    if len(rows) > MAX_ROWS:
        table.add_row(Text(f"... and {len(rows) - MAX_ROWS} more ranks"))
    return table


def _duration(ns: int) -> str:
    from fireflyer.base.units import format_duration

    return "" if ns < 0 else format_duration(ns)


command.add_command(plan_command)
