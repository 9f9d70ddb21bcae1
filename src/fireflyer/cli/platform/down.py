"""`ff down`: ends tasks, platform and file system, in that order."""

from __future__ import annotations

import os
from shlex import quote
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import FireflyerError, NotFound
from fireflyer.base.units import SECOND, counted
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.numbers import Duration
from fireflyer.cli.platform.up import read_up_file

if TYPE_CHECKING:
    from fireflyer.cluster.core.platform.views import NodeView
    from fireflyer.cluster.local.layout import LocalPlatform, PlatformLayout

__all__ = ["command"]

DOWN_S: Final = 60.0


@click.command("down", short_help="End tasks, platform and file system of `ff up`.", epilog="""\b
Examples:
  ff down                  runs save and leave first; their tasks go on with the next `ff up`
  ff down --grace 0s       runs are killed; their tasks go on from their last checkpoint""")  # fmt: skip
@click.option("--dir", "directory", metavar="DIR", shell_complete=complete_directory,
              help="Directory that was given to `ff up`.  [default: as FILE says, or platform]")  # fmt: skip
@click.option("--grace", "grace_ns", metavar="TIME", type=Duration(), default=60 * SECOND,
              help="How long runs have to save before they are killed.  [default: 60s]")  # fmt: skip
@click.option("--keep-runs", is_flag=True, help="Let runs go on without a manager, for as long as `stop_after` says.")
@click.option("--force", is_flag=True, help="Kill all processes at once, the runs' too.")
@click.argument("file", metavar="[FILE]", required=False, shell_complete=complete_file)
def command(*, file: str | None, directory: str | None, grace_ns: int, keep_runs: bool, force: bool) -> int:
    """Stop what `ff up` runs in DIR, or for the FILE that was given to it. Runs are asked to save and to leave; then
    agents and manager end, and the file system last. Tasks stay in the queue and go on when `ff up` is given again."""
    from fireflyer.cluster.local.layout import PlatformLayout
    from fireflyer.runtime.processes.run_lock import end_holder, seems_held

    layout = PlatformLayout(directory or read_up_file(file).directory)
    try:
        platform = layout.load()
    except NotFound:
        raise NotFound(f"{layout.directory} holds no platform; give the directory of `ff up` with --dir") from None
    up = seems_held(layout.lock_file)
    if up and not keep_runs and not force and grace_ns > 0:
        _let_runs_leave(layout, grace_ns / SECOND)
    shown = quote(os.path.relpath(layout.directory))
    if up or keep_runs:
        pid = end_holder(layout.lock_file, timeout_s=DOWN_S, force=force, commands="ff")
        click.echo(f"The platform in {shown} (process {pid}) has stopped.")
    elif not _end_runs(layout, platform):
        raise NotFound(f"the platform in {layout.directory} is not running")
    if not keep_runs and up:
        _end_runs(layout, platform)
    return 0


def _let_runs_leave(layout: PlatformLayout, grace_s: float) -> None:
    """A platform that does not answer is ended all the same."""
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.local.layout import read_connection
    from fireflyer.cluster.local.leaving import close_nodes, wait_until_free

    def on_change(busy: list[NodeView]) -> None:
        click.echo(f"  {counted(len(busy), 'node')} left" if busy else "  all have left")

    try:
        with Client(read_connection(layout.connection_file)) as client:
            busy = close_nodes(client)
            if not busy:
                return
            runs = len({node.task for node in busy})
            click.echo(f"{counted(runs, 'task')} on {counted(len(busy), 'node')}: asked to save and to leave.")
            busy = wait_until_free(client, grace_s, on_change)
            if busy:
                click.echo(
                    f"{counted(len({node.task for node in busy}), 'task')} had not left after {grace_s:.0f} s: killed, "
                    "and queued again at the next `ff up`."
                )
    except FireflyerError as error:
        click.echo(f"warning: runs cannot be asked to leave: {error.message}; they are killed", err=True)


def _end_runs(layout: PlatformLayout, platform: LocalPlatform) -> bool:
    """Kills what is left of runs. False: there was nothing."""
    from fireflyer.cluster.local.leaving import end_runs

    ended = end_runs(layout, platform)
    if ended:
        click.echo(f"Ended {counted(ended, 'process group')} of runs.")
    return bool(ended)
