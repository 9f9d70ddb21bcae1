"""`ff fs`: the distributed file system."""

from __future__ import annotations

import click

from fireflyer.cli.fs_placement import placement_command
from fireflyer.cli.fs_processes import manager_command

__all__ = ["admin", "command"]


@click.group("fs", short_help="The distributed file system: where its chunks lie.")
def command() -> None:
    """Chunks of files, replicated over the nodes of a cluster."""


@command.group("admin", short_help="For administrators.")
def admin() -> None:
    """What administrators plan and decide."""


command.add_command(manager_command)
admin.add_command(placement_command)
