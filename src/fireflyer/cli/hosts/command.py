"""`ff host`: all processes of one host, from the cluster file, which is the same on all hosts."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from fireflyer.cli.completion import complete_file
from fireflyer.cli.detached import own_say
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.units import print_unit, unit_option

if TYPE_CHECKING:
    from fireflyer.cli.hosts.config import ClusterFile, HostConfig
    from fireflyer.cluster.manager.config import PlatformConfig

__all__ = ["command"]

MAX_ID = (1 << 63) - 1
MAX_MANAGERS = 64
UNIT_SETTINGS = """\
ExecReload=/bin/kill -HUP $MAINPID
TimeoutStartSec=infinity
# A restart is none of the ranks that the agent has started: their guards stay, and the next agent adopts them.
KillMode=process
OOMPolicy=continue
Delegate=yes
TasksMax=infinity
"""


@click.group("host", cls=OrderedGroup, short_help="Run all processes of a host of a cluster.", epilog="""\b
Examples:
  ff host new-file --from up.toml cluster.toml a b c  # write a file, from that of ff up
  ff host show /etc/fireflyer/cluster.toml            # what this host is to run
  ff host run /etc/fireflyer/cluster.toml             # run it, or by systemd: --unit system
  ff host new-admin ops /etc/fireflyer/cluster.toml""")  # fmt: skip
def command() -> None:
    """A cluster file names the hosts of a cluster and what each of them runs: managers, meta services, storage
    processes, agents. The same file lies on all hosts, and the same command starts on each what it has to run."""


def _of_host(function: Callable[..., int]) -> Callable[..., int]:
    """`FILE` and `--name`; the command gets `read`, which reads the file."""

    @click.option("--name", metavar="NAME", help="Host of FILE.  [default: host name of this machine]")
    @click.argument("file", metavar="FILE", shell_complete=complete_file)
    @functools.wraps(function)
    def call(*args: object, file: str, name: str | None, **options: object) -> int:
        from fireflyer.cli.hosts.config import read_cluster_file

        def read() -> tuple[ClusterFile, HostConfig]:
            cluster = read_cluster_file(file)
            return cluster, cluster.host(name or socket.gethostname().partition(".")[0])

        return function(*args, read=read, **options)

    return call


@command.command("run", short_help="Run them, and start again what dies.",
                 epilog="Example: ff host run /etc/fireflyer/cluster.toml")  # fmt: skip
@unit_option
@_of_host
def run_command(*, read: Callable[[], tuple[ClusterFile, HostConfig]], unit: str | None) -> int:
    """Run the processes of this host in the foreground, until SIGTERM or Ctrl-C. New targets are made and registered
    first. It prints a line for each process that serves, and `ready` when all do. Processes have their logs in
    subdirectories of the cluster's directory.

    SIGHUP (`systemctl reload`): FILE is read again, and what has changed is started anew."""
    from fireflyer.base.errors import Busy
    from fireflyer.cli.hosts.processes import processes_of
    from fireflyer.cli.hosts.run import HostDirectory, run_host
    from fireflyer.runtime import run
    from fireflyer.runtime.processes.run_lock import RunLock
    from fireflyer.runtime.processes.service_manager import ServiceManager

    cluster, host = read()
    processes_of(cluster, host)  # a wrong setting is said at once
    if unit is not None:
        return print_unit(
            unit, name="fireflyer", what=f"processes of host {host.name}", words=("host", "run", "--name", host.name),
            config=click.get_current_context().params["file"], settings=UNIT_SETTINGS,
        )  # fmt: skip
    directory = HostDirectory(cluster.directory)
    directory.make()
    service_manager = ServiceManager()

    def ready() -> None:
        click.echo("ready")
        service_manager.ready()

    async def until_stopped() -> None:
        loop = asyncio.get_running_loop()
        working = loop.create_task(run_host(read, say=own_say(), on_ready=ready))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            pass

    try:
        lock = RunLock(directory.lock_file)
    except Busy:
        raise Busy(f"another `ff host run` has {cluster.directory} already; end that one first") from None
    with lock:
        run(until_stopped())
    return 0


@command.command("show", short_help="Show what a host runs.", epilog="Example: ff host show cluster.toml")
@_of_host
def show_command(*, read: Callable[[], tuple[ClusterFile, HostConfig]]) -> int:
    """Check FILE, and show the processes of this host, each with its command; then how commands reach the file system,
    and its manager of the platform, once that has run. Nothing is started."""
    from fireflyer.cli.hosts.processes import platform_config, processes_of
    from fireflyer.cli.jobs.hosts import columns

    cluster, host = read()
    rows = [(one.name, f"ff {' '.join(one.arguments)}") for one in processes_of(cluster, host)]
    click.echo(columns([("PROCESS", "COMMAND"), *rows]))
    click.echo(f"\nfiles: export FIREFLYER_FS={cluster.target}")
    if host.manager:
        config = platform_config(cluster, host)
        fingerprint = _fingerprint(config)
        click.echo(f"platform: ff login {config.advertise}{fingerprint and f' --fingerprint {fingerprint}'}")
    return 0


def _fingerprint(config: PlatformConfig) -> str:
    """Of the certificate that the manager has made; empty: it has none yet, or one of the site."""
    from fireflyer.cluster.manager.web.tls import certificate_of

    if config.tls_certificate or not os.path.exists(os.path.join(config.directory, "tls.crt")):
        return ""
    return certificate_of(config.directory, ()).fingerprint


@command.command("new-file", short_help="Write a cluster file, from the file of `ff up`.", epilog="""\b
Examples:
  ff host new-file cluster.toml a b c
  ff host new-file --from up.toml cluster.toml a=10.0.0.1 b=10.0.0.2 c=10.0.0.3""")  # fmt: skip
@click.option("--from", "up_file", metavar="UP", shell_complete=complete_file,
              help="File of `ff up` whose settings come along.  [default: none]")  # fmt: skip
@click.option("--managers", metavar="N", type=WholeNumber(1, MAX_MANAGERS),
              help="The first N hosts have a manager.  [default: 2, or 1 of one host]")  # fmt: skip
@click.argument("file", metavar="FILE", shell_complete=complete_file)
@click.argument("hosts", metavar="HOST...", nargs=-1, required=True)
def new_file_command(*, file: str, hosts: tuple[str, ...], up_file: str | None, managers: int | None) -> int:
    """Write the cluster file FILE for the machines HOST: each a name, or NAME=ADDRESS where others do not reach it by
    its name. Lines marked DECIDE are for you to change; what UP says that one machine alone can have is listed. FILE
    must not be there."""
    from fireflyer.cli.hosts.from_up import cluster_file, parse_host
    from fireflyer.cli.new_file import new_file
    from fireflyer.cli.platform.up import read_up_file

    made = cluster_file(
        read_up_file(up_file),
        [parse_host(host) for host in hosts],
        managers=managers or min(2, len(hosts)),
        cluster=secrets.token_hex(16),
        source=os.path.basename(up_file or ""),
    )
    with new_file(file) as out:
        out.write(made.text.encode())
    if made.left_out:
        click.echo("\n".join((f"Not in {file}:", *(f"  {line}" for line in made.left_out))))
    lines = f"{made.to_decide} lines of {file} are marked DECIDE: change them"
    click.echo(f"{lines}; then: ff host show --name {hosts[0].partition('=')[0]} {file}")
    return 0


@command.command("new-admin", short_help="Make the first administrator.",
                 epilog="Example: ff host new-admin ops cluster.toml")  # fmt: skip
@click.argument("user", metavar="USER")
@_of_host
def new_admin_command(*, read: Callable[[], tuple[ClusterFile, HostConfig]], user: str) -> int:
    """Make USER an administrator of the platform and of the file system, and print a token for them. Do it on a host
    with a manager; managers may run meanwhile, and need not."""
    from fireflyer.cli.hosts.processes import platform_config
    from fireflyer.cluster.manager.administrators import new_administrator
    from fireflyer.fs.service.rights import FS_ADMIN

    config = platform_config(*read())
    click.echo(asyncio.run(new_administrator(config, user, roles=(FS_ADMIN,))))
    return 0


@command.command("make-target", short_help="Make a target anew, on a new disk.",
                 epilog="Example: ff host make-target 1002 cluster.toml")  # fmt: skip
@click.argument("target", metavar="TARGET", type=WholeNumber(1, MAX_ID))
@_of_host
def make_target_command(*, read: Callable[[], tuple[ClusterFile, HostConfig]], target: int) -> int:
    """Make the directory of TARGET, an id in FILE, anew where its disk was replaced: it must be empty or missing.
    The storage process of this host is started again, and the target is synced from the other replicas."""
    from fireflyer.base.errors import NotFound
    from fireflyer.cli.hosts.run import HostDirectory
    from fireflyer.runtime.processes.run_lock import signal_holder

    cluster, host = read()
    there = HostDirectory(cluster.directory)
    made = there.make_again(cluster, host, target)
    try:
        signal_holder(there.lock_file, signal.SIGHUP)
        then = "the storage process is started again"
    except NotFound:
        then = "start the host: ff host run"
    click.echo(f"Target {target} is made anew in {made}; {then}.")
    return 0
