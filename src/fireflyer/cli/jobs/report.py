"""`ff report`: the report of a run once more, from its event log."""

from __future__ import annotations

import os

import click

from fireflyer.base.launch import LOGS_NAME

__all__ = ["command"]


@click.command("report", short_help="Show the report of a run once more.")
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--html", "html_path", metavar="PATH", help="Where the page is written.  [default: RUN_DIR/report.html]")
def command(run_dir: str, html_path: str | None) -> None:
    """Show the report of a run and write its HTML page; also of a run that was killed, or still goes on."""
    from fireflyer.cli.output import REPORT_NAME, read_events, show_report, stdout_console

    log = read_events(run_dir)
    show_report(
        log,
        html_path=html_path or os.path.join(run_dir, REPORT_NAME),
        console=stdout_console(),
        logs_dir=os.path.join(run_dir, LOGS_NAME),
    )
