"""Shells on nodes of one's own: `ff shell`, and `ff submit --interactive`.

Both submit an interactive task, say why it waits until it runs, and have an exec session on its first node that ends
it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.base.errors import JobFailed, TransientError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.jobs.torchrun import NodeCount, NodeRange
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.platform.connect import plain, platform_option
from fireflyer.cli.platform.execs import asked_for, run_session

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.schema.tasks import TaskSpec

__all__ = ["SHELL_TIME_NS", "SLEEP", "open_shell", "shell_command"]

SHELL_TIME_NS: Final = 8 * 3600 * SECOND
SLEEP: Final = ("sleep", "infinity")
"""What an interactive task runs: the shell is a session beside it."""
_LOOK_S: Final = 0.5
_PORT = re.compile(r"(?:([0-9]{1,5}):)?([0-9]{1,5})")
_PASSING = re.compile(r"[0-9.]+ ?(ms|s|m|h)\b")
"""What changes by itself in a reason: it is not told again for that."""


@click.command(
    "shell",
    short_help="Get nodes, and a shell on the first one.",
    epilog="""\b
Examples:
  ff shell                      # a shell on one node, for 8 hours at most
  ff shell --nodes 2 --time 2h  # two nodes; MASTER_ADDR and others are set for jobs on both
  ff shell --port 8888 -- jupyter lab --port 8888 --no-browser
  ff shell --port 9000:6006     # port 9000 of this machine leads to port 6006 of the first node""",
)
@click.option("--nodes", "-n", metavar="N", type=NodeRange(), default="1", show_default=True,
              help="Nodes that it gets, all at once.")  # fmt: skip
@click.option("--group", "-g", metavar="GROUP", default="default", show_default=True, help="Group of nodes.")
@click.option("--priority", "-p", metavar="N", type=WholeNumber(0, 50), default=10, show_default=True,
              help="0 to 50; the highest comes first.")  # fmt: skip
@click.option("--time", "time_ns", metavar="TIME", type=Duration(), default=SHELL_TIME_NS,
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
    for text in ports:
        _port(text)  # a wrong one is told before anything is sent
    return open_shell(client, _spec(client, **options), ports, command, idle=idle)


def _spec(
    client: Client,
    *,
    nodes: NodeCount,
    group: str,
    priority: int,
    time_ns: int,
    name: str,
    constraint: str | None,
    environment: tuple[str, ...],
    directory: str | None,
    workdir: str,
) -> TaskSpec:
    """The directory has been sent. Raises `UsageError`."""
    import msgspec

    from fireflyer.base.decoding import convert
    from fireflyer.cli.jobs.run import parse_environment
    from fireflyer.cli.platform.snapshots import sent_snapshot
    from fireflyer.cluster.schema.tasks import Program, TaskSpec

    if nodes.least and nodes.least != nodes.most:
        raise UsageError("a shell has as many nodes from its begin to its end; write --nodes N")
    program = {
        "script": SLEEP[0],
        "args": SLEEP[1:],
        "kind": "program",
        "snapshot": "" if workdir else sent_snapshot(client, directory),
        "workdir": workdir,
        "env": parse_environment(environment),
    }
    wanted = {
        "name": name or f"shell-{secrets.token_hex(3)}",
        "program": convert(program, Program),
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
        return convert(wanted, TaskSpec, from_attributes=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"the task cannot be submitted: {str(error).lower()}") from None


def open_shell(
    client: Client, spec: TaskSpec, ports: tuple[str, ...], command: tuple[str, ...], *, idle: int | None
) -> int:
    """Submits the interactive task `spec`, and runs `command`, or a shell, on its first node. The exit code of that;
    the task has ended then, or will. `ports`: `8888`, or `9000:8888` where they differ, as `--port` takes them. Raises
    `UsageError`, `JobFailed`, and as the client does."""
    pairs = [_port(text) for text in ports]
    with _ended_by_signals():
        task = _submit(client, spec)
        try:
            click.echo(f"task {task} submitted; Ctrl-C ends it", err=True)
            _wait(client, task)
            asked = asked_for(command, terminal=None, rank=None, node=None, idle=idle, ends_task=True)
            return run_session(client, task, asked, pairs)
        finally:
            _stop(client, task)


def _submit(client: Client, spec: TaskSpec) -> int:
    """Number of the task. One that is submitted when this is interrupted is stopped."""
    key = secrets.token_hex(16)
    try:
        (task,) = client.submit(spec, key=key)
    except KeyboardInterrupt:
        (task,) = client.submit(spec, key=key)  # the same one: only the manager knows whether it had it
        _stop(client, task)
        raise
    return task


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A terminal that is closed, or SIGTERM, ends the task as Ctrl-C does, also while it waits for nodes."""

    def end(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    heard = [one for one in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(client: Client, task: int) -> None:
    """Until it runs; says its place in the queue and why it waits, whenever that changes. Raises `JobFailed`."""
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
        place = f", {answer.why.place}" if answer.why.place else ""
        words = f"task {task} {view.state.value}{place}: {plain(answer.why.text)}"
        shown = _PASSING.sub("", words)
        if shown != said:
            click.echo(words, err=True)
            said = shown
        time.sleep(_LOOK_S)


def _stop(client: Client, task: int) -> None:
    """One that has ended is no error."""
    from fireflyer.cluster.core.platform.commands import StopTask

    try:
        client.command(StopTask(task, "its shell has ended"))
    except TransientError as error:
        click.echo(f"task {task} was not stopped: {error}; stop it: ff stop {task}", err=True)
    except UsageError:
        pass


def _port(text: str) -> tuple[int, int]:
    """Here and there."""
    match = _PORT.fullmatch(text)
    pair = (int(match[1] or match[2]), int(match[2])) if match else (0, 0)
    if match is None or not (0 <= pair[0] <= 65535 and 1 <= pair[1] <= 65535):
        raise UsageError(f"--port {text!r} is no port; write it like --port 8888, or --port 9000:6006")
    return pair
