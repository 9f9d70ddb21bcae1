"""`ff exec`: a command in a run of a task. `ff shell`: nodes for a shell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.base.errors import JobFailed, TransientError, Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.jobs.torchrun import NodeCount, NodeRange
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.platform.connect import plain, platform_option

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.schema.execs import ExecRequest

__all__ = ["exec_command", "run_shell", "shell_command"]

BROKEN: Final = 255
"""Exit code where the session ended and nobody knows that of the program, as of ssh."""
_LOOK_S: Final = 0.5
_PORT = re.compile(r"(?:([0-9]{1,5}):)?([0-9]{1,5})")


@click.command(
    "exec",
    short_help="Run a command in a task that runs.",
    epilog="""\b
Examples:
  ff exec 17                              a shell beside rank 0 of task 17
  ff exec 17 --rank 3 -- nvidia-smi       a command beside rank 3, with its exit code
  ff exec 17 -- py-spy dump --pid 4711
  ff exec 17 -- tar c out | tar x         its output is passed on byte for byte""",
)
@click.option("--rank", "-r", metavar="N", type=WholeNumber(min=0), help="Beside this rank.  [default: 0]")
@click.option(
    "--node", metavar="NODE", help="On this node of the task, beside its lowest rank.  [default: that of the rank]"
)
@click.option("--terminal/--no-terminal", "-t/-T", default=None, help="Whether the command gets a terminal.  [default: "
              "when standard input and output are one]")  # fmt: skip
@click.option("--idle", metavar="TIME", type=Duration(), help="End it when nothing was typed or printed for so long, "
              "1d at most.  [default: 1h with a terminal, 12h without]")  # fmt: skip
@click.argument("task", metavar="TASK", type=WholeNumber(min=1))
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
    return _run(client, task, _asked(command, terminal=terminal, rank=rank, node=node, idle=idle))


@click.command(
    "shell",
    short_help="Get nodes, and a shell on the first one.",
    epilog="""\b
