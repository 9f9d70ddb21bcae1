"""`ff ps`, `show`, `stop`, `suspend`, `resume`, `priority`: tasks that were submitted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

import click
import msgspec

from fireflyer.base.errors import FireflyerError, NotFound
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.platform.connect import plain, platform_option
from fireflyer.cli.platform.history import ended_by, past_task_text
from fireflyer.cli.platform.names import TASK_NUMBER
from fireflyer.cluster.schema.tasks import TaskState

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.platform.views import RunView, TaskView, Why

__all__ = [
    "priority_command",
    "ps_command",
    "reasons",
    "resume_command",
    "show_command",
    "stop_command",
    "suspend_command",
]

_MOST_REASONS: Final = 20
_WAIT: Final = (TaskState.QUEUED, TaskState.SUSPENDED)
_ALL: Final = ("queued", "scheduled", "running", "suspending", "suspended", "finished")


@click.command(
    "ps",
    short_help="List tasks.",
    epilog="""\b
Examples:
  ff ps                   # your tasks that have not finished
  ff ps --all-users       # those of everybody
  ff ps --state finished  # yours that have finished, the newest first""",
)
@click.option("--all-users", "-a", is_flag=True, help="Tasks of everybody.")
@click.option("--user", metavar="USER", default="", help="Tasks of this user.")
@click.option("--state", type=click.Choice([*_ALL, "unfinished", "any"]), default="unfinished", show_default=True,
              help="Tasks in this state.")  # fmt: skip
@click.option(
    "--limit", metavar="N", type=WholeNumber(1, 1000), default=100, show_default=True, help="At most so many."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each task.")
@platform_option
def ps_command(*, client: Client, all_users: bool, user: str, state: str, limit: int, as_json: bool) -> int:
    """List tasks, the newest first. WHY says of the first 20 that wait what for; `ff show` says it of any task."""
    wanted = "" if all_users else user or client.whoami().user
    page = client.tasks(user=wanted, state="" if state == "any" else state, limit=limit)
    if as_json:
        for task in page.tasks:
            click.echo(msgspec.json.encode(task))
        return 0
    why = reasons(page.tasks, client.reasons)
    rows = [("TASK", "NAME", "USER", "STATE", "PRIO", "NODES", "RUNS", "SINCE", "WHY")]
    for task in page.tasks:
        state_text = task.state.value if task.outcome is None else task.outcome.value
        nodes = len(task.nodes) or task.least_nodes
        rows.append((str(task.id), plain(task.name, 40), task.user, state_text, str(task.priority), str(nodes),
                     str(task.runs), _ago(task.since_ns), why.get(task.id, "")))  # fmt: skip
    click.echo(columns(rows))
    if page.next is not None:
        click.echo(f"more tasks follow: ff ps --limit {min(1000, 2 * limit)}", err=True)
    return 0


def reasons(tasks: Iterable[TaskView], ask: Callable[[Sequence[int]], Mapping[int, Why]]) -> dict[int, str]:
    """Why tasks wait, by their numbers: of the first `_MOST_REASONS` that do. `ask` is one request to the platform
    (`Client.reasons`). Where it is not answered there are no reasons, and a line on stderr says so."""
    wait = [task.id for task in islice((task for task in tasks if task.state in _WAIT), _MOST_REASONS)]
    if not wait:
        return {}
    try:
        said = ask(wait)
    except FireflyerError as error:
        click.echo(f"why tasks wait is not known: {plain(error.message)}", err=True)
        return {}
    return {task: plain(said[task].text, 120) for task in wait if task in said}


@click.command("show", short_help="Show a task: its state and why, its runs, where its time went.",
               epilog="Example: ff show 17")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.argument("task", metavar="TASK", type=TASK_NUMBER)
@platform_option
def show_command(*, client: Client, as_json: bool, task: int) -> int:
    """Show the task number TASK."""
    try:
        answer = client.task(task)
    except NotFound:
        return _show_past(client, task, as_json=as_json)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(answer), indent=1))
        return 0
    view = answer.task
    state = view.state.value if view.outcome is None else f"{view.state.value}, {view.outcome.value}"
    facts = [
        ("task", f"{view.id} {plain(view.name)}"),
        ("user", view.user + (f" ({view.group})" if view.group else "")),
        ("state", f"{state}, for {_ago(view.since_ns)}"),
        ("why", plain(answer.why.text)),
    ]
    if answer.why.place:
        facts.append(("place", answer.why.place))
    if answer.why.earliest_ns is not None:
        facts.append(("starts", f"{_clock(answer.why.earliest_ns)} at the latest, by what is declared"))
    span = str(view.least_nodes) if view.least_nodes == view.most_nodes else f"{view.least_nodes}:{view.most_nodes}"
    facts.append(("asks", f"{span} nodes of {view.node_group}, priority {view.priority}"))
    if view.nodes:
        facts.append(("nodes", plain(" ".join(view.nodes))))
    if view.spec is not None:
        program = view.spec.program
        facts.append(("runs", plain(" ".join([program.script, *program.args]))))
    facts.append(("time", _times(view)))
    if view.exit_code is not None:
        facts.append(("exit", f"{view.exit_code}: {plain(view.reason)}"))
    click.echo("\n".join(f"{name:<6} {text}" for name, text in facts))
    if answer.runs:
        click.echo(columns([("RUN", "STATE", "NODES", "BEGAN", "FOR", "ENDED BY"), *map(_run_row, answer.runs)]))
    return 0


