"""`ff fs up` and `ff fs down`: a cluster whose processes run on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from shlex import quote
from typing import TYPE_CHECKING, Final

import click
import msgspec

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cli.detached import own_say, report, run_detached
from fireflyer.cli.fs.connect import DEFAULT_DIRECTORY
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.fs.schema.manager import Status
    from fireflyer.fs.service.local.layout import Layout, LocalCluster
    from fireflyer.runtime.processes.run_lock import RunLock

__all__ = ["down_command", "up_command"]

MAX_NODES: Final = 64
MAX_TARGETS: Final = 999
DOWN_S: Final = 30.0
UP_LOG: Final = "up.log"


@click.command(
    "up",
    short_help="Start a file system on this machine.",
    epilog="Example: ff fs up --dir fs --nodes 3 --replicas 2 -d",
)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Directory for all data, configurations and logs of the cluster.",
)
@click.option(
    "--nodes", metavar="N", type=WholeNumber(min=1, max=MAX_NODES), help="Number of storage processes.  [default: 3]"
)
@click.option(
    "--replicas", metavar="K", type=WholeNumber(min=1, max=8), help="Number of replicas of each chunk.  [default: 2]"
)
@click.option(
    "--targets-per-node",
    metavar="N",
    type=WholeNumber(min=1, max=MAX_TARGETS),
    help="Number of target directories of each node; each target is in one chain.  [default: 4]",
)
@click.option(
    "--managers",
    metavar="N",
    type=WholeNumber(min=1, max=9),
    help="Number of manager processes; more than 1 need --store.  [default: 1]",
)
@click.option(
    "--store",
    metavar="URL",
    help="Database for the metadata: postgresql://user@host/database.  [default: embedded in DIR, for one manager]",
)
@click.option(
    "--relaxed/--durable",
    default=None,
    help="Acknowledge writes before or after they are on disk; --relaxed is faster and loses the last writes "
    "in a power failure. Can be changed at each start.  [default: durable]",
)
@click.option(
    "--failure-timeout",
    metavar="SECONDS",
    type=float,
    help="A node without a heartbeat for this long counts as failed; 0.1 to 3600.  [default: 6]",
)
@click.option(
    "-d", "--detach", is_flag=True, help="Return when the cluster serves; `ff fs down` stops it. Log: DIR/up.log."
)
@click.option("--report-fd", type=int, hidden=True)
def up_command(
    *,
    directory: str,
    nodes: int | None,
    replicas: int | None,
    targets_per_node: int | None,
    managers: int | None,
    store: str | None,
    relaxed: bool | None,
    failure_timeout: float | None,
    detach: bool,
    report_fd: int | None,
) -> int:
    """Start manager and storage processes on this machine, and run them until Ctrl-C or `ff fs down`. A process that
    dies is started again.

    A new or empty DIR becomes a new cluster with these options. If DIR holds a cluster, it is started with its data;
    options may then be left out, and must be the same if given.
    """
    from fireflyer.fs.service.local.layout import Layout, new_cluster
    from fireflyer.runtime.processes.run_lock import RunLock

    if not directory:
        raise UsageError("--dir is empty; give the directory of the cluster")
    if failure_timeout is not None and not 0.1 <= failure_timeout <= 3600:
        raise UsageError(f"--failure-timeout {failure_timeout}: give 0.1 to 3600 seconds")
    layout = Layout(directory)
    if layout.exists() and layout.load().accounts:  # before its lock: who holds that is ended by `ff down`
        raise UsageError(
            f"{layout.directory} belongs to a platform, whose users it has; start both: ff up --dir "
            f"{quote(os.path.dirname(layout.directory))}"
        )
    layout.make_directory()
    if detach:
        return run_detached(sys.argv[1:], os.path.join(layout.directory, UP_LOG))
    with RunLock(layout.lock_file) as lock:
        wanted = {"nodes": nodes, "replicas": replicas, "targets-per-node": targets_per_node, "managers": managers}
        if layout.exists():
            cluster = layout.load()
            _check_same(layout, cluster, wanted, store, failure_timeout)
            if relaxed is not None and cluster.durable == relaxed:
                cluster = msgspec.structs.replace(cluster, durable=not relaxed)
                layout.save(cluster)
        else:
            cluster = new_cluster(
                nodes=nodes or 3,
                replicas=replicas or 2,
                targets_per_node=targets_per_node or 4,
                managers=managers or 1,
                store=store or "",
                durable=not relaxed,
                failure_timeout_ms=int((failure_timeout or 6) * 1000),
            )
            layout.make_secret()
            layout.save(cluster)
        return _run(layout, cluster, lock, report_fd)


def _check_same(
    layout: Layout,
    cluster: LocalCluster,
    wanted: dict[str, int | None],
    store: str | None,
    failure_timeout: float | None,
) -> None:
    """What is there is not changed by `up`."""
    there = {
        "nodes": len(cluster.nodes),
        "replicas": cluster.replicas,
        "targets-per-node": len(cluster.nodes[0].targets) if cluster.nodes else 0,
        "managers": len(cluster.managers),
    }
    never_ran = any(address.endswith(":0") for address in cluster.managers)
    advice = "leave the option out" + (f", or remove {layout.directory}: it has never run" if never_ran else "")
    for option, value in wanted.items():
        if value is not None and value != there[option]:
            raise UsageError(
                f"--{option} {value}: {layout.directory} holds a cluster with {there[option]}; {advice}"
                + (", and add nodes with 'ff fs admin add-node'" if option == "nodes" else "")
            )
    if store is not None and store != cluster.store:
        raise UsageError(f"--store: {layout.directory} holds a cluster that uses another store; {advice}")
    there_s = cluster.failure_timeout_ms / 1000
    if failure_timeout is not None and int(failure_timeout * 1000) != cluster.failure_timeout_ms:
        raise UsageError(
            f"--failure-timeout {failure_timeout:g}: {layout.directory} holds a cluster with {there_s:g} s, which "
            f"cannot be changed; {advice}"
        )


def _run(layout: Layout, cluster: LocalCluster, lock: RunLock, report_fd: int | None) -> int:
    from fireflyer.fs.service.local.run import run_local
    from fireflyer.runtime import run

    def on_up(running: LocalCluster, status: Status) -> None:
        text = _described(layout, running, status)
        report(report_fd, text)
        if report_fd is None:
            click.echo("Ctrl-C stops it.")

    async def until_stopped() -> None:
        loop = asyncio.get_running_loop()
        working = loop.create_task(run_local(layout, cluster, lock=lock, say=own_say(), on_up=on_up))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            pass

    run(until_stopped())
    return 0


def _described(layout: Layout, cluster: LocalCluster, status: Status) -> str:
    from fireflyer.cli.fs.status import summary_of

    where = quote(os.path.relpath(layout.directory))
    alive = sum(node.alive for node in status.nodes)
    found = summary_of(status)
    trouble = "" if found.whole == found.chains else f"{found.readable} available, {found.whole} fully replicated, "
    return (
        f"The file system is up: {alive} of {len(status.nodes)} nodes, {len(status.chains)} chains of "
        f"{cluster.replicas} replicas, {trouble}manager at {', '.join(cluster.managers)}.\n"
        f"  show:  ff fs status --dir {where}\n"
        f"  stop:  ff fs down --dir {where}\n"
        f"  mount: ff fs mount PLACE --dir {where}\n"
        + (
            ""
            if cluster.durable
            else "  --relaxed: writes are acknowledged before they are on disk, until `ff fs up --durable`\n"
        )
    )


@click.command("down", short_help="Stop what `ff fs up` started.", epilog="Example: ff fs down --dir fs")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Directory that was given to `ff fs up`.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Kill the processes at once instead of waiting for them; acknowledged writes are kept.",
)
def down_command(*, directory: str, force: bool) -> int:
    """Stop the processes of the cluster in DIR, whether or not it was started with --detach. Its data stay; `ff fs up`
    starts it again."""
    from fireflyer.cluster.local.layout import PlatformLayout
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.runtime.processes.run_lock import end_holder, seems_held

    layout = Layout(directory)
    try:
        layout.load()
    except NotFound:
        raise NotFound(f"{layout.directory} holds no cluster; give the directory of `ff fs up` with --dir") from None
    platform = PlatformLayout(os.path.dirname(layout.directory))
    if layout.directory == platform.storage_directory and seems_held(platform.lock_file):
        raise UsageError(
            f"{layout.directory} belongs to a platform that runs; end both: ff down --dir "
            f"{quote(os.path.relpath(platform.directory))}"
        )
    pid = end_holder(layout.lock_file, timeout_s=DOWN_S, force=force)
    click.echo(f"The file system in {quote(os.path.relpath(layout.directory))} (process {pid}) has stopped.")
    return 0
