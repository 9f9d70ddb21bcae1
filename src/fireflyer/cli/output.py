"""Where commands print: the console, the view of a running job, and the report at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from fireflyer.analytics.html import render_html
from fireflyer.analytics.report import Fact, JobReport, build_report
from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.events import Logged, decode_log
from fireflyer.cli.tables import print_report

__all__ = ["EVENTS_NAME", "REPORT_NAME", "read_events", "show_report", "stdout_console", "write_report"]

EVENTS_NAME = "events.jsonl"
REPORT_NAME = "report.html"
PLAIN_WIDTH = 120


def stdout_console() -> Console:
    """The console of standard output. Where that is no terminal nothing is coloured, and lines are `PLAIN_WIDTH` wide.
    rich itself obeys NO_COLOR and TERM."""
    terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if terminal else PLAIN_WIDTH, highlight=False, markup=False, emoji=False)


def read_events(run_dir: str) -> list[Logged]:
    """The event log of a run. Raises `NotFound`, `UsageError`, `DataCorruption`."""
    if not os.path.isdir(run_dir):
        raise NotFound(f"run directory {run_dir!r} does not exist; give the directory that `ff run` named")
    path = os.path.join(run_dir, EVENTS_NAME)
    if not os.path.isfile(path):
        raise UsageError(f"{run_dir!r} holds no {EVENTS_NAME}, so it is not the directory of a run")
    with open(path, "rb") as file:
        return decode_log(file, name=path)


def write_report(report: JobReport, path: str) -> None:
    """Writes the HTML page; a half-written one never replaces a whole one."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(render_html(report))
    os.replace(partial, path)


def show_report(
    log: Sequence[Logged], *, html_path: str, console: Console | None, facts: Sequence[Fact] = ()
) -> JobReport:
    """Prints the report (unless `console` is None), writes the page and says where it is."""
    report = build_report(log, facts=facts)
    if console is not None:
        console.print()
        print_report(console, report)
    write_report(report, html_path)
    if console is not None:
        console.print()
        console.print(f"Report: {os.path.abspath(html_path)}", soft_wrap=True)
    return report