Examples:
  ff shell                           a shell on one node, for 8 hours at most
  ff shell --nodes 2 --time 2h       two nodes; MASTER_ADDR and others are set for jobs on both
  ff shell --port 8888 -- jupyter lab --port 8888 --no-browser
  ff shell --port 9000:6006          port 9000 of this machine leads to port 6006 of the first node""",
)
@click.option("--nodes", "-n", metavar="N", type=NodeRange(), default="1", show_default=True,
              help="Nodes that it gets, all at once.")  # fmt: skip
@click.option("--group", "-g", metavar="GROUP", default="default", show_default=True, help="Group of nodes.")
@click.option("--priority", "-p", metavar="N", type=WholeNumber(0, 50), default=10, show_default=True,
              help="0 to 50; the highest comes first.")  # fmt: skip
@click.option("--time", "time_ns", metavar="TIME", type=Duration(), default=8 * 3600 * SECOND,
              help="It is ended then: 30m or 12h.  [default: 8h]")  # fmt: skip
@click.option("--idle", metavar="TIME", type=Duration(), help="End it when nothing was typed or printed for so long, "
              "1d at most.  [default: 1h]")  # fmt: skip
@click.option("--port", "ports", metavar="[HERE:]PORT", multiple=True, help="A port of this machine that leads to the "
              "same port of the first node, or from HERE to PORT.")  # fmt: skip
@click.option("--name", metavar="NAME", default="", help="Of the task.  [default: shell, and a random end]")
@click.option("--constraint", metavar="LABELS", help="Only nodes with all of these labels: a100,fast.  [default: any]")
@click.option("--env", "-e", "environment", metavar="NAME=VALUE", multiple=True, help="Environment variable.")
@click.option("--directory", metavar="DIR", shell_complete=complete_directory, help="Copied to the nodes, but what its "
              ".ffignore names.  [default: this one]")  # fmt: skip
@click.option("--workdir", metavar="DIR", default="", help="Working directory, a path that is there on the nodes; "
              "nothing is copied then.  [default: the copy]")  # fmt: skip
@click.argument("command", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
@platform_option
def shell_command(*, client: Client, ports: tuple[str, ...], idle: int | None, command: tuple[str, ...],
                  **options: Any) -> int:  # fmt: skip
    """Submit an interactive task, wait for its nodes, and run COMMAND, or a shell, on the first one. It is never
    interrupted for other tasks; it ends with the shell, after --time, after --idle, and two minutes after this command
    was cut off."""
    return run_shell(client, ports=ports, idle=idle, command=command, **options)


def run_shell(
    client: Client,
    *,
    nodes: NodeCount,
    group: str,
    priority: int,
    time_ns: int,
    idle: int | None,
    ports: tuple[str, ...],
    name: str,
    constraint: str | None,
    environment: tuple[str, ...],
    directory: str | None,
    workdir: str,
    command: tuple[str, ...],
) -> int:
    """The exit code of the shell. The task has ended then, or will."""
    import msgspec

    from fireflyer.cli.jobs.run import parse_environment
    from fireflyer.cli.platform.submit import sent_snapshot
    from fireflyer.cluster.schema.tasks import Program, TaskSpec

    pairs = [_port(text) for text in ports]
    if nodes.least and nodes.least != nodes.most:
        raise UsageError("a shell has as many nodes from its begin to its end; write --nodes N")
    program = {
        "script": "sleep",
        "args": ("infinity",),
        "kind": "program",
        "snapshot": "" if workdir else sent_snapshot(client, directory),
        "workdir": workdir,
        "env": parse_environment(environment),
    }
    wanted = {
        "name": name or f"shell-{secrets.token_hex(3)}",
        "program": msgspec.convert(program, Program),
        "kind": "interactive",
        "least_nodes": nodes.most,
        "most_nodes": nodes.most,
        "node_group": group,
        "priority": priority,
        "time_ns": time_ns,
        "labels": tuple(one for one in (constraint or "").split(",") if one),
        "max_restarts": 0,
        "max_requeues": 0,
    }
    try:
        spec = msgspec.convert(wanted, TaskSpec, from_attributes=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"the task cannot be submitted: {str(error).lower()}") from None
    (task,) = client.submit(spec, key=secrets.token_hex(16))
    click.echo(f"task {task} submitted", err=True)
    try:
        _wait(client, task)
        asked = _asked(command, terminal=None, rank=None, node=None, idle=idle, ends_task=True)
        return _run(client, task, asked, pairs)
    finally:
        _stop(client, task)


def _wait(client: Client, task: int) -> None:
    """Until it runs; says why it waits. Raises `JobFailed`."""
    from fireflyer.cluster.schema.tasks import FINISHED, TaskState

    said = ""
    while True:
        answer = client.task(task)
        view = answer.task
        if view.state is TaskState.RUNNING:
            click.echo(f"task {task} runs on {plain(' '.join(view.nodes))}", err=True)
            return
        if view.state is FINISHED:
            raise JobFailed(f"task {task} has ended before there was a shell: {plain(view.reason)}")
        words = f"task {task} {view.state.value}: {plain(answer.why.text)}"
        shown = re.sub(r"[0-9.]+ ?(ms|s|m|h)\b", "", words)
        if shown != said:
            click.echo(words, err=True)
            said = shown
        time.sleep(_LOOK_S)


def _stop(client: Client, task: int) -> None:
    """It ends by itself, too, but later; one that has ended is no error."""
    from fireflyer.cluster.core.platform.commands import StopTask

    with contextlib.suppress(UsageError, TransientError):
        client.command(StopTask(task, "its shell has ended"))


def _asked(
    command: tuple[str, ...],
    *,
    terminal: bool | None,
    rank: int | None,
    node: str | None,
    idle: int | None,
    ends_task: bool = False,
) -> ExecRequest:
    import msgspec

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
        "program": msgspec.convert(program, ExecProgram),
        "idle_s": None if idle is None else max(1, idle // SECOND),
        "ends_task": ends_task,
    }
    try:
        return msgspec.convert(wanted, ExecRequest, from_attributes=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"the command cannot be run: {str(error).lower()}") from None


def _port(text: str) -> tuple[int, int]:
    """Here and there."""
    match = _PORT.fullmatch(text)
    pair = (int(match[1] or match[2]), int(match[2])) if match else (0, 0)
    if match is None or not (0 <= pair[0] <= 65535 and 1 <= pair[1] <= 65535):
        raise UsageError(f"--port {text!r} is no port; write it like --port 8888, or --port 9000:6006")
    return pair


def _run(client: Client, task: int, asked: ExecRequest, ports: list[tuple[int, int]] | None = None) -> int:
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
