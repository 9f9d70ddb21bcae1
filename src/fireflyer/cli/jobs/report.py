"""`ff report`: the report of a run again, from its event log."""

from __future__ import annotations

import os

import click

from fireflyer.base.launch import LOGS_NAME
from fireflyer.cli.completion import complete_directory, complete_file

__all__ = ["command"]


@click.command(
    "report",
    short_help="Show the report of a run again.",
    epilog="""\b
Examples:
  ff report runs/train-20260101-120000
  ff report build/demo/disturbed --undisturbed build/demo/undisturbed""",
)
@click.argument("run_dir", metavar="RUN_DIR", shell_complete=complete_directory)
@click.option(
    "--html",
    "html_path",
    metavar="FILE",
    shell_complete=complete_file,
    help="Where the HTML page is written.  [default: RUN_DIR/report.html]",
)
@click.option(
    "--undisturbed",
    metavar="RUN_DIR",
    shell_complete=complete_directory,
    help="Draw the loss curve of this run, such as one without failures, beneath.  [default: none]",
)
def command(run_dir: str, html_path: str | None, undisturbed: str | None) -> None:
    """Show the report of a run and write its HTML page, also of a run that was killed or that is still running.

    RUN_DIR is the directory of the run: `ff run` makes it in ./runs, or where --run-dir says.
    """
    from fireflyer.cli.output import REPORT_NAME, read_events, show_report, stdout_console

    log = read_events(run_dir)
    show_report(
        log,
        html_path=html_path or os.path.join(run_dir, REPORT_NAME),
        console=stdout_console(),
        logs_dir=os.path.join(run_dir, LOGS_NAME),
        undisturbed=() if undisturbed is None else read_events(undisturbed),
    )
