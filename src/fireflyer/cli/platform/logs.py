"""`ff logs`: what the ranks of a task print, while it runs and after."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import Unreachable, UsageError
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.platform.connect import plain, platform_option
from fireflyer.cli.platform.log_lines import LogPrinter, shown_on_terminal
from fireflyer.cli.platform.names import TASK_NUMBER

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.schema.logs import LogsEnded, LogText

__all__ = ["command", "print_logs"]

_SHELL_CODES: Final = {"stopped": 130}


@click.command(
    "logs",
    short_help="Print what the ranks of a task printed.",
    epilog="""\b
Examples:
  ff logs 17                   # all of it, run after run
  ff logs -f 17                # and what comes, until the task has finished, with its exit code
  ff logs 17 --rank 0 --run 2  # one rank in one run
  ff logs 17 --search nan      # lines that contain a text""",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for more until the task has finished; exit with its exit "
              "code.")  # fmt: skip
@click.option("--rank", "-r", metavar="N", type=WholeNumber(min=0), help="Of this rank.  [default: all, each line with "
              "its rank]")  # fmt: skip
@click.option("--run", metavar="N", type=WholeNumber(min=0), help="In this run.  [default: all]")
@click.option("--search", metavar="TEXT", help="Only lines that contain TEXT, upper and lower case alike.")
@click.argument("task", metavar="TASK", type=TASK_NUMBER)
@platform_option
def command(*, client: Client, follow: bool, rank: int | None, run: int | None, search: str | None, task: int) -> int:
    """Print what the ranks of the task number TASK printed. It is there after the nodes are gone, for as long as the
    platform keeps it."""
    if search is not None:
        if follow:
            raise UsageError("--search looks at what is there; give it without --follow")
        if not search:
            raise UsageError("--search '' is empty; give the text to look for")
        return _search(client, task, search, rank=rank, run=run)
    return print_logs(client, task, rank=rank, run=run, follow=follow)


def print_logs(
    client: Client, task: int, *, rank: int | None = None, run: int | None = None, follow: bool = False
) -> int:
    """With `follow` says each change of state on standard error, and returns the exit code when the task has
    finished."""
    from fireflyer.cluster.schema.logs import LogsEnded, LogsState, LogText
    from fireflyer.cluster.schema.tasks import FINISHED

    printer = LogPrinter(_write, terminal=sys.stdout.isatty(), several=rank is None and _ranks(client, task) > 1)
    printed = False
    for event in client.logs(task, run=run, rank=rank, follow=follow):
        match event:
            case LogText():
                _print(printer, event)
                printed = printed or bool(event.text)
            case LogsState():
                if event.state is not FINISHED:
                    printer.end_line()
                    click.echo(f"task {task} {event.state.value}: {plain(event.why)}", err=True)
            case LogsEnded():
                printer.end_line()
                _say_end(task, event, printed=printed, follow=follow)
                return _exit_code(event) if follow else 0
    raise Unreachable("the logs ended without a word; try again")


def _print(printer: LogPrinter, event: LogText) -> None:
    if event.lost_bytes:
        printer.end_line()
        click.echo(f"({event.lost_bytes} bytes of rank {event.rank} were lost)", err=True)
    printer.text(event)
    if event.cut:
        printer.end_line()
        click.echo(f"(the rest of rank {event.rank} was not kept: the logs of the run are at their limit)", err=True)


def _say_end(task: int, end: LogsEnded, *, printed: bool, follow: bool) -> None:
    state = end.state.value if end.outcome is None else end.outcome.value
    if follow:
        click.echo(f"task {task} {state}{': ' if end.reason else ''}{plain(end.reason)}", err=True)
    elif not printed:
        click.echo(f"task {task} is {state} and has printed nothing that is kept", err=True)
    if follow and not end.complete:
        click.echo("(the end of its logs is missing: a node did not send it)", err=True)


def _exit_code(end: LogsEnded) -> int:
    """Of a task that has finished; 0 for one that has not."""
    if end.outcome is None or end.outcome.value == "succeeded":
        return 0
    return end.exit_code or _SHELL_CODES.get(end.outcome.value, 1)


def _ranks(client: Client, task: int) -> int:
    view = client.task(task).task
    return view.most_nodes * (1 if view.spec is None else view.spec.program.ranks_per_node)


def _search(client: Client, task: int, text: str, *, rank: int | None, run: int | None) -> int:
    """As grep: 1 where no line has it."""
    found = False
    for line in client.search_logs(task, text, run=run, rank=rank):
        found = True
        shown = shown_on_terminal(line.line) if sys.stdout.isatty() else line.line
        _write(f"run {line.run} attempt {line.attempt} rank {line.rank}: {shown}\n")
    return 0 if found else 1


def _write(text: str) -> None:
    """Not by click, which takes colours away."""
    sys.stdout.write(text)
    sys.stdout.flush()
