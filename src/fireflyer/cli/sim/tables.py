"""Summaries of replays on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fireflyer.cluster.core.replay.summary import GroupSummary, Summary, Waits

__all__ = ["ROWS", "print_summaries", "waits_text"]

ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("Utilisation", lambda one: f"{one.utilisation:.2%}"),
    ("Goodput", lambda one: f"{one.goodput:.2%}"),
    ("Node-hours: healthy", lambda one: f"{one.healthy_node_hours:,.0f}"),
    ("  productive", lambda one: f"{one.productive_node_hours:,.0f}"),
    ("  starting", lambda one: f"{one.start_node_hours:,.0f}"),
    ("  checkpoints", lambda one: f"{one.checkpoint_node_hours:,.0f}"),
    ("  saving when interrupted", lambda one: f"{one.save_node_hours:,.0f}"),
    ("  lost", lambda one: f"{one.lost_node_hours:,.0f}"),
    ("Interrupts", lambda one: f"{one.interrupts:,}"),
    ("Runs ended by failures", lambda one: f"{one.failures:,}"),
    ("ETTR", lambda one: f"{one.ettr:.3f}"),
    ("Longest queue", lambda one: f"{one.most_waiting:,}"),
    ("Last task finished after", lambda one: _days(one.finished_s)),
)
"""Label and value; utilisation, goodput and node-hours are of the window, all else is of the whole trace."""


def waits_text(waits: Waits) -> str:
    """p50 / p95 / longest."""
    return " / ".join(_short(seconds) for seconds in (waits.p50_s, waits.p95_s, waits.max_s))


def print_summaries(console: Console, summaries: Sequence[Summary]) -> None:
    begin_s, end_s = summaries[0].window_s
    console.print(
        Text(
            f"{summaries[0].tasks:,} tasks. Utilisation, goodput and node-hours are those from {_days(begin_s)} to "
            f"{_days(end_s)}; all else is to the end of the last task."
        )
    )
    table = _table(summaries, "")
    for label, value in ROWS:
        table.add_row(Text(label), *(Text(value(one)) for one in summaries))
    console.print(table)
    _print_groups(console, "Time in the queue by nodes of a task", summaries, lambda one: one.by_size)
    _print_groups(console, "Time in the queue by priority", summaries, lambda one: one.by_priority)


def _print_groups(
    console: Console, title: str, summaries: Sequence[Summary], groups: Callable[[Summary], Sequence[GroupSummary]]
) -> None:
    console.print()
    console.print(Text(f"{title}, all waits of a task together: p50 / p95 / longest", style="bold"))
    table = _table(summaries, "", "tasks")
    for rows in zip(*(groups(one) for one in summaries), strict=True):
        table.add_row(Text(rows[0].name), Text(f"{rows[0].tasks:,}"), *(Text(waits_text(row.queued)) for row in rows))
    console.print(table)


def _table(summaries: Sequence[Summary], label: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(label, no_wrap=True)
    for heading in (*numbers, *(one.policy for one in summaries)):
        table.add_column(heading, no_wrap=True, justify="right")
    return table


def _short(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= (2 * length if unit == "d" else length):
            return f"{seconds / length:.1f}{unit}"
    return f"{seconds:.0f}s"


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.1f} d"
