"""`ff fs`: the distributed file system."""

from __future__ import annotations

import click

from fireflyer.cli.fs.admin.command import COMMANDS
from fireflyer.cli.fs.admin.machines import (
    add_chains_command,
    issue_token_command,
    register_node_command,
    retire_node_command,
)
from fireflyer.cli.fs.admin.placement import placement_command
from fireflyer.cli.fs.admin.rebalance import rebalance_command
from fireflyer.cli.fs.admin.store import STORE_COMMANDS
from fireflyer.cli.fs.admin.users import user_command
from fireflyer.cli.fs.files.change import mkdir_command, mv_command, rm_command
from fireflyer.cli.fs.files.copy import cp_command, get_command, put_command, sync_command
from fireflyer.cli.fs.files.find import find_command
from fireflyer.cli.fs.files.maintenance import bench_command, gc_command
from fireflyer.cli.fs.files.settings import defaults_command, quota_command
from fireflyer.cli.fs.files.show import cat_command, ls_command, stat_command
from fireflyer.cli.fs.files.space import df_command, du_command
from fireflyer.cli.fs.fsck import fsck_command
from fireflyer.cli.fs.meta import meta_command
from fireflyer.cli.fs.mount import mount_command, umount_command
from fireflyer.cli.fs.processes import manager_command, storage_command
from fireflyer.cli.fs.status import status_command
from fireflyer.cli.fs.up import down_command, up_command

__all__ = ["admin", "command"]


@click.group("fs", short_help="A file system over the disks of many machines.")
def command() -> None:
    """A file system over the disks of many machines. `up` starts one on this machine; `mount`, the commands for files
    and `fireflyer.fs.connect` use it.

    Paths in it begin with /, of the cluster in ./fs, or that --dir, --manager or $FIREFLYER_FS name. A path like
    ff://HOST:PORT/data names its cluster itself."""


@command.group("admin", short_help="Users, nodes, where chunks lie: for administrators.")
def admin() -> None:
    """For administrators: users, nodes and targets, where chunks lie, and metadata when the cluster is down."""


for verb in (up_command, status_command, down_command, mount_command, umount_command):
    command.add_command(verb)
for verb in (manager_command, meta_command, storage_command):
    command.add_command(verb)
for verb in (
    ls_command,
    cat_command,
    stat_command,
    du_command,
    df_command,
    find_command,
    quota_command,
    defaults_command,
):
    command.add_command(verb)
for verb in (fsck_command, gc_command, bench_command):
    command.add_command(verb)
for verb in (mkdir_command, mv_command, rm_command, cp_command, put_command, get_command, sync_command):
    command.add_command(verb)
for verb in (
    *COMMANDS,
    *STORE_COMMANDS,
    register_node_command,
    add_chains_command,
    retire_node_command,
    issue_token_command,
):
    admin.add_command(verb)
admin.add_command(placement_command)
admin.add_command(rebalance_command)
admin.add_command(user_command)
