"""`ff top`: nodes and tasks of the platform, again and again."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import TransientError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.numbers import Duration
from fireflyer.cli.platform.connect import plain, platform_option

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.platform.views import ClusterView, NodeView, TaskView

__all__ = ["command", "screen"]

PLAIN_TASKS: Final = 1000
WIDEST_NAME: Final = 40
_ORDER: Final = ("running", "suspending", "scheduled", "queued", "suspended")
_COLUMNS: Final = ("TASK", "USER", "STATE", "PRIO", "NODES", "FOR", "RUNS", "NAME")
_OTHER_SCREEN, _SCREEN_BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command("top", short_help="Watch nodes and tasks.", epilog="""\b
Examples:
  ff top         # until Ctrl-C
  ff top --once  # once, as is also done where the output is no terminal""")  # fmt: skip
@click.option("--every", metavar="TIME", type=Duration(), default=2 * SECOND,
              help="How often it is shown anew.  [default: 2s]")  # fmt: skip
@click.option("--once", is_flag=True, help="Show it once.")
@platform_option
def command(*, client: Client, every: int, once: bool) -> int:
    """Show how busy the nodes are, and the tasks of everybody that run and wait. Ctrl-C ends it."""
    if once or not sys.stdout.isatty():
        click.echo("\n".join(_looked(client, PLAIN_TASKS, None)))
        return 0
    sys.stdout.write(_OTHER_SCREEN)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(client, every)
    finally:
        sys.stdout.write(_SCREEN_BACK)
        sys.stdout.flush()
    return 0


def _watch(client: Client, every_ns: int) -> None:
    """Until Ctrl-C. Goes on while no manager leads, and says so."""
    lines: list[str] = []
    while True:
        width, height = shutil.get_terminal_size()
        try:
            lines = _looked(client, height, width)
            last = ""
        except TransientError as error:
            last = f"as of some time ago: {error.message}"
        shown = [line[: max(1, width - 1)] for line in (*lines[: height - 1 - bool(last)], *((last,) if last else ()))]
        sys.stdout.write(_HOME + f"{_REST_OF_LINE}\r\n".join(shown) + _REST_OF_LINE + _REST)
        sys.stdout.flush()
        time.sleep(every_ns / SECOND)


def _looked(client: Client, height: int, width: int | None) -> list[str]:
    page = client.tasks(state="unfinished", limit=min(1000, max(height, 100)))
    return screen(client.cluster(), list(client.all_nodes()), page.tasks, width, height, time.time_ns())


def screen(
    cluster: ClusterView,
    nodes: Sequence[NodeView],
    tasks: Sequence[TaskView],
    width: int | None,
    height: int,
    now_ns: int,
) -> list[str]:
    """Lines, at most `height`; those that run first. `width`: of a terminal; None: as wide as they are."""
    head = [*_nodes(cluster, nodes), _counts(cluster), ""]
    ordered = sorted(tasks, key=lambda task: (_ORDER.index(task.state.value), -task.priority, task.id))
    room = max(0, height - len(head) - 2)
    rows = [_COLUMNS, *(_row(task, now_ns) for task in ordered[:room])]
    lines = head + (columns(rows).split("\n") if tasks else ["no tasks"])
    unseen = sum(count for state, count in cluster.tasks.items() if state != "finished") - len(rows) + 1
    if unseen > 0:
        lines.append(f"and {unseen} more: ff ps --all-users")
    return [line if width is None else line[:width] for line in lines[:height]]


def _nodes(cluster: ClusterView, nodes: Sequence[NodeView]) -> Iterator[str]:
    states: dict[str, int] = {}
    groups: dict[str, list[int]] = {}
    for node in nodes:
        states[node.state] = states.get(node.state, 0) + 1
        counts = groups.setdefault(node.group, [0, 0])
        counts[0] += node.task is not None
        counts[1] += 1
    shown = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield f"nodes  {cluster.busy} of {cluster.healthy} in use{f'; {shown}' if shown else ''}"
    reserved = sum(bool(node.reserved) for node in nodes)
    if len(groups) > 1 or reserved:
        by_group = ", ".join(f"{plain(name, 40)} {busy}/{all_}" for name, (busy, all_) in sorted(groups.items()))
        yield f"       {by_group}" + (f"; {reserved} reserved or to be" if reserved else "")


def _counts(cluster: ClusterView) -> str:
    tasks = ", ".join(f"{cluster.tasks[state]} {state}" for state in _ORDER if cluster.tasks.get(state))
    used = "" if cluster.utilisation is None else f"; utilisation {cluster.utilisation:.1%}"
    good = "" if cluster.goodput is None else f", goodput {cluster.goodput:.1%}"
    return f"tasks  {tasks or 'none'}{used}{good}"


def _row(task: TaskView, now_ns: int) -> tuple[str, ...]:
    asked = str(task.least_nodes) if task.least_nodes == task.most_nodes else f"{task.least_nodes}:{task.most_nodes}"
    since = format_duration(max(0, now_ns - task.since_ns))
    held = f"{task.state.value}, held" if task.held else task.state.value
    nodes = str(len(task.nodes) or asked)
    return (
        str(task.id),
        plain(task.user, 20),
        held,
        str(task.priority),
        nodes,
        since,
        str(task.runs),
        plain(task.name, WIDEST_NAME),
    )
