"""`ff demo --whole`: the demonstration of platform and file system, with its report."""

from __future__ import annotations

import math
import os
import signal
import time

import click
from rich.console import Console
from rich.text import Text

from fireflyer.analytics.ettr import FORMULA
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cli.jobs.teller import teller
from fireflyer.cli.output import REPORT_NAME, stdout_console
from fireflyer.cli.plots import heads_line, plot_line
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
    """Exit code 0: every check holds. SIGTERM ends all that was started, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan, began_ns = WholePlan(), time.monotonic_ns()
    facts = run_whole(plan, directory, teller(began_ns, quiet=quiet))
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


def _print(console: Console, report: WholeReport) -> None:
    verdict = ("Succeeded", "bold green") if report.ok else ("Failed", "bold red")
    console.print()
    console.print(Text.assemble(("The whole demonstration", "bold"), " · ", verdict))
    console.print(Text(report.headline))
    print_rows(console, "Checks", report.checks)
    _print_lanes(console, report)
    _print_losses(console, report)
    _print_throughput(console, report)
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
    _print_faults(console, report)
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


def _print_faults(console: Console, report: WholeReport) -> None:
    """Their numbers, above the cells of a line in time."""
    marks = [(float(fault.at_ns), str(fault.number)) for fault in report.faults]
    heads = heads_line(marks, begin=0, end=max(1, report.end_ns), cells=LANE_CELLS)
    console.print(Text(f"  {'':11} {heads}", style="red"))


def _print_losses(console: Console, report: WholeReport) -> None:
    """Of each task two lines of the same scale: a difference is seen where they differ."""
    drawn = [one for one in report.losses if any(curve.points for curve in one.curves)]
    if drawn:
        console.print()
        console.print(
            Text("Loss, step by step", style="bold").append("  ↻ went on after a disturbance", style="bright_black")
        )
    for one in drawn:
        points = [point for curve in one.curves for point in curve.points if math.isfinite(point[1])]
        steps, losses = zip(*points, strict=True)
        cells = {"begin": min(steps) - 1, "end": max(steps), "cells": min(LANE_CELLS, round(max(steps)))}
        heads = heads_line([(mark.x - 0.5, mark.text) for mark in one.marks], **cells)
        console.print(Text.assemble((f"  {one.task:11} ", "bold"), (heads, "red")))
        for curve in one.curves:
            known = [loss for _, loss in curve.points if math.isfinite(loss)]
            # A point of step n is in the cell that ends with n.
            line = plot_line([(x - 0.5, y) for x, y in curve.points], low=min(losses), high=max(losses), **cells)
            ends = f"  {known[0]:.3f} to {known[-1]:.3f}" if known else "  nothing was reported"
            console.print(Text.assemble(f"  {curve.name:11} ", (line, "green"), (ends, "bright_black")), soft_wrap=True)


def _print_throughput(console: Console, report: WholeReport) -> None:
    if not any(curve.points for curve in report.throughput):
        return
    end_s = max(1, report.end_ns) / SECOND
    console.print()
    console.print(Text("Storage in time", style="bold"))
    _print_faults(console, report)
    for curve in report.throughput:
        most = max((value for _, value in curve.points), default=0.0)
        # A point is in the middle of the seconds for which it stands.
        points = [(0.0, curve.points[0][1]), *curve.points, (end_s, curve.points[-1][1])] if curve.points else []
        line = plot_line(points, begin=0, end=end_s, low=0, high=most, cells=LANE_CELLS)
        console.print(
            Text.assemble(f"  {curve.name:11} ", (line, "green"), (f"  at most {most:.1f} MiB/s", "bright_black")),
            soft_wrap=True,
        )
    cells = [" "] * LANE_CELLS
    for band in report.throughput_bands:
        first, last = (int(at / end_s * LANE_CELLS) for at in (band.begin, band.end))
        cells[first : last + 1] = "▒" * (min(LANE_CELLS - 1, last) - first + 1)
    if report.throughput_bands:
        text = "▒ not every chunk has all replicas"
        console.print(
            Text.assemble(f"  {'degraded':11} ", ("".join(cells), "red"), (f"  {text}", "bright_black")), soft_wrap=True
        )
