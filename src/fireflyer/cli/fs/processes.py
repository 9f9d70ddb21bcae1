"""`ff fs manager` and `ff fs storage`: one process of a cluster, as a service manager or `ff fs up` starts it."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cli.toml_files import read_toml
from fireflyer.cli.units import print_unit, unit_option

__all__ = ["READY", "log_option", "manager_command", "read_config", "run_process", "storage_command"]

MAX_DESCRIPTORS: Final = 1 << 16
READY: Final = "ready "
"""Before the address, in the one line that a process prints on standard output when it serves."""

C = TypeVar("C", bound=msgspec.Struct)


def read_config(path: str, config_type: type[C]) -> C:
    """Raises `UsageError`: one line that names the file and what is wrong in it."""
    return read_toml(path, config_type, name="configuration", advice="give the TOML file that configures this process")


def log_option(function: click.decorators.FC) -> click.decorators.FC:
    return click.option(
        "--log",
        "log_file",
        metavar="FILE",
        help="Write the log to FILE and rotate it: 8 MiB, and three older files.  [default: standard error]",
    )(function)


@click.command(
    "manager", short_help="Run a cluster manager.", epilog="Example: ff fs manager /etc/fireflyer/manager.toml"
)
@log_option
@unit_option
@click.argument("config_file", metavar="CONFIG")
def manager_command(*, config_file: str, log_file: str | None, unit: str | None) -> int:
    """Run a cluster manager in the foreground, configured by the TOML file CONFIG, until SIGTERM or Ctrl-C. It prints
    `ready HOST:PORT` when it serves."""
    from fireflyer.fs.client.chunk_session import open_chunk_session
    from fireflyer.fs.service.manager.config import ManagerConfig
    from fireflyer.fs.service.manager.process import run_manager

    config = read_config(config_file, ManagerConfig)
    if unit is not None:
        return print_unit(
            unit, name="fireflyer-fs-manager", what="cluster manager of 3FS", words=("fs", "manager"),
            config=config_file, log_file=log_file,
        )  # fmt: skip
    return run_process(
        lambda on_ready: run_manager(config, on_ready=on_ready, open_chunks=open_chunk_session), log_file
    )


@click.command(
    "storage", short_help="Run a storage process.", epilog="Example: ff fs storage /etc/fireflyer/storage.toml"
)
@click.option(
    "--make-targets",
    is_flag=True,
    help="First create the target directories that CONFIG names; they must be missing or empty.",
)
@log_option
@unit_option
@click.argument("config_file", metavar="CONFIG")
def storage_command(*, config_file: str, make_targets: bool, log_file: str | None, unit: str | None) -> int:
    """Run a storage process in the foreground, configured by the TOML file CONFIG, until SIGTERM or Ctrl-C. It prints
    `ready HOST:PORT` when it serves."""
    from fireflyer.fs.service.storage.config import StorageConfig
    from fireflyer.fs.service.storage.process import run_storage

    config = read_config(config_file, StorageConfig)
    if unit is not None:
        if make_targets:
            raise UsageError("--make-targets is for one start by hand, not for a unit; leave it out")
        return print_unit(
            unit, name="fireflyer-fs-storage", what="storage process of 3FS", words=("fs", "storage"),
            config=config_file, log_file=log_file,
        )  # fmt: skip
    if make_targets:
        from fireflyer.fs.service.storage.target_directory import make_target

        for target in config.targets:
            make_target(target.directory, config.cluster, target.id, root_disk=config.root_disk)
    return run_process(lambda on_ready: run_storage(config, on_ready=on_ready), log_file)


def run_process(main: Callable[[Callable[[str], None]], Coroutine[Any, Any, None]], log_file: str | None = None) -> int:
    """Runs until SIGTERM or SIGINT, upon which it is cancelled: then 0. `log_file`: of the log, if not standard
    error."""
    from fireflyer.runtime import run
    from fireflyer.runtime.processes.service_manager import ServiceManager
    from fireflyer.runtime.service_log import open_log, start_logging

    _allow_descriptors()
    service_manager = ServiceManager()
    start_logging(None if log_file is None else open_log(log_file))

    def ready(address: str) -> None:
        click.echo(f"{READY}{address}")
        service_manager.ready()

    async def until_stopped() -> None:
        loop = asyncio.get_running_loop()
        working = loop.create_task(main(ready))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            pass

    run(until_stopped())
    return 0


def _allow_descriptors() -> None:
    """As many as the administrator allows: each client has a connection, and 1024, the usual soft limit, are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
