"""`ff reliability import`: logs and accounting into tables."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory, complete_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fireflyer.analytics.reliability.importing import Imported, LineSource
    from fireflyer.analytics.reliability.local_times import Clock

__all__ = ["import_command"]

_CLOCK_ERROR_NS = 86_400 * SECOND
"""Clocks may be ahead by this much; what is later than that did not happen then."""


@click.command(
    "import",
    short_help="Logs of nodes, runs, the platform's history and Slurm's accounting, into tables.",
    epilog="""\b
Examples:
  ff reliability import failures --sacct sacct.txt --journal journal.json
  ff reliability import failures --kernel-log gpu7=dmesg.txt --health gpu7=health.jsonl
  ff reliability import failures --run runs/train-20260101-120000
  ff reliability import failures --platform  # as an operator; again, and only what is new is read

\b
The accounting is written by:
  SLURM_TIME_FORMAT=%s sacct --allusers --duplicates --parsable2 --starttime 2026-01-01 \\
    --format JobID,User,State,Submit,Start,End,NNodes,NodeList,AllocTRES,ExitCode,SubmitLine""",
)
@click.argument("directory", metavar="DIRECTORY", required=False, shell_complete=complete_directory)
@click.option(
    "--sacct", multiple=True, metavar="FILE", shell_complete=complete_file, help="Output of `sacct --parsable2`."
)
@click.option(
    "--jobcomp", multiple=True, metavar="FILE", shell_complete=complete_file, help="What Slurm's jobcomp/filetxt wrote."
)
@click.option(
    "--kernel-log",
    multiple=True,
    metavar="[NODE=]FILE",
    shell_complete=complete_file,
    help="Kernel log: of `dmesg --time-format iso`, `dmesg -T`, or syslog.",
)
@click.option(
    "--journal",
    multiple=True,
    metavar="[NODE=]FILE",
    shell_complete=complete_file,
    help="Output of `journalctl -k -o json`.",
)
@click.option(
    "--health", multiple=True, metavar="[NODE=]FILE", shell_complete=complete_file, help="Health events, one a line."
)
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="RUN_DIR",
    shell_complete=complete_directory,
    help="Directory of a run of `ff run`.",
)
@click.option(
    "--platform",
    is_flag=False,
    flag_value="",
    metavar="[PATH]",
    shell_complete=complete_file,
    help="History of the platform, from its managers: runs of tasks, faults, drains, repairs. For operators. PATH: "
    "directory of `ff up`, or file that `ff login` wrote; without it, the platform that other commands find.",
)
@click.option(
    "--year",
    type=click.IntRange(1970, 2100),
    metavar="YEAR",
    help="Of syslog lines, whose times have none.  [default: such lines are left out]",
)
@click.option(
    "--utc-offset",
    metavar="ZONE",
    help="Of local times: the name of their zone, as Europe/Berlin, or 7200 where clocks are always two hours ahead of "
    "UTC.  [default: they are read as UTC]",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def import_command(
    *,
    directory: str | None,
    sacct: tuple[str, ...],
    jobcomp: tuple[str, ...],
    kernel_log: tuple[str, ...],
    journal: tuple[str, ...],
    health: tuple[str, ...],
    runs: tuple[str, ...],
    platform: str | None,
    year: int | None,
    utc_offset: str | None,
    as_json: bool,
) -> int:
    """Read logs and accounting into the tables in DIRECTORY, from which all other commands compute. A file may be
    compressed (.gz). NODE is whose log it is, whatever host its lines name; without it that host, or where they name
    none the name of the file.

    Lines that cannot be used are counted and told. What was imported before counts once: a file may be imported again
    when it has grown. While an import runs, another one into the same DIRECTORY is refused.
    """
    from fireflyer.analytics.reliability.local_times import Clock, zone_of
    from fireflyer.analytics.reliability.tables import import_lock

    if directory is None:
        taken = f", before --platform, which took {platform} for its PATH" if platform else ""
        raise UsageError(f"DIRECTORY is missing, that of the tables; give it first{taken}")
    zone = None if utc_offset is None else zone_of(utc_offset)
    clock = Clock(zone, year, time.time_ns() + _CLOCK_ERROR_NS)
    sources: dict[LineSource, tuple[str, ...]] = {
        "jobcomp": jobcomp,
        "kernel-log": kernel_log,
        "journal": journal,
        "health": health,
    }
    if platform is None and not any((sacct, runs, *sources.values())):
        raise UsageError(
            "nothing to import; give --platform, --sacct, --jobcomp, --kernel-log, --journal, --health or --run"
        )
    found = []
    of_platform = [] if platform is None else _of_platform(platform, directory, clock)
    with import_lock(directory):
        for one in itertools.chain(_imported(directory, sacct, sources, runs, clock), of_platform):
            found.append(one)
            if not as_json:
                _print(one)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    return 0


def _imported(
    directory: str,
    sacct: tuple[str, ...],
    sources: dict[LineSource, tuple[str, ...]],
    runs: tuple[str, ...],
    clock: Clock,
) -> Iterator[Imported]:
    from fireflyer.analytics.reliability.importing import import_lines, import_run, import_sacct
    from fireflyer.cli.output import read_events

    for path in sacct:
        yield import_sacct(path, directory, clock=clock)
    for source, paths in sources.items():
        for given in paths:
            node, path = _node_and_path(given)
            yield import_lines(source, path, directory, node=node, clock=clock, of_node=path != given)
    for run_dir in runs:
        yield import_run(run_dir, read_events(run_dir), directory, clock=clock)


def _of_platform(platform: str, directory: str, clock: Clock) -> Iterator[Imported]:
    from fireflyer.cli.platform.connect import connected
    from fireflyer.cli.reliability.platform_import import import_platform

    with connected(platform or None) as client:
        yield from import_platform(client, directory, clock=clock)


def _node_and_path(given: str) -> tuple[str, str]:
    """`gpu7=dmesg.txt`; an equals sign in the path of a file that is there is no such separator."""
    node, separator, path = given.partition("=")
    if not separator or os.path.exists(given):
        return os.path.basename(given).split(".", 1)[0], given
    if not node or "/" in node:
        raise UsageError(f"{given!r} is not NODE=FILE")
    return node, path


def _print(one: Imported) -> None:
    rows = [f"{count:,} {name}" for count, name in ((one.jobs, "jobs"), (one.events, "events")) if count]
    steps = f", {one.steps:,} steps left out" if one.steps else ""
    what = "changes" if one.source == "platform" else "lines"
    known = f", {one.known:,} known from earlier imports" if one.known else ""
    click.echo(f"{one.path}: {' and '.join(rows) or 'nothing'} of {one.lines:,} {what}{steps}{known}")
    for reason, count in sorted(one.rejected.items(), key=lambda item: -item[1]):
        click.echo(f"  {count:,} {what} not used: {reason}")
    if one.local_times:
        click.echo(
            f"  {one.local_times:,} local times were read as UTC; say their zone with --utc-offset, as Europe/Berlin"
        )
    if one.cut:
        click.echo(f"  the file was not read to its end: {one.cut}")