def _show_past(client: Client, task: int, *, as_json: bool) -> int:
    """The manager remembers the last tasks that ended, the history all of them."""
    try:
        answer = client.past_task(task)
    except NotFound:
        raise NotFound(f"there is no task {task}; `ff ps --state any` lists yours") from None
    click.echo(json.dumps(msgspec.to_builtins(answer), indent=1) if as_json else past_task_text(answer))
    return 0


def _run_row(run: RunView) -> tuple[str, ...]:
    began = run.started_ns or run.scheduled_ns
    until = run.over_ns or run.ended_ns or time.time_ns()
    cause = "" if run.cause is None else ended_by(run.cause.value, run.end_reason)
    step = "" if run.step is None else f" (step {run.step})"
    nodes = run.nodes[0] if len(run.nodes) == 1 else f"{len(run.nodes)}: {run.nodes[0]}…"
    return (str(run.number), run.state + step, nodes, _clock(began), format_duration(max(0, until - began)), cause)


def _times(view: TaskView) -> str:
    """Where the task's life went, parts that are not nothing."""
    names = view.account.__struct_fields__
    parts = [(name.removesuffix("_ns"), getattr(view.account, name)) for name in names]
    shown = ", ".join(f"{name} {format_duration(ns)}" for name, ns in parts if ns >= SECOND // 100)
    ettr = "" if view.ettr is None else f"; ETTR {view.ettr:.3f}"
    return f"{format_duration(view.account.total_ns)}: {shown or 'nothing yet'}{ettr}"


def _command(name: str, short: str, long: str, kind: str) -> click.Command:
    """A command that says one thing about tasks."""

    @click.command(name, short_help=short, epilog=f"Example: ff {name} 17")
    @click.argument("tasks", metavar="TASK...", nargs=-1, required=True, type=TASK_NUMBER)
    @platform_option
    def call(*, client: Client, tasks: tuple[int, ...]) -> int:
        from fireflyer.cluster.core.platform import commands

        for task in tasks:
            click.echo(plain(client.command(getattr(commands, kind)(task))))
        return 0

    call.help = long
    return call


stop_command = _command(
    "stop",
    "Stop tasks.",
    "Stop tasks for good. Their processes are asked to end, and killed after a while.",
    "StopTask",
)
suspend_command = _command(
    "suspend",
    "Let tasks save and give their nodes back.",
    "Let tasks save and give their nodes back. They wait until they are resumed.",
    "SuspendTask",
)
resume_command = _command(
    "resume",
    "Queue suspended tasks again.",
    "Queue tasks again that were suspended. They keep their place.",
    "ResumeTask",
)


@click.command("priority", short_help="Change the priority of a task.", epilog="Example: ff priority 17 20")
@click.argument("task", metavar="TASK", type=TASK_NUMBER)
@click.argument("priority", metavar="PRIORITY", type=WholeNumber(0, 50))
@platform_option
def priority_command(*, client: Client, task: int, priority: int) -> int:
    """Give the task number TASK the priority PRIORITY, 0 to 50."""
    from fireflyer.cluster.core.platform.commands import SetPriority

    click.echo(plain(client.command(SetPriority(task, priority))))
    return 0


def _ago(at_ns: int) -> str:
    return format_duration(max(0, time.time_ns() - at_ns))


def _clock(at_ns: int) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at_ns / SECOND))
