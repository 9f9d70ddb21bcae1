"""`ff fs`: the distributed file system."""

from __future__ import annotations

from fireflyer.cli.fs.admin.command import (
    add_node_command,
    drain_command,
    end_session_command,
    override_command,
    rotate_keys_command,
    sessions_command,
    undrain_command,
)
from fireflyer.cli.fs.admin.machines import (
    add_chains_command,
    register_node_command,
    retire_node_command,
)
from fireflyer.cli.fs.admin.placement import placement_command
from fireflyer.cli.fs.admin.rebalance import rebalance_command
from fireflyer.cli.fs.admin.store import dump_command, load_command
from fireflyer.cli.fs.admin.store import fsck_command as offline_fsck_command
from fireflyer.cli.fs.admin.users import user_command
from fireflyer.cli.fs.files.change import (
    chmod_command,
    chown_command,
    mkdir_command,
    mv_command,
    rm_command,
    touch_command,
)
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
from fireflyer.cli.fs.sections import SectionedGroup
from fireflyer.cli.fs.status import status_command
from fireflyer.cli.fs.up import down_command, up_command

__all__ = ["admin", "command"]

admin = SectionedGroup(
    "admin",
    short_help="Users, nodes, chains, keys; metadata of a stopped cluster.",
    help="""Commands for administrators: users, nodes and targets, chains, client sessions and keys, and the metadata of
    a stopped cluster. `ff fs admin COMMAND --help` shows the options of a command.""",
    sections={
        "Users": (user_command,),
        "Nodes and targets": (
            add_node_command,
            register_node_command,
            drain_command,
            undrain_command,
            retire_node_command,
        ),
        "Chains": (placement_command, add_chains_command, rebalance_command, override_command),
        "Client sessions and keys": (sessions_command, end_session_command, rotate_keys_command),
        "Metadata, while the cluster is stopped": (offline_fsck_command, dump_command, load_command),
    },
    examples=(
        ("ff fs admin user add --token ann --dir fs", "add a user, and print a token for them"),
        ("ff fs admin drain --node 2 --dir fs", "mark node 2 for removal; it serves until ..."),
        ("ff fs admin rebalance --wait 3600 --dir fs", "... its chains are moved to the other nodes"),
        ("ff fs admin retire-node 2 --dir fs", "remove it from the cluster"),
        ("ff fs admin dump backup.meta --dir fs", "back up the metadata, after `ff fs down`"),
    ),
)

command = SectionedGroup(
    "fs",
    short_help="A file system over the disks of many machines.",
    help="""A file system over the disks of many machines. `up` starts one on this machine; `mount`, the commands for
    files, and `fireflyer.fs.connect` in Python use it.

    Which cluster: --dir DIR, or --manager HOST:PORT with --token-file FILE; else what $FIREFLYER_FS names
    (ff://HOST:PORT or ff:///directory), else ./fs, else that of `ff up` in ./platform. Paths in the cluster begin
    with /. A path like ff://HOST:PORT/data names its cluster itself.""",
    sections={
        "Files": (
            ls_command,
            cat_command,
            stat_command,
            find_command,
            du_command,
            df_command,
            mkdir_command,
            touch_command,
            chown_command,
            chmod_command,
            cp_command,
            mv_command,
            rm_command,
            put_command,
            get_command,
            sync_command,
            quota_command,
            defaults_command,
        ),
        "Mounts": (mount_command, umount_command),
        "Cluster": (up_command, status_command, down_command, fsck_command, gc_command, bench_command),
        "Administration": (admin,),
        "Processes, as `up` or a service manager starts them": (manager_command, storage_command, meta_command),
    },
    examples=(
        ("ff fs up --dir fs -d", "start a file system in ./fs"),
        ("ff fs put -r docs /docs --dir fs", "copy a directory into it"),
        ("ff fs ls -l /docs --dir fs", "list it"),
        ("ff fs mount mnt --dir fs -d", "use it from any program, in ./mnt"),
        ("ff fs status --dir fs", "show nodes, chains and space"),
        ("ff fs umount mnt", "unmount"),
        ("ff fs down --dir fs", "stop it; the data stay"),
    ),
)
