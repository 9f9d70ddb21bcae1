"""`ff exec`: a command in a run of a task; and the session of it, which `ff shell` has as well."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.platform.connect import plain, platform_option
from fireflyer.cli.platform.names import TASK_NUMBER

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.schema.execs import ExecRequest

__all__ = ["asked_for", "exec_command", "run_session"]

BROKEN: Final = 255
"""Exit code where the session ended and nobody knows that of the program, as of ssh."""


@click.command(
    "exec",
    short_help="Run a command in a task that runs.",
    epilog="""\b
Examples:
  ff exec 17                         # a shell beside rank 0 of task 17
  ff exec 17 --rank 3 -- nvidia-smi  # a command beside rank 3, with its exit code
  ff exec 17 -- py-spy dump --pid 4711
  ff exec 17 -- tar c out | tar x    # its output is passed on byte for byte""",
)
@click.option("--rank", "-r", metavar="N", type=WholeNumber(min=0), help="Beside this rank.  [default: 0]")
@click.option(
    "--node", metavar="NODE", help="On this node of the task, beside its lowest rank.  [default: that of the rank]"
)
@click.option("--terminal/--no-terminal", "-t/-T", default=None, help="Whether the command gets a terminal.  [default: "
              "when standard input and output are one]")  # fmt: skip
@click.option("--idle", metavar="TIME", type=Duration(), help="End it when nothing was typed or printed for so long, "
              "1d at most.  [default: 1h with a terminal, 12h without]")  # fmt: skip
@click.argument("task", metavar="TASK", type=TASK_NUMBER)
@click.argument("command", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
@platform_option
def exec_command(
    *,
    client: Client,
    rank: int | None,
    node: str | None,
    terminal: bool | None,
    idle: int | None,
    task: int,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND in the task number TASK: as its account, in its working directory, with the environment of the rank.
    Without a COMMAND it is a shell. Standard input, output and errors are those of this command, and so is the exit
    code; 255 where the session broke. What the command has started ends with it, with this command, and with the run
    of the task."""
    if rank is not None and node is not None:
        raise UsageError("--rank and --node contradict each other; give one of them")
    return run_session(client, task, asked_for(command, terminal=terminal, rank=rank, node=node, idle=idle))


def asked_for(
    command: tuple[str, ...],
    *,
    terminal: bool | None,
    rank: int | None,
    node: str | None,
    idle: int | None,
    ends_task: bool = False,
) -> ExecRequest:
    """What a manager is asked, with the terminal of this process where it has one. Raises `UsageError`."""
    import msgspec

    from fireflyer.base.decoding import convert
    from fireflyer.cli.platform.exec_local import terminal_size
    from fireflyer.cluster.schema.execs import ExecProgram, ExecRequest

    if terminal is None:
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
    rows, columns = terminal_size()
    term = os.environ.get("TERM", "")
    program = {"argv": command, "terminal": terminal, "rows": rows, "columns": columns}
    if re.fullmatch(r"[A-Za-z0-9._+-]{0,64}", term):
        program["term"] = term
    wanted = {
        "rank": rank,
        "node": node,
        "program": convert(program, ExecProgram),
        "idle_s": None if idle is None else max(1, idle // SECOND),
        "ends_task": ends_task,
    }
    try:
        return convert(wanted, ExecRequest, from_attributes=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"the command cannot be run: {str(error).lower()}") from None


def run_session(client: Client, task: int, asked: ExecRequest, ports: list[tuple[int, int]] | None = None) -> int:
    """Also where the session breaks: then it says why, and the code is `BROKEN`."""
    try:
        return asyncio.run(_session(client, task, asked, ports or []))
    except Unreachable as error:
        click.echo(f"error: the session ended: {plain(str(error))}", err=True)
        return BROKEN


async def _session(client: Client, task: int, asked: ExecRequest, ports: list[tuple[int, int]]) -> int:
    from fireflyer.cli.platform.exec_local import LocalEnd, raw_terminal
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.exec_ports import forwarding
    from fireflyer.cluster.exec_stream import ExecStream

    terminal = asked.program is not None and asked.program.terminal
    async with contextlib.AsyncExitStack() as stack:
        for here, there in ports:
            other = stack.enter_context(Client(client.connection))
            bound = await stack.enter_async_context(forwarding(other, task, here, there, _say))
            _say(f"http://127.0.0.1:{bound} leads to port {there} of the first node")
        accepted = client.ask_exec(task, asked)
        token = client.connection.token
        stream = await stack.enter_async_context(ExecStream.open(client.manager, token, accepted))
        with raw_terminal() if terminal and sys.stdin.isatty() else contextlib.nullcontext():
            code = await LocalEnd(stream, terminal=terminal).run()
        if stream.end.exit_code is None and stream.end.reason:
            _say(f"error: the session ended: {plain(stream.end.reason)}")
        return code


def _say(text: str) -> None:
    """A terminal may be raw: its lines then begin where the last one ended."""
    sys.stderr.write(f"\r{plain(text)}\r\n" if sys.stderr.isatty() else f"{plain(text)}\n")
    sys.stderr.flush()
