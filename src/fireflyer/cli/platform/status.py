"""`ff status`: the platform of a directory and the file system beside it, on one screen."""

from __future__ import annotations

import os
import time
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.base.errors import FireflyerError, NotFound, PermissionDenied
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.platform.connect import DEFAULT_DIRECTORY, PLATFORM_VARIABLE, of_another

if TYPE_CHECKING:
    from fireflyer.cli.fs.connect import ClusterTarget
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.platform.views import TaskView
    from fireflyer.cluster.local.layout import PlatformLayout

__all__ = ["command", "to_json"]

HEIGHT: Final = 24
"""Lines of the platform; `ff ps` shows all tasks."""
REASONS: Final = 4
"""Tasks of which it says why they wait; `ff show TASK` says it of each."""


@click.command("status", short_help="Show what `ff up` runs.", epilog="""\b
Examples:
  ff status                  # nodes, tasks, chains and files of ./platform
  ff status --json | jq .ok  # true where everything serves""")  # fmt: skip
@click.option("--dir", "--platform", "directory", metavar="DIR", shell_complete=complete_directory,
              help=f"Directory that was given to `ff up`.  [default: what ${PLATFORM_VARIABLE} names, or "
              f"{DEFAULT_DIRECTORY}]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def command(*, directory: str | None, as_json: bool) -> int:
    """Show the platform of DIR and its file system: nodes, tasks, chains, space and files. The exit code is 1 where a
    part does not serve, a node is lost or a chain is not fully replicated."""
    from fireflyer.cluster.local.layout import PlatformLayout

    layout = PlatformLayout(directory or os.environ.get(PLATFORM_VARIABLE) or DEFAULT_DIRECTORY)
    try:
        layout.load()
    except NotFound:
        raise NotFound(
            f"{layout.directory} holds no platform of `ff up`; start one: ff up -d, or name its directory with --dir "
            "(ff top shows a platform that you have logged in to)"
        ) from None
    except PermissionDenied as error:
        raise of_another(error, layout.directory) from None
    platform, files = _Platform(layout), _Files(layout)
    ok = platform.ok and files.ok
    if as_json:
        click.echo(to_json(platform.found, files.found, ok=ok).decode())
    else:
        click.echo("\n".join((*platform.lines, "", *files.lines)))
    return 0 if ok else 1


def to_json(platform: dict[str, Any], storage: dict[str, Any] | None, *, ok: bool) -> bytes:
    """Of `ff status --json`; a part that does not answer has one key, `error`."""
    import msgspec

    return msgspec.json.encode({"ok": ok, "platform": platform, "storage": storage})


class _Platform:
    """What the manager says, or why it says nothing."""

    def __init__(self, layout: PlatformLayout) -> None:
        from fireflyer.cluster.client import Client, read_connection

        self.found: dict[str, Any] = {}
        start = f"ff up -d --dir {quote(os.path.relpath(layout.directory))}"
        try:
            with Client(read_connection(layout.connection_file), if_unreachable=f"start it: {start}") as client:
                self._look(client)
        except FireflyerError as error:
            self.ok = False
            self.found = {"error": error.message}
            self.lines = [f"Platform: {error.message}"]

    def _look(self, client: Client) -> None:
        from fireflyer.cli.platform.tasks import reasons
        from fireflyer.cli.platform.top import screen

        cluster, nodes = client.cluster(), list(client.all_nodes())
        tasks = client.tasks(state="unfinished", limit=1000).tasks
        self.ok = all(node.state != "lost" for node in nodes)
        self.found = {"cluster": cluster, "nodes": nodes, "tasks": tasks}
        self.lines = [f"Platform at {client.connection.url}"]
        self.lines += screen(cluster, nodes, tasks, None, HEIGHT, time.time_ns())
        waiting = sorted((task for task in tasks if task.state.value == "queued"), key=_queue_order)
        why = reasons(waiting[:REASONS], client.reasons)
        self.lines += [f"task {task} waits: {text}" for task, text in why.items()]


def _queue_order(task: TaskView) -> tuple[int, int]:
    return -task.priority, task.id


class _Files:
    """What the managers of the file system say, or why they say nothing."""

    def __init__(self, layout: PlatformLayout) -> None:
        self.found: dict[str, Any] | None = None
        self.ok = True
        if not os.path.exists(layout.storage_directory):
            self.lines = ["File system: none here; make one: ff up --storage 3"]
            return
        from fireflyer.cli.fs.connect import local

        try:
            self._look(local(layout.storage_directory))
        except FireflyerError as error:
            self.ok = False
            self.found = {"error": error.message}
            self.lines = [f"File system: {error.message}"]

    def _look(self, where: ClusterTarget) -> None:
        from fireflyer.cli.fs.status import look, shown, status_lines, summary_of

        status, moves, files = look(where)
        summary = summary_of(status)
        self.ok = summary.alive == summary.nodes and summary.whole == summary.chains
        self.found = shown(status, moves, files)
        self.lines = ["File system", *status_lines(status, files)]
