"""`ff data info` and `ff data verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from fireflyer.base.units import counted, format_bytes
from fireflyer.cli.data.pack import token_file_option
from fireflyer.cli.data.progress import Progress
from fireflyer.cli.fs.files.common import clean, say

if TYPE_CHECKING:
    from fireflyer.data.inspection import Lengths
    from fireflyer.data.recordset import RecordSet

__all__ = ["info_command", "verify_command"]

_BAR_CELLS: Final = 40


@click.command(
    "info", short_help="Show records, bytes, lengths and shards.", epilog="Example: ff data info ff:///data/web"
)
@click.argument("path", metavar="PATH")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON, with each shard.")
@token_file_option
def info_command(*, path: str, as_json: bool, token_file: str | None) -> None:
    """Show what is in the data set at PATH: a directory, or ff://... in 3FS. Reads manifest and indexes."""
    from fireflyer.data.inspection import measure_lengths
    from fireflyer.data.recordset import RecordSet

    with RecordSet(path, token_file=token_file) as records:
        lengths = measure_lengths(records)
        if as_json:
            say(msgspec.json.format(msgspec.json.encode(_as_json(records, lengths)), indent=2).decode())
        else:
            _print(records, lengths)


def _as_json(records: RecordSet, lengths: Lengths | None) -> dict[str, Any]:
    return {
        "path": records.path,
        "records": len(records),
        "data_bytes": sum(one.data_bytes for one in records.shards),
        "file_bytes": sum(one.file_bytes for one in records.shards),
        "named": bool(records.names),
        "meta": records.meta,
        "lengths": lengths._asdict() | {"ranges": [one._asdict() for one in lengths.ranges]} if lengths else None,
        "shards": records.shards,
    }


def _print(records: RecordSet, lengths: Lengths | None) -> None:
    shards = records.shards
    say(f"{records.path}")
    say(f"{'records':<14}{len(records)}{', with names' if records.names else ''}")
    say(f"{'bytes':<14}{format_bytes(sum(one.data_bytes for one in shards))}")
    size = format_bytes(sum(one.file_bytes for one in shards))
    say(f"{'shards':<14}{len(shards)}, {size} with their indexes")
    for name, value in records.meta.items():
        say(f"{name:<13} {value if isinstance(value, str) else msgspec.json.encode(value).decode()}")
    if lengths is None:
        return
    say(f"{'lengths':<14}{lengths.smallest} to {lengths.largest} bytes")
    most = max(one.records for one in lengths.ranges)
    for one in lengths.ranges:
        bar = "#" * round(one.records / most * _BAR_CELLS) or ("." if one.records else "")
        say(f"  {one.first:>10} to {one.last:<10} {one.records:>10}  {bar}".rstrip())


@click.command(
    "verify",
    short_help="Read all records and check every checksum.",
    epilog="Example: ff data verify ff:///data/web",
)
@click.argument("path", metavar="PATH")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress and no summary.")
@token_file_option
def verify_command(*, path: str, quiet: bool, token_file: str | None) -> int:
    """Read every record of the data set at PATH. Each shard and record that is missing or damaged is named on standard
    error, and the exit code is then 1."""
    from fireflyer.data.inspection import find_damage
    from fireflyer.data.recordset import RecordSet

    damaged = 0
    with RecordSet(path, token_file=token_file) as records, Progress("Verifying", quiet=quiet) as progress:
        total = sum(one.data_bytes for one in records.shards)
        progress.begun(total, 0, 0)
        for problem in find_damage(records, progress.advanced):
            damaged += 1
            progress.say(f"error: {problem}")
        count = len(records)
    if damaged:
        sys.stderr.write(f"error: {clean(path)}: {counted(damaged, 'part')} of the data set missing or damaged\n")
        return 1
    if not quiet:
        say(f"{counted(count, 'record')} ({format_bytes(total)}): all are as they were written")
    return 0
