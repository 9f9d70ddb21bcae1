"""`ff fs bench` and `gc`: the speed of files, and what is removed and not collected yet."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from fireflyer.base.errors import PermanentError, UsageError
from fireflyer.cli.fs.connect import ClusterTarget, ask_one, expect, where_options
from fireflyer.cli.fs.files.common import Bars, PathResolver, files_options, jobs_option, say
from fireflyer.cli.fs.files.show import print_rows
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.fs.tools.measuring import Load, Measurement

__all__ = ["bench_command", "gc_command", "to_json"]

LOOK_S: Final = 1.0


@click.command(
    "bench",
    short_help="Measure files, beside a local directory.",
    epilog="Example: ff fs bench /scratch --size 1GiB --files 10000",
)
@click.argument("path", default="/")
@click.option("--size", default="256MiB", show_default=True, metavar="SIZE", help="Size of the large file.")
@click.option(
    "--files",
    type=WholeNumber(min=1, max=10_000_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="Number of small files.",
)
@click.option("--small", default="160KB", show_default=True, metavar="SIZE", help="Size of each small file.")
@click.option(
    "--beside",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Local directory to measure as well.  [default: a temporary one]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
@jobs_option
@files_options
def bench_command(
    *, path: str, size: str, files: int, small: str, beside: str | None, as_json: bool, jobs: int, places: PathResolver
) -> None:
    """Write, read, list and remove files in a new directory in PATH, by default the root, and do the same in a local
    directory. Both are removed afterwards. What was just written is read back, so the local reads come from the page
    cache."""
    from fireflyer.base.units import format_rate, parse_bytes
    from fireflyer.fs.tools.measuring import Load, measure
    from fireflyer.fs.tools.trees import LocalTree

    load = Load(parse_bytes(size), files, parse_bytes(small), jobs)
    name = f"ff-bench-{os.getpid()}-{time.time_ns()}"
    with places.each(path):
        place = places.remote(path)
        place.tree.stat(place.path)
    if places.failures:
        return
    with Bars(places, "Measuring", counts="done") as bars:
        found = measure(
            place.tree, place.below(name).path, load, doing=lambda what: bars.at(0, None, f"Cluster: {what}")
        )
        with tempfile.TemporaryDirectory(dir=beside) as here:
            local = measure(
                LocalTree(), os.path.join(here, name), load, doing=lambda what: bars.at(0, None, f"Local: {what}")
            )
    if as_json:
        say(to_json(load, found, local).decode())
        return

    def shown(figure: Measurement) -> str:
        return format_rate(figure.per_s) if figure.unit == "B" else f"{figure.per_s:,.0f} {figure.unit}/s"

    rows = [["", "cluster", "local", "ratio"]]
    for one, other in zip(found, local, strict=True):
        rows.append([one.what, shown(one), shown(other), f"{one.per_s / other.per_s:.2f}"])
    print_rows(rows, right=(1, 2))


def to_json(load: Load, cluster: Sequence[Measurement], here: Sequence[Measurement]) -> bytes:
    """Of `ff fs bench --json`."""
    return msgspec.json.encode({"load": load, "cluster": cluster, "here": here})


@click.command("gc", short_help="Show removed files whose space is not free yet.", epilog="Example: ff fs gc --wait 60")
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=float,
    help="Wait at most this long until none are left; if some are, exit with 1.  [default: do not wait]",
)
@where_options
def gc_command(*, where: ClusterTarget, wait_s: float | None) -> int:
    """Show how many removed files still take space: a program has them open, or the garbage collector has not deleted
    their chunks yet. The collector runs by itself; this command tells when the space is free."""
    from fireflyer.base.units import format_bytes
    from fireflyer.cli.fs.status import at_least
    from fireflyer.fs.schema.manager import FilesStatus, GetFilesStatus

    if wait_s is not None and not wait_s >= 0:
        raise UsageError(f"--wait {wait_s}: give a number of seconds, 0 or more")
    until_s = time.monotonic() + (wait_s or 0)
    while True:
        found = expect(ask_one(where, GetFilesStatus()), FilesStatus)
        if not found.unlinked or time.monotonic() >= until_s:
            break
        time.sleep(LOOK_S)
    if not found.unlinked:
        say("No removed files are waiting: all of their space is free.")
        return 0
    files = "file" if found.unlinked == 1 else "files"
    say(f"{at_least(found.unlinked)} {files} ({format_bytes(found.unlinked_bytes)}) removed and not collected yet.")
    if found.last_error:
        raise PermanentError(f"garbage collection fails: {found.last_error}; see the log of the meta service")
    return 1 if wait_s is not None else 0
