"""Runs a soak and prints what came of it."""

from __future__ import annotations

import os
import time

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fireflyer.analytics.report import Row
from fireflyer.cli.jobs.teller import teller
from fireflyer.cli.output import stdout_console
from fireflyer.cli.tables import print_rows
from fireflyer.data.files import replace_file
from fireflyer.recipes.soak.checks import judge
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.soak.report import SoakReport, report_of
from fireflyer.recipes.soak.run import run_soak

__all__ = ["run_and_report"]

REPORT = "report.json"


def run_and_report(plan: SoakPlan, directory: str, *, quiet: bool) -> int:
    """Exit code 0: every check holds."""
    began_ns = time.monotonic_ns()
    click.echo(f"seed {plan.seed}, {plan.minutes:g} minutes")
    facts = run_soak(plan, directory, teller(began_ns, quiet=quiet))
    report = report_of(facts, judge(plan, facts), took_ns=time.monotonic_ns() - began_ns)
    path = os.path.join(directory, REPORT)
    replace_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    _print(stdout_console(), report)
    click.echo(f"\nReport: {path}")
    if report.ok:
        return 0
    for check in report.checks:
        if not check.good:
            click.echo(f"error: {check.name}: {check.text}", err=True)
    click.echo(
        f"error: the soak failed; again: ff soak --minutes {plan.minutes:g} --seed {report.seed}; the logs are in "
        f"{os.path.join(directory, 'platform')}",
        err=True,
    )
    return 1


def _print(console: Console, report: SoakReport) -> None:
    verdict = ("Succeeded", "bold green") if report.ok else ("Failed", "bold red")
    console.print()
    console.print(Text.assemble(("Soak", "bold"), " · ", verdict))
    console.print(Text(report.headline))
    if not report.ok:
        console.print()
        for line in report.time_line:
            console.print(Text(line), soft_wrap=True)
    rows = [Row(check.name, check.text, mark="good" if check.good else "bad") for check in report.checks]
    print_rows(console, "Checks", rows)
    console.print()
    console.print(_table(report))
    for line in report.left_out:
        console.print(Text(f"Left out: {line}", style="yellow"), soft_wrap=True)


def _table(report: SoakReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("Fault", overflow="fold")
    for name in ("faults", "recovered", "median", "worst", "steps again"):
        table.add_column(name, justify="right")
    for row in report.kinds:
        times = ("" if one is None else f"{one:.1f} s" for one in (row.median_s, row.worst_s))
        text = f"{row.text}{f'; {row.failed} counted as failed' if row.failed else ''}"
        table.add_row(text, str(row.faults), str(row.recovered), *times, str(row.lost_steps))
    total = (sum(row.faults for row in report.kinds), sum(row.recovered for row in report.kinds))
    table.add_row(Text("all", style="bold"), *(str(one) for one in total), "", "",
                  str(sum(row.lost_steps for row in report.kinds)))  # fmt: skip
    return table
