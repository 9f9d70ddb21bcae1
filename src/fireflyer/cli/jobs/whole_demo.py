"""`ff demo --whole`: the demonstration of platform and file system, with its report."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import click
from rich.console import Console
from rich.text import Text

from fireflyer.analytics.ettr import FORMULA
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cli.output import REPORT_NAME, stdout_console
from fireflyer.cli.tables import print_rows
from fireflyer.recipes.whole.checks import judge
from fireflyer.recipes.whole.html import render_whole
from fireflyer.recipes.whole.plan import WholePlan
from fireflyer.recipes.whole.report import WholeReport, report_of
from fireflyer.recipes.whole.run import run_whole
from fireflyer.recipes.whole.timeline import LEGEND

__all__ = ["run_and_report"]

LANE_CELLS = 78
_SIGNS = {"train": "█", "start": "░", "lost": "╳", "wait": "·", "down": "▁", "sync": "▒", "up": "─"}
_STYLES = {"train": "green", "start": "yellow", "lost": "red", "wait": "bright_black", "down": "red", "sync": "blue"}


def run_and_report(directory: str, *, quiet: bool) -> int:
    """Exit code 0: every check holds."""
    plan, began_ns = WholePlan(), time.monotonic_ns()
    facts = run_whole(plan, directory, _teller(began_ns, quiet=quiet))
    checks = judge(plan, facts)
    report = report_of(plan, facts, checks, took_ns=time.monotonic_ns() - began_ns)
    path = os.path.join(directory, REPORT_NAME)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(render_whole(report))
    except OSError as error:
        raise translate_os_error(error, f"write {path}") from error
    if not quiet:
        _print(stdout_console(), report)
        click.echo(f"\nReport: {path}")
    for check in checks:
        if not check.good:
            click.echo(f"error: {check.name}: {check.text}", err=True)
    return 0 if report.ok else 1


def _teller(began_ns: int, *, quiet: bool) -> Callable[[str], None]:
    lock = threading.Lock()

    def say(line: str) -> None:
        if not quiet:
            with lock:
                print(f"{(time.monotonic_ns() - began_ns) / SECOND:6.1f} s  {line}", flush=True)

    return say


def _print(console: Console, report: WholeReport) -> None:
    verdict = ("Succeeded", "bold green") if report.ok else ("Failed", "bold red")
    console.print()
    console.print(Text.assemble(("The whole demonstration", "bold"), " · ", verdict))
    console.print(Text(report.headline))
    print_rows(console, "Checks", report.checks)
    _print_lanes(console, report)
    print_rows(console, "Storage", report.storage)
    print_rows(console, "What was lost, and why", report.lost)
    for one in report.ettr:
        computed = "unknown" if one.expected is None else f"{one.expected:.3f}"
        print_rows(console, f"ETTR of {one.name}: measured {one.measured:.3f}, computed {computed}", one.terms)
        console.print(Text(f"  {FORMULA}\n  = {one.filled}", style="bright_black"), soft_wrap=True)


def _print_lanes(console: Console, report: WholeReport) -> None:
    console.print()
    console.print(Text("Time line", style="bold"))
    cell_ns = max(1, report.end_ns // LANE_CELLS)
    heads = [" "] * (LANE_CELLS + 1)
    for fault in report.faults:
        heads[min(LANE_CELLS, fault.at_ns // cell_ns)] = str(fault.number)
    console.print(Text(f"  {'':10}  {''.join(heads)}", style="red"))
    for lane in report.lanes:
        cells = [(" ", "")] * LANE_CELLS
        for span in lane.spans:
            for number in range(max(0, span.begin_ns // cell_ns), min(LANE_CELLS, span.end_ns // cell_ns + 1)):
                cells[number] = (_SIGNS[span.kind], _STYLES.get(span.kind, ""))
        console.print(Text.assemble(f"  {lane.name:10}  ", *cells))
    used = {span.kind for lane in report.lanes for span in lane.spans}
    console.print(Text("  " + "  ".join(f"{_SIGNS[kind]} {text}" for kind, text in LEGEND if kind in used)))
    for fault in report.faults:
        console.print(Text(f"  {fault.number}: {fault.at_ns / SECOND:.1f} s, {fault.text}"), soft_wrap=True)
