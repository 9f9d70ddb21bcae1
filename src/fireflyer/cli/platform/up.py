"""`ff up`: the platform and a file system on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from shlex import quote
from typing import TYPE_CHECKING

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import counted
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.detached import command_line, own_say, report, run_detached
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.platform.connect import DEFAULT_DIRECTORY
from fireflyer.cli.platform.ending import GRACE_S, kill_runs, let_runs_leave, until_stopped
from fireflyer.cli.platform.storage import check_storage, storage_of

if TYPE_CHECKING:
    from fireflyer.cli.platform.storage import LocalStorage
    from fireflyer.cluster.local.config import UpConfig
    from fireflyer.cluster.local.layout import LocalPlatform, PlatformLayout
    from fireflyer.cluster.local.up_file import UpFile
    from fireflyer.runtime.processes.run_lock import RunLock

__all__ = ["command", "read_up_file"]


@click.command("up", short_help="Start platform and file system on this machine.", epilog="""\b
Examples:
  ff up --nodes 4 -d              # 4 agents and a file system of 3 nodes, in the background
  ff submit --nodes 2 train.py    # then hand it tasks
  ff up --print-config > up.toml  # all settings; then: ff up up.toml -d
  ff status                       # all of it on one screen
  ff down                         # stop it""")  # fmt: skip
@click.option("--dir", "directory", metavar="DIR", shell_complete=complete_directory,
              help="Where it keeps everything; made if absent.  [default: as FILE says, or platform]")  # fmt: skip
@click.option("--nodes", metavar="N", type=WholeNumber(1, 256), help="Agents, each of which counts as a node.  "
              "[default: as FILE says, or as many as DIR has, or 4]")  # fmt: skip
@click.option("--zones", metavar="N", type=WholeNumber(1, 256), help="Zones of the network among which they are "
              "shared out, to try placement.  [default: as FILE says, or 1]")  # fmt: skip
@click.option("--guarantee", metavar="TIME", type=Duration(), help="How long a run is not interrupted.  [default: as "
              "FILE says, or not at all; `ff manager` has 2h]")  # fmt: skip
@click.option("--storage", metavar="N", type=WholeNumber(0, 64), help="Storage processes of the file system in "
              "DIR/storage; 0: no file system.  [default: as FILE says, or as DIR has them, or 3]")  # fmt: skip
@click.option("-d", "--detach", is_flag=True, help="Return when it is up; it goes on in the background.")
@click.option("--print-config", is_flag=True, help="Print a FILE with all settings and their defaults, and end.")
@click.option("--report-fd", type=int, hidden=True)
@click.argument("file", metavar="[FILE]", required=False, shell_complete=complete_file)
def command(
    *,
    file: str | None,
    directory: str | None,
    nodes: int | None,
    zones: int | None,
    guarantee: int | None,
    storage: int | None,
    detach: bool,
    print_config: bool,
    report_fd: int | None,
) -> int:
    """Start a manager, agents and a file system on this machine, for one user: to try them, or for a machine of one's
    own. A cluster has `ff manager` on one or several machines and `ff agent run` on each node. Tasks find the file
    system as ff:///, and are there who submitted them: it has the users of the platform (`ff user`).

    FILE is a TOML file with settings; options come before what it says. What changes in `[health]` of it is applied
    within seconds; the rest counts at the next start."""
    import sys

    from fireflyer.cli.platform_extra import need_platform_extra
    from fireflyer.cluster.local.config import DEFAULTS
    from fireflyer.cluster.local.layout import PlatformLayout, new_platform
    from fireflyer.runtime.processes.run_lock import RunLock

    if print_config:
        click.echo(DEFAULTS, nl=False)
        return 0
    need_platform_extra()
    wanted = said = read_up_file(file)
    if guarantee is not None:
        wanted = wanted.guaranteeing(guarantee)
    if storage is not None:
        wanted = msgspec.structs.replace(wanted, storage=msgspec.structs.replace(wanted.storage, nodes=storage))
    layout = PlatformLayout(directory or wanted.directory)
    check_storage(layout, wanted.storage)  # before anything is made
    layout.make_directory()
    if detach:
        return run_detached(sys.argv[1:], os.path.join(layout.directory, "up.log"))
    with RunLock(layout.lock_file, "ff") as lock:
        new = not layout.exists()
        if not new:
            platform = layout.load()
            _check_same(layout, platform, nodes, zones)
            platform = _changed(layout, platform, wanted, nodes)
        else:
            platform = new_platform(nodes or wanted.agents or 4, zones or wanted.zones or 1, guarantee or 0)
        files = storage_of(layout, wanted.storage, new=new)
        layout.save(platform)
        layout.make_secret()
        say = own_say()
        followed = None if file is None else _followed(file, said, layout, say)
        return _run(layout, platform, wanted, files, lock, report_fd, say, followed)


