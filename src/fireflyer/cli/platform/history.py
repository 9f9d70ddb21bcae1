"""`ff history`, `ff usage`, `ff audit`: what was, from the tables of the history."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Final

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.platform.connect import plain, platform_option

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.platform.views import PastTask, PastTaskAnswer

__all__ = ["audit_command", "ended_by", "history_command", "past_task_text", "usage_command"]

_HOUR_S: Final = 3600.0


@click.command("history", short_help="List tasks that have ended, also long ago.", epilog="""\b
Examples:
  ff history                         # your tasks that ended, the last one first
  ff history --all-users --for 168h  # those of everybody of the last week
  ff history --outcome failed        # those that failed""")  # fmt: skip
@click.option("--all-users", "-a", is_flag=True, help="Tasks of everybody.")
@click.option("--user", metavar="USER", default="", help="Tasks of this user.  [default: you]")
@click.option("--outcome", type=click.Choice(["succeeded", "failed", "stopped"]), help="How they ended.  [default: "
              "any]")  # fmt: skip
@click.option("--name", metavar="NAME", default="", help="Tasks of this name.  [default: any]")
@click.option("--for", "span", metavar="TIME", type=Duration(), help="That ended so long ago at most.  [default: "
              "ever]")  # fmt: skip
@click.option(
    "--limit", metavar="N", type=WholeNumber(1, 1000), default=100, show_default=True, help="At most so many."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each task.")
@platform_option
def history_command(
    *,
    client: Client,
    all_users: bool,
    user: str,
    outcome: str | None,
    name: str,
    span: int | None,
    limit: int,
    as_json: bool,
) -> int:
    """List tasks that have ended, the last one first: also those that the manager has forgotten."""
    wanted = "" if all_users else user or client.whoami().user
    since_ns = None if span is None else max(0, time.time_ns() - span)
    page = client.past_tasks(user=wanted, outcome=outcome or "", name=name, since_ns=since_ns, limit=limit)
    if as_json:
        for task in page.tasks:
            click.echo(msgspec.json.encode(task))
        return 0
    rows = [("TASK", "NAME", "USER", "ENDED", "OUTCOME", "NODES", "RUNS", "LIFE", "QUEUE", "ETTR")]
    rows += [
        (
            str(task.id),
            plain(task.name, 40),
            task.user,
            _clock(task.ended_ns or 0),
            task.outcome or task.state,
            str(task.nodes),
            str(task.runs),
            format_duration(task.account.total_ns),
            format_duration(task.account.queue_ns),
            "-" if task.ettr is None else f"{task.ettr:.3f}",
        )
        for task in page.tasks
    ]
    click.echo(columns(rows))
    if page.next:
        click.echo(f"more tasks follow: ff history --limit {min(1000, 2 * limit)}", err=True)
    return 0


@click.command("usage", short_help="Show what users had of the cluster.", epilog="""\b
Examples:
  ff usage                        # in the last day, by user
  ff usage --month 2026-11        # in a month
  ff usage --for 168h --by group  # in the last week, by group""")  # fmt: skip
@click.option("--month", metavar="YYYY-MM", help="A month, in the time zone of this machine.  [default: the last day]")
@click.option("--for", "span", metavar="TIME", type=Duration(), help="So long until now, in the place of a month.  "
              "[default: the last day]")  # fmt: skip
@click.option("--by", type=click.Choice(["user", "group"]), default="user", show_default=True, help="One line for "
              "each of these.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@platform_option
def usage_command(*, client: Client, month: str | None, span: int | None, by: str, as_json: bool) -> int:
    """Show the node-hours that users, or groups, had, how much of them was productive, and how their tasks ended.
    Productive time is told by programs that report their steps; that of a run counts when it has ended."""
    if month is not None and span is not None:
        raise UsageError("--month and --for contradict each other; give one of them")
    start_ns, end_ns = _month(month) if month is not None else (None, None)
    if span is not None:
        end_ns = time.time_ns()
        start_ns = max(0, end_ns - span)
    report = client.usage(start_ns=start_ns, end_ns=end_ns, by=by)
    if as_json:
        click.echo(msgspec.json.encode(report))
        return 0
    rows: list[tuple[str, ...]] = [
        (by.upper(), "NODE-HOURS", "PRODUCTIVE", "RUNS", "ENDED", "SUCCEEDED", "FAILED", "STOPPED")
    ]
    for line in report.lines:
        counts = (line.runs, line.tasks, line.succeeded, line.failed, line.stopped)
        hours = (line.node_seconds / _HOUR_S, line.productive / _HOUR_S)
        rows.append((plain(line.name, 80) or "-", *(f"{one:.2f}" for one in hours), *map(str, counts)))
    click.echo(columns(rows))
    return 0


def _month(text: str) -> tuple[int, int]:
    """Its beginning and its end. Raises `UsageError`."""
    try:
        first = datetime.datetime.strptime(text, "%Y-%m").astimezone()
        end = (first.replace(day=28) + datetime.timedelta(days=4)).replace(day=1, tzinfo=None).astimezone()
        return max(0, int(first.timestamp())) * SECOND, max(1, int(end.timestamp())) * SECOND
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--month {text!r} is not a month; write it like 2026-11") from None


@click.command("audit", short_help="Show who changed what.", epilog="""\b
Examples:
  ff audit                        # the last changes, the newest first
  ff audit --target gpu-7         # of a node
  ff audit --user ann --for 720h  # by a user, in the last month""")  # fmt: skip
@click.option("--user", metavar="USER", default="", help="Changes by this user.  [default: anybody]")
@click.option("--command", metavar="NAME", default="", help="Of this kind, such as DrainNode.  [default: any]")
@click.option("--target", metavar="NAME", default="", help="Of this task, node or user.  [default: any]")
@click.option("--for", "span", metavar="TIME", type=Duration(), help="Not longer ago than this.  [default: ever]")
@click.option(
    "--limit", metavar="N", type=WholeNumber(1, 1000), default=100, show_default=True, help="At most so many."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each change.")
@platform_option
def audit_command(
    *, client: Client, user: str, command: str, target: str, span: int | None, limit: int, as_json: bool
) -> int:
    """Show who changed tasks, nodes, users, tokens and settings, the newest change first. For administrators."""
    since_ns = None if span is None else max(0, time.time_ns() - span)
    page = client.audit(user=user, command=command, target=target, since_ns=since_ns, limit=limit)
    if as_json:
        for entry in page.entries:
            click.echo(msgspec.json.encode(entry))
        return 0
    rows: list[tuple[str, ...]] = [("TIME", "USER", "FROM", "CHANGE", "TARGET", "OUTCOME", "TEXT")]
    for entry in page.entries:
        words = (entry.user, entry.address or "-", entry.command, entry.target, entry.outcome, entry.text)
        rows.append((_clock(entry.at_ns), *(plain(word, 120) for word in words)))
    click.echo(columns(rows))
    if page.next:
        click.echo(f"more follow: ff audit --limit {min(1000, 2 * limit)}", err=True)
    return 0


def ended_by(cause: str, reason: str) -> str:
    """How a run ended: the cause, and the reason where it says more."""
    said = plain(reason, 120)
    return cause if said in ("", cause) else f"{cause}: {said}"


def past_task_text(answer: PastTaskAnswer) -> str:
    """Of one that the manager has forgotten, for `ff show`."""
    task = answer.task
    facts = [
        ("task", f"{task.id} {plain(task.name)}, from the history"),
        ("user", task.user + (f" ({task.group})" if task.group else "")),
        ("state", f"{task.state}, {task.outcome or '-'}"),
        ("ended", "-" if task.ended_ns is None else _clock(task.ended_ns)),
        ("asked", f"{task.nodes} nodes of {task.node_group}, priority {task.priority}"),
        ("time", _times(task)),
    ]
    if task.exit_code is not None:
        facts.append(("exit", f"{task.exit_code}: {plain(task.reason)}"))
    lines = [f"{name:<6} {text}" for name, text in facts]
    rows = [("RUN", "NODES", "BEGAN", "PRODUCTIVE", "ENDED BY")]
    for run in answer.runs:
        parts = answer.parts.get(str(run.number))
        nodes = run.nodes[0] if len(run.nodes) == 1 else f"{len(run.nodes)}: {run.nodes[0]}…"
        productive = "-" if parts is None else format_duration(parts.productive_ns)
        cause = "" if run.cause is None else ended_by(run.cause, run.end_reason)
        rows.append((str(run.number), nodes, _clock(run.started_ns or run.scheduled_ns), productive, cause))
    return "\n".join([*lines, *([columns(rows)] if answer.runs else [])])


def _times(task: PastTask) -> str:
    parts = [(name.removesuffix("_ns"), getattr(task.account, name)) for name in task.account.__struct_fields__]
    shown = ", ".join(f"{name} {format_duration(ns)}" for name, ns in parts if ns >= SECOND // 100)
    ettr = "" if task.ettr is None else f"; ETTR {task.ettr:.3f}"
    return f"{format_duration(task.account.total_ns)}: {shown or 'nothing'}{ettr}"


def _clock(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ns / SECOND))
