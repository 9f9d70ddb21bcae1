"""`ff down`: ends tasks, platform and file system, in that order."""

from __future__ import annotations

import os
from shlex import quote
from typing import Final

import click

from fireflyer.base.errors import NotFound, PermissionDenied
from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.numbers import Duration
from fireflyer.cli.platform.connect import of_another
from fireflyer.cli.platform.ending import kill_runs, let_runs_leave
from fireflyer.cli.platform.up import read_up_file

__all__ = ["command"]

DOWN_S: Final = 60.0


@click.command("down", short_help="End tasks, platform and file system of `ff up`.", epilog="""\b
Examples:
  ff down             # runs save and leave first; their tasks go on with the next `ff up`
  ff down --grace 0s  # runs are killed; their tasks go on from their last checkpoint""")  # fmt: skip
@click.option("--dir", "--platform", "directory", metavar="DIR", shell_complete=complete_directory,
              help="Directory that was given to `ff up`.  [default: as FILE says, or platform]")  # fmt: skip
@click.option("--grace", "grace_ns", metavar="TIME", type=Duration(zero=True), default=60 * SECOND,
              help="How long runs have to save before they are killed.  [default: 60s]")  # fmt: skip
@click.option("--keep-runs", is_flag=True, help="Let runs go on without a manager, for as long as `stop_after` says.")
@click.option("--force", is_flag=True, help="Kill all processes at once, the runs' too.")
@click.argument("file", metavar="[FILE]", required=False, shell_complete=complete_file)
def command(*, file: str | None, directory: str | None, grace_ns: int, keep_runs: bool, force: bool) -> int:
    """Stop what `ff up` runs in DIR, or for the FILE that was given to it. Runs are asked to save and to leave; then
    agents and manager end, and the file system last. Tasks stay in the queue and go on when `ff up` is given again."""
    from fireflyer.cluster.local.layout import PlatformLayout
    from fireflyer.runtime.processes.run_lock import END_NOW, end_holder, seems_held

    layout = PlatformLayout(directory or read_up_file(file).directory)
    try:
        platform = layout.load()
    except NotFound:
        raise NotFound(f"{layout.directory} holds no platform; give the directory of `ff up` with --dir") from None
    except PermissionDenied as error:
        if of_another(error, layout.directory) is error:
            raise  # it is mine: the error says what to do
        raise PermissionDenied(
            f"the platform in {layout.directory} was started by another user, who can end it; you may stop your own "
            "tasks: ff stop TASK"
        ) from None
    up = seems_held(layout.lock_file)
    if up and not keep_runs and not force and grace_ns > 0:
        let_runs_leave(layout, grace_ns / SECOND)
    shown = quote(os.path.relpath(layout.directory))
    if up or keep_runs:
        pid = end_holder(layout.lock_file, timeout_s=DOWN_S, force=force, number=END_NOW, commands="ff")
        click.echo(f"The platform in {shown} (process {pid}) has stopped.")
    elif not kill_runs(layout, platform):
        raise NotFound(f"the platform in {layout.directory} is not running")
    if not keep_runs and up:
        kill_runs(layout, platform)
    return 0
