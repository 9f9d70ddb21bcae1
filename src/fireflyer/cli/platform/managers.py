"""`ff manager`: a manager process of the platform; backup of what managers keep, its restore; sizes of the history."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, SECOND, format_bytes, format_duration
from fireflyer.cli.completion import complete_file
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.new_file import new_file
from fireflyer.cli.units import print_unit, unit_option

if TYPE_CHECKING:
    from fireflyer.cluster.manager.config import PlatformConfig
    from fireflyer.kvstore import Engine

__all__ = ["manager_command"]

_T = TypeVar("_T")


class _Manager(OrderedGroup):
    """`ff manager CONFIG` is `ff manager run CONFIG`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if named else ["run", *args])


@click.group("manager", cls=_Manager, short_help="Run a manager of the platform; back up what managers keep.",
             epilog="""\b
Examples:
  ff manager /etc/fireflyer/platform.toml
  ff manager backup /etc/fireflyer/platform.toml platform.backup
  ff manager sizes /etc/fireflyer/platform.toml""")  # fmt: skip
def manager_command() -> None:
    """Run a manager of the platform (`ff manager CONFIG`), back up what managers keep, restore it, show the sizes of
    the history's tables."""


@manager_command.command("run", short_help="Run a manager; `run` may be left out.",
                         epilog="Example: ff manager run /etc/fireflyer/platform.toml")  # fmt: skip
@click.option("--new-admin", metavar="NAME", help="Make NAME an administrator, print a token for them, and end.  "
              "[default: run the manager]")  # fmt: skip
@unit_option
@click.argument("config_file", metavar="CONFIG", shell_complete=complete_file)
def run_command(*, config_file: str, new_admin: str | None, unit: str | None) -> int:
    """Run a manager in the foreground, configured by the TOML file CONFIG, until SIGTERM or Ctrl-C. It prints `ready
    URL HOST:PORT [FINGERPRINT]` when it serves; its log is standard error. What changes in `[health]` of CONFIG is
    applied within seconds, at once upon SIGHUP; the rest counts when the manager starts again.

    The first administrator of a cluster is made with --new-admin, by who may read CONFIG and open its store; an
    embedded store has one process at a time, so its manager must not run."""
    from fireflyer.cli.platform_extra import need_platform_extra

    need_platform_extra()
    config = _config(config_file)
    if new_admin is not None:
        from fireflyer.cluster.manager.administrators import new_administrator

        click.echo(asyncio.run(new_administrator(config, new_admin)))
        return 0
    if unit is not None:
        return print_unit(
            unit, name="fireflyer-manager", what="manager of the platform", words=("manager", "run"), config=config_file
        )
    from fireflyer.cli.fs.processes import run_process
    from fireflyer.cluster.manager.health_reload import HealthReload
    from fireflyer.cluster.manager.process import run_platform_manager

    reload = HealthReload(config_file, _config, config)
    return run_process(lambda on_ready: run_platform_manager(config, on_ready=on_ready, reload=reload))


@manager_command.command("backup", short_help="Write tasks, nodes and machines to a file.",
                         epilog="Example: ff manager backup /etc/fireflyer/platform.toml platform.backup")  # fmt: skip
@click.argument("config_file", metavar="CONFIG", shell_complete=complete_file)
@click.argument("file", metavar="FILE", shell_complete=complete_file)
def backup_command(*, config_file: str, file: str) -> int:
    """Write what the managers of CONFIG keep in their store to the new file FILE, which only its owner may read: it has
    keys of machines. Managers over PostgreSQL go on meanwhile; a manager with an embedded store must be stopped."""
    from fireflyer.cluster.manager.backup import back_up

    config = _config(config_file)
    with new_file(file) as out:
        rows = _on(config, functools.partial(back_up, file=out), make=False)
    click.echo(f"{rows} rows in {file}")
    return 0


@manager_command.command("restore", short_help="Read such a file into an empty store.",
                         epilog="Example: ff manager restore /etc/fireflyer/platform.toml platform.backup")  # fmt: skip
@click.argument("config_file", metavar="CONFIG", shell_complete=complete_file)
@click.argument("file", metavar="FILE", shell_complete=complete_file)
def restore_command(*, config_file: str, file: str) -> int:
    """Read FILE, which `ff manager backup` wrote, into the empty store of CONFIG. All of FILE is checked before any of
    it is written. End all managers of the old store first. Tasks that were submitted after the backup are lost."""
    from fireflyer.cluster.manager.backup import restore

    config = _config(config_file)
    hold_ns = (config.stop_after_ms + config.stop_slack_ms) * MS
    try:
        source = open(file, "rb")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    with source:
        rows = _on(config, functools.partial(restore, file=source, now_ns=time.time_ns(), hold_ns=hold_ns))
    click.echo(f"{rows} rows restored; start the managers now. They start runs in {format_duration(hold_ns)} at the "
               "earliest: until then those that were started after the backup have ended.")  # fmt: skip
    return 0


@manager_command.command("sizes", short_help="Show how large the tables of the history are.",
                         epilog="Example: ff manager sizes /etc/fireflyer/platform.toml")  # fmt: skip
@click.argument("config_file", metavar="CONFIG", shell_complete=complete_file)
def sizes_command(*, config_file: str) -> int:
    """Show how many rows each table of the history of CONFIG has, how old they are, how long they are kept, and how
    many were removed. Managers may run meanwhile. `[history_keep]` of CONFIG says what is kept."""
    from fireflyer.cluster.core.platform.store.retention import DAY_NS
    from fireflyer.cluster.history.sizes import measured_at
    from fireflyer.cluster.manager.config import history_url

    config = _config(config_file)
    url = history_url(config)
    if not url:
        raise UsageError(f'{config_file} says history = "none", so there are no tables; leave it out to keep a history')
    sizes = asyncio.run(measured_at(url))
    rows = [("TABLE", "ROWS", "OLDEST", "KEPT", "REMOVED")]
    for name, size in sizes.tables.items():
        oldest = "-" if size.oldest_ns is None else time.strftime("%Y-%m-%d", time.localtime(size.oldest_ns / SECOND))
        days = config.history_keep.keep_ns(name) // DAY_NS
        rows.append((name, str(size.rows), oldest, f"{days}d", str(size.removed)))
    click.echo(columns(rows))
    click.echo(f"{format_bytes(sizes.size_bytes)} in all; at most {config.history_keep.rows} rows in each table")
    return 0


def _config(path: str) -> PlatformConfig:
    from fireflyer.cli.fs.processes import read_config
    from fireflyer.cluster.manager.config import PlatformConfig

    return read_config(path, PlatformConfig)


def _on(config: PlatformConfig, work: Callable[[Engine], Awaitable[_T]], *, make: bool = True) -> _T:
    from fireflyer import kvstore
    from fireflyer.runtime import run

    async def whole() -> _T:
        async with await kvstore.open(config.store, make=make) as engine:
            return await work(engine)

    return run(whole())
