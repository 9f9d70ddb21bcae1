"""`ff up`, `ff down`, `ff login`: the platform's processes, and how this user reaches it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from shlex import quote
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.detached import own_say, report, run_detached
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.platform.connect import DEFAULT_DIRECTORY, connection_path

if TYPE_CHECKING:
    from fireflyer.cluster.client import ManagerAddress
    from fireflyer.cluster.local.config import UpConfig
    from fireflyer.cluster.local.layout import LocalPlatform, PlatformLayout
    from fireflyer.runtime.processes.run_lock import RunLock

__all__ = ["down_command", "login_command", "up_command"]

DOWN_S: Final = 60.0
_MAX_TOKEN_BYTES: Final = 256


@click.command("up", short_help="Start the platform on this machine.", epilog="""\b
Examples:
  ff up --nodes 4 -d                 a manager and 4 agents, in the background
  ff submit --nodes 2 train.py       then hand it tasks
  ff up --print-config > up.toml     all settings; then: ff up up.toml -d
  ff down                            stop it""")  # fmt: skip
@click.option("--dir", "directory", metavar="DIR", shell_complete=complete_directory,
              help="Where it keeps everything; made if absent.  [default: as FILE says, or platform]")  # fmt: skip
@click.option("--nodes", metavar="N", type=WholeNumber(1, 256), help="Agents, each of which counts as a node.  "
              "[default: as FILE says, or as many as DIR has, or 4]")  # fmt: skip
@click.option("--zones", metavar="N", type=WholeNumber(1, 256), help="Zones of the network among which they are "
              "shared out, to try placement.  [default: as FILE says, or 1]")  # fmt: skip
@click.option("--guarantee", metavar="TIME", type=Duration(), help="How long a run is not interrupted.  [default: as "
              "FILE says, or not at all; `ff manager` has 2h]")  # fmt: skip
@click.option("-d", "--detach", is_flag=True, help="Return when it is up; it goes on in the background.")
@click.option("--print-config", is_flag=True, help="Print a FILE with all settings and their defaults, and end.")
@click.option("--report-fd", type=int, hidden=True)
@click.argument("file", metavar="[FILE]", required=False, shell_complete=complete_file)
def up_command(
    *,
    file: str | None,
    directory: str | None,
    nodes: int | None,
    zones: int | None,
    guarantee: int | None,
    detach: bool,
    print_config: bool,
    report_fd: int | None,
) -> int:
    """Start a manager and agents on this machine, for one user: to try the platform, or for a machine of one's own. A
    cluster has `ff manager` on one or several machines and `ff agent run` on each node.

    FILE is a TOML file with settings; options come before what it says."""
    import sys

    from fireflyer.cluster.local import run as _whole  # noqa: F401, before anything is made: it needs packages
    from fireflyer.cluster.local.config import DEFAULTS
    from fireflyer.cluster.local.layout import PlatformLayout, new_platform
    from fireflyer.runtime.processes.run_lock import RunLock

    if print_config:
        click.echo(DEFAULTS, nl=False)
        return 0
    wanted = _read(file)
    if guarantee is not None:
        wanted = wanted.guaranteeing(guarantee)
    layout = PlatformLayout(directory or wanted.directory)
    layout.make_directory()
    if detach:
        return run_detached(sys.argv[1:], os.path.join(layout.directory, "up.log"))
    with RunLock(layout.lock_file, "ff") as lock:
        if layout.exists():
            platform = layout.load()
            _check_same(layout, platform, nodes, zones)
            platform = _changed(layout, platform, wanted, nodes)
        else:
            platform = new_platform(nodes or wanted.agents or 4, zones or wanted.zones or 1, guarantee or 0)
        layout.save(platform)
        layout.make_secret()
        return _run(layout, platform, wanted, lock, report_fd)


def _read(file: str | None) -> UpConfig:
    """Raises `UsageError`."""
    from fireflyer.cli.toml_files import read_toml
    from fireflyer.cluster.local.config import UpConfig, keys_at

    if file is None:
        return UpConfig()
    try:
        return read_toml(file, UpConfig, name="FILE", advice="write one: ff up --print-config > FILE").beside(file)
    except UsageError as error:
        message = error.message.replace(" | null", "")  # which TOML does not have
        if "unknown field" in message:
            place = re.search(r"at `([^`]*)`", message)
            message += f"; keys there are {keys_at(place[1] if place is not None else '$')}"
        raise UsageError(message) from None


def _changed(layout: PlatformLayout, there: LocalPlatform, wanted: UpConfig, nodes: int | None) -> LocalPlatform:
    """With what a file changes of a platform that is there. Raises `UsageError`."""
    import msgspec

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


def _run(
    layout: PlatformLayout, platform: LocalPlatform, wanted: UpConfig, lock: RunLock, report_fd: int | None
) -> int:
    from fireflyer.cluster.local.run import run_local_platform
    from fireflyer.runtime import run

    def on_up(running: LocalPlatform) -> None:
        report(report_fd, _described(layout, running))
        if report_fd is None:
            click.echo("Ctrl-C stops it.")

    async def until_stopped() -> None:
        loop = asyncio.get_running_loop()
        working = loop.create_task(
            run_local_platform(layout, platform, wanted=wanted, lock=lock, say=own_say(), on_up=on_up)
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            pass

    run(until_stopped())
    return 0


def _described(layout: PlatformLayout, platform: LocalPlatform) -> str:
    from fireflyer.cluster.local.layout import read_connection

    where = os.path.relpath(layout.directory)
    option = "" if where == DEFAULT_DIRECTORY else f" --platform {quote(where)}"
    down = "" if where == DEFAULT_DIRECTORY else f" --dir {quote(where)}"
    return (
        f"The platform is up: {platform.nodes} nodes, manager at {read_connection(layout.connection_file).url}.\n"
        f"  submit: ff submit{option} --nodes 2 train.py\n"
        f"  show:   ff ps{option} · ff nodes{option}\n"
        f"  stop:   ff down{down}\n"
    )


@click.command("down", short_help="Stop what `ff up` started.", epilog="Example: ff down")
@click.option("--dir", "directory", metavar="DIR", shell_complete=complete_directory,
              help="Directory that was given to `ff up`.  [default: as FILE says, or platform]")  # fmt: skip
@click.option("--force", is_flag=True, help="Kill the processes at once instead of waiting for them.")
@click.argument("file", metavar="[FILE]", required=False, shell_complete=complete_file)
def down_command(*, file: str | None, directory: str | None, force: bool) -> int:
    """Stop the manager and the agents of DIR, or of the FILE that was given to `ff up`. Tasks stay, and go on when `ff
    up` is given again: runs that last longer than the agents wait for a manager are stopped and queued again."""
    from fireflyer.cluster.local.layout import PlatformLayout
    from fireflyer.runtime.processes.run_lock import end_holder

    layout = PlatformLayout(directory or _read(file).directory)
    try:
        layout.load()
    except NotFound:
        raise NotFound(f"{layout.directory} holds no platform; give the directory of `ff up` with --dir") from None
    pid = end_holder(layout.lock_file, timeout_s=DOWN_S, force=force, commands="ff")
    click.echo(f"The platform in {quote(os.path.relpath(layout.directory))} (process {pid}) has stopped.")
    return 0


@click.command("login", short_help="Remember where the platform is, and your token.",
               epilog="Example: ff login https://head:9440 --fingerprint 3f1c…")  # fmt: skip
@click.option("--fingerprint", "fingerprints", metavar="SHA256", multiple=True, help="Of the manager's certificate, as "
              "its log says it; repeat it for each URL, in their order. Not needed where certificates are signed for "
              "the managers' names.")  # fmt: skip
@click.option("--token-file", metavar="FILE", default="-", shell_complete=complete_file,
              help="File with your token; -: standard input.  [default: -]")  # fmt: skip
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
def login_command(*, urls: tuple[str, ...], fingerprints: tuple[str, ...], token_file: str) -> int:
    """Ask the platform at URL who you are, and keep URL and token for the other commands, in a file that only you may
    read. Where several managers share a platform, give the URL of each: commands then find the one that leads."""
    import sys

    import msgspec

    from fireflyer.cluster.client import Client, Connection
    from fireflyer.identity.private_files import read_private_file, write_private_file

    first, *others = _managers(urls, fingerprints)
    if token_file == "-":  # noqa: S105
        if sys.stdin.isatty():
            click.echo("token: ", nl=False, err=True)
        token = sys.stdin.readline(_MAX_TOKEN_BYTES + 1).strip()
    else:
        token = read_private_file(token_file, _MAX_TOKEN_BYTES).decode(errors="replace").strip()
    connection = Connection(url=first.url, token=token, fingerprint=first.fingerprint, others=tuple(others))
    with Client(connection) as client:
        who = client.whoami()
    path = connection_path()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    write_private_file(path, msgspec.json.encode(connection) + b"\n")
    click.echo(f"logged in as {who.user}; kept in {path}")
    return 0


def _managers(urls: tuple[str, ...], fingerprints: tuple[str, ...]) -> list[ManagerAddress]:
    """Raises `UsageError`."""
    from fireflyer.cluster.client import MAX_MANAGERS, ManagerAddress

    if len(urls) > MAX_MANAGERS:
        raise UsageError(f"{len(urls)} managers are more than {MAX_MANAGERS}; name fewer of them")
    if fingerprints and len(fingerprints) != len(urls):
        raise UsageError(
            f"{len(fingerprints)} fingerprints for {len(urls)} managers; give --fingerprint once for each URL, or never"
        )
    return [
        ManagerAddress(url=url.rstrip("/"), fingerprint=fingerprint.replace(":", "").lower())
        for url, fingerprint in zip(urls, fingerprints or [""] * len(urls), strict=True)
    ]