def read_up_file(file: str | None) -> UpConfig:
    """Raises `UsageError`."""
    from fireflyer.cli.health.policy_file import read_policy
    from fireflyer.cli.toml_files import read_toml
    from fireflyer.cluster.local.config import UpConfig, keys_at

    if file is None:
        return UpConfig()
    try:
        found = read_toml(file, UpConfig, name="FILE", advice="write one: ff up --print-config > FILE").beside(file)
    except UsageError as error:
        if "unknown field" not in error.message:
            raise
        place = re.search(r"at `([^`]*)`", str(error.__cause__))
        keys = keys_at(place[1] if place is not None else "$")
        raise UsageError(f"{error.message}; keys there are {keys}") from None
    for policy in (found.health.policy, *found.health.group_policies.values()):
        if policy:
            read_policy(policy)  # else each node would say so, in its log
    return found


def _changed(layout: PlatformLayout, there: LocalPlatform, wanted: UpConfig, nodes: int | None) -> LocalPlatform:
    """With what a file changes of a platform that is there. Raises `UsageError`."""
    agents = wanted.agents if nodes is None and wanted.agents is not None else there.nodes
    if agents < there.nodes:
        raise UsageError(
            f"agents = {agents}: {layout.directory} holds a platform with {there.nodes}, which cannot become fewer; "
            f"write agents = {there.nodes} or more"
        )
    return msgspec.structs.replace(there, nodes=agents, zones=wanted.zones or there.zones)


def _check_same(layout: PlatformLayout, platform: LocalPlatform, nodes: int | None, zones: int | None) -> None:
    for option, wanted, there in (("nodes", nodes, platform.nodes), ("zones", zones, platform.zones)):
        if wanted is not None and wanted != there:
            raise UsageError(
                f"--{option} {wanted}: {layout.directory} holds a platform with {there}; leave the option out, or give "
                "another directory"
            )


def _followed(file: str, said: UpConfig, layout: PlatformLayout, say: Callable[[str], None]) -> UpFile:
    import sys

    from fireflyer.cluster.local.up_file import UpFile

    again = f"{_down(layout)} && {command_line(sys.argv[1:])}"
    return UpFile(file, read_up_file, said, say=say, again=again)


def _run(
    layout: PlatformLayout,
    platform: LocalPlatform,
    wanted: UpConfig,
    files: LocalStorage | None,
    lock: RunLock,
    report_fd: int | None,
    say: Callable[[str], None],
    followed: UpFile | None,
) -> int:
    from fireflyer.cluster.client import read_connection
    from fireflyer.cluster.local.run import run_local_platform
    from fireflyer.runtime import run

    def on_up(running: LocalPlatform) -> None:
        report(report_fd, _described(layout, running, files))
        if report_fd is None:
            click.echo("Ctrl-C stops it, as `ff down` does.")

    async def platform_alone(before_agents: Callable[[], Awaitable[None]] | None = None) -> None:
        await run_local_platform(
            layout,
            platform,
            wanted=wanted,
            lock=lock,
            say=say,
            on_up=on_up,
            before_agents=before_agents,
            task_environment=dict if files is None else files.task_environment,
            accounts=None if files is None else files.accounts,
            file=followed,
        )

    def admin_token() -> str:
        return read_connection(layout.connection_file).token

    def let_leave() -> None:
        if layout.has_connection:  # else it was never up
            let_runs_leave(layout, GRACE_S)

    work = platform_alone() if files is None else files.run(platform_alone, say, admin_token)
    if run(until_stopped(work, let_leave, say)):
        kill_runs(layout, platform)
    return 0


def _described(layout: PlatformLayout, platform: LocalPlatform, files: LocalStorage | None) -> str:
    from fireflyer.cluster.client import read_connection

    where = os.path.relpath(layout.directory)
    option = "" if where == DEFAULT_DIRECTORY else f" --platform {quote(where)}"
    manager = read_connection(layout.connection_file).url
    return (
        f"The platform is up: {counted(platform.nodes, 'node')}, manager at {manager}.\n"
        f"{_described_storage(files)}"
        f"  submit: ff submit{option} --nodes {min(2, platform.nodes)} train.py\n"
        f"  show:   ff status{option} · ff ps{option}\n"
        f"  stop:   {_down(layout)}\n"
    )


def _down(layout: PlatformLayout) -> str:
    where = os.path.relpath(layout.directory)
    return "ff down" if where == DEFAULT_DIRECTORY else f"ff down --dir {quote(where)}"


def _described_storage(files: LocalStorage | None) -> str:
    if files is None or files.status is None:
        return ""
    alive = sum(node.alive for node in files.status.nodes)
    return (
        f"The file system is up: {alive} of {len(files.status.nodes)} nodes, {len(files.status.chains)} chains of "
        f"{files.cluster.replicas} replicas; tasks reach it as ff:///.\n"
    )
