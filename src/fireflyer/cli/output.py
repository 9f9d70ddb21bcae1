"""Where commands print: the console, the view of a running job, and the report at its end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import click
from rich.console import Console

from fireflyer.analytics.html import render_html
from fireflyer.analytics.rank_reports import merge_rank_reports
from fireflyer.analytics.report import Fact, JobReport, build_report
from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.events import Logged, decode_log
from fireflyer.base.launch import REPORTS_NAME
from fireflyer.cli.tables import print_report
from fireflyer.runtime.disk import translate_os_error

__all__ = [
    "EVENTS_NAME",
    "REPORT_NAME",
    "lost_output",
    "read_events",
    "show_report",
    "silence_stdout",
    "stdout_console",
    "write_report",
]

EVENTS_NAME = "events.jsonl"
REPORT_NAME = "report.html"
PLAIN_WIDTH = 120


class _StdoutConsole(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read our output went away: be silent from here on, but let the command end as it would have."""
        self.quiet = True
        silence_stdout()


def silence_stdout() -> None:
    """Sends what is still to be written to standard output nowhere, so that nothing complains about it at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def lost_output(error: OSError) -> click.ClickException:
    """Standard output takes no more, as a file on a full disk; nothing is written there from now on."""
    silence_stdout()
    return click.ClickException(f"cannot write to standard output: {(error.strerror or str(error)).lower()}")


def stdout_console() -> Console:
    """The console of standard output. Where that is no terminal nothing is coloured, and lines are `PLAIN_WIDTH` wide.
    rich itself obeys NO_COLOR and TERM."""
    terminal = sys.stdout.isatty()
    width = None if terminal else PLAIN_WIDTH
    return _StdoutConsole(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def read_events(run_dir: str) -> list[Logged]:
    """The event log of a run. Raises `NotFound`, `UsageError`, `DataCorruption`."""
    if os.path.exists(run_dir) and not os.path.isdir(run_dir):
        raise UsageError(f"{run_dir!r} is not a directory; give one of ./runs, or that of `ff run --run-dir`")
    if not os.path.isdir(run_dir):
        raise NotFound(f"run directory {run_dir!r} does not exist; give one of ./runs, or that of `ff run --run-dir`")
    path = os.path.join(run_dir, EVENTS_NAME)
    if not os.path.isfile(path) and os.path.isdir(os.path.join(run_dir, REPORTS_NAME)):
        return _read_rank_reports(os.path.join(run_dir, REPORTS_NAME))
    if not os.path.isfile(path):
        raise UsageError(
            f"{run_dir!r} is not the directory of a run: it has no {EVENTS_NAME}; "
            "give one of ./runs, or that of `ff run --run-dir`"
        )
    with open(path, "rb") as file:
        return decode_log(file, name=path)


def _read_rank_reports(directory: str) -> list[Logged]:
    """Of a run without a launcher: each rank wrote a file of its own."""
    files: dict[str, list[Logged]] = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if name.endswith(".jsonl") and os.path.isfile(path):
            with open(path, "rb") as file:
                files[name] = decode_log(file, name=path)
    return merge_rank_reports(files)


def write_report(report: JobReport, path: str) -> None:
    """Writes the HTML page; a half-written one never replaces a whole one. Raises `FireflyerError`."""
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(render_html(report))
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise translate_os_error(error, f"write {path}") from error


def show_report(
    log: Sequence[Logged],
    *,
    html_path: str,
    console: Console | None,
    logs_dir: str | None = None,
    facts: Sequence[Fact] = (),
    undisturbed: Sequence[Logged] = (),
    gap: bool = False,
) -> JobReport:
    """Writes the page, prints the report (unless `console` is None) and says where the page is, and the logs, where
    they are given. A page that cannot be written does not keep the report from being printed, nor a closed pipe the
    page from being written. The loss curve of an `undisturbed` run is drawn beneath that of the log. `gap` puts an
    empty line before it."""
    report = build_report(log, facts=facts, undisturbed=undisturbed)
    try:
        write_report(report, html_path)
    finally:
        if console is not None:
            console.print("\n" if gap else "", end="")
            print_report(console, report)
    if console is not None:
        logs = ""
        if report.account.reported:
            console.print()
        elif logs_dir is not None:
            logs = f"Logs: {os.path.abspath(logs_dir)} · "
        console.print(f"{logs}Report: {os.path.abspath(html_path)}", soft_wrap=True)
    return report
