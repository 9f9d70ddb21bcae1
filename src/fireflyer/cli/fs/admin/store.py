"""`ff fs admin fsck`, `dump`, `load`: the metadata of a stopped cluster."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

import click

from fireflyer.base.errors import PermanentError, UsageError
from fireflyer.cli.fs.connect import CLUSTER_HELP, directory_of
from fireflyer.cli.new_file import new_file

if TYPE_CHECKING:
    from fireflyer.fs.core.meta.fsck.rows import Problem
    from fireflyer.kvstore import Engine

__all__ = ["dump_command", "fsck_command", "load_command"]

MAX_ROUNDS: Final = 20
"""Of mending. Each finds what hung on what the last one mended."""
SHOWN: Final = 20
T = TypeVar("T")


def store_options(function: Callable[..., object]) -> Callable[..., object]:
    """`--dir` or `--store`; the command gets the URL as `store` and holds the lock of a local cluster while it runs."""

    @functools.wraps(function)
    def call(*args: object, directory: str | None, store: str | None, **options: object) -> object:
        with _found(directory, store) as url:
            return function(*args, store=url, **options)

    command: Callable[..., object] = call
    for option in (
        click.option(
            "--store",
            metavar="URL",
            help="Store of the metadata instead of --dir: embedded:/absolute/path or postgresql://user@host/database.",
        ),
        click.option("--dir", "directory", metavar="DIR", help=CLUSTER_HELP),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def _found(directory: str | None, store: str | None) -> Iterator[str]:
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.runtime.processes.run_lock import RunLock

    if store is not None:
        if directory is not None:
            raise UsageError("--dir and --store cannot be combined; give one of them")
        yield store
        return
    layout = Layout(directory_of(directory))
    cluster = layout.load()
    with RunLock(layout.lock_file):
        yield layout.store_url(cluster)


def _on(store: str, work: Callable[[Engine], Awaitable[T]], *, make: bool = False) -> T:
    from fireflyer import kvstore
    from fireflyer.runtime import run

    async def whole() -> T:
        async with await kvstore.open(store, make=make) as engine:
            return await work(engine)

    return run(whole())


@click.command(
    "fsck",
    short_help="Check and repair the metadata of a stopped cluster.",
    epilog="Example: ff fs admin fsck --dir fs --repair",
)
@store_options
@click.option("--repair", "mends", is_flag=True, help="Repair the metadata, after a question.")
@click.option("-y", "--yes", is_flag=True, help="With --repair: repair without the question.")
def fsck_command(*, store: str, mends: bool, yes: bool) -> int:
    """Check that names, inodes, link counts, directories and quotas are consistent. --repair moves inodes without a
    name to /lost+found. Chunks are not checked; `ff fs fsck` does that while the cluster runs.

    Exit code: 0 if there is no problem (left), 1 if there is one."""
    from fireflyer.fs.service.meta.offline_store import check_store, repair_store

    problems = _on(store, check_store)
    _show(problems)
    if not problems or not mends:
        return 1 if problems else 0
    if any(each.repair is None for each in problems):
        raise PermanentError(
            "nothing was repaired: some rows are unreadable; restore the store from a dump with `ff fs admin load`"
        )
    if not yes:
        click.confirm("Repair them?", abort=True)
    for _ in range(MAX_ROUNDS):
        repaired = _on(store, functools.partial(repair_store, problems=problems, now_ns=time.time_ns()))
        problems = _on(store, check_store)
        click.echo(f"{repaired} repaired, {len(problems)} left")
        if not problems:
            return 0
    _show(problems)
    return 1


def _show(problems: list[Problem]) -> None:
    for each in problems[:SHOWN]:
        click.echo(f"{each.kind.value}: {each.text}{'' if each.repair is not None else ' (cannot be repaired)'}")
    if len(problems) > SHOWN:
        click.echo(f"... and {len(problems) - SHOWN} more")
    kinds = Counter(each.kind.value for each in problems)
    click.echo(", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "no problems found")


@click.command(
    "dump",
    short_help="Write the metadata of a stopped cluster to a file.",
    epilog="Example: ff fs admin dump metadata.ffdump --dir fs",
)
@store_options
@click.argument("file", metavar="FILE")
def dump_command(*, store: str, file: str) -> int:
    """Write all metadata to the new file FILE: names and inodes of files, and which targets hold which chunks. Chunks
    are not included."""
    from fireflyer.fs.service.meta.offline_store import dump_store

    with new_file(file) as out:
        rows = _on(store, functools.partial(dump_store, file=out))
        if rows == 0:
            raise UsageError(
                "the store is empty, so nothing was written; give the one that managers have, with its ?table=NAME in "
                "PostgreSQL"
            )
    click.echo(f"{rows} rows in {file}")
    return 0


@click.command(
    "load",
    short_help="Read metadata from a file into an empty store.",
    epilog="Example: ff fs admin load metadata.ffdump --dir fs",
)
@store_options
@click.argument("file", metavar="FILE")
def load_command(*, store: str, file: str) -> int:
    """Read FILE, which `ff fs admin dump` wrote, into an empty store. All of FILE is checked before anything is loaded.
    Files that were made after the dump are lost; `ff fs fsck --repair` then removes their chunks."""
    from fireflyer.fs.service.meta.offline_store import load_store

    try:
        source = open(file, "rb")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    with source:
        rows = _on(store, functools.partial(load_store, file=source, now_ns=time.time_ns()), make=True)
    click.echo(f"{rows} rows loaded")
    return 0
