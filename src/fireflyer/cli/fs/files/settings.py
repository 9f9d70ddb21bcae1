"""`ff fs quota`, `defaults`: limits of a directory, and settings for the files made in it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import counted, format_bytes, format_duration, parse_bytes, parse_duration
from fireflyer.cli.fs.files.common import PathResolver, files_options, say
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem
    from fireflyer.fs.schema.inodes import Defaults
    from fireflyer.fs.schema.meta import QuotaTree

__all__ = ["defaults_command", "quota_command"]

MAX_INODES = (1 << 63) - 1
MAX_STRIPE = 1024
DAY_S = 86400


@click.command(
    "quota",
    short_help="Show or set the quota of a directory.",
    epilog="Example: ff fs quota --bytes 10TiB --inodes 1000000 /projects/a",
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--bytes", "max_bytes", metavar="SIZE", help="Limit of the lengths of all files, like 10GiB.")
@click.option(
    "--inodes",
    "max_inodes",
    metavar="N",
    type=WholeNumber(min=0, max=MAX_INODES),
    help="Limit of the number of files, directories and links.",
)
@click.option("--none", "ends", is_flag=True, help="Remove the quota.")
@files_options
def quota_command(
    *, paths: tuple[str, ...], max_bytes: str | None, max_inodes: int | None, ends: bool, places: PathResolver
) -> None:
    """Show use and limits of directories with a quota. With --bytes, --inodes or --none: set them, which only
    administrators may. A limit that is not given is not changed.

    The use is exact, and counts everything below the directory. Nothing can be renamed or hard-linked from inside a
    directory with a quota to the outside, or back; `cp` works. A directory can get or lose its quota only while there
    are at most 4096 names below it."""
    if ends and (max_bytes is not None or max_inodes is not None):
        raise UsageError("--none cannot be combined with --bytes or --inodes; leave them out")
    limit_bytes = None if max_bytes is None else parse_bytes(max_bytes)
    for path in paths:
        with places.each(path):
            place = places.remote(path)
            if ends:
                place.tree.set_quota(place.path)
                say(f"{path}: no quota")
                continue
            if limit_bytes is None and max_inodes is None:
                say(f"{path}: {_quota_text(place.tree.get_quota(place.path))}")
                continue
            before = _area(place.tree, place.path)
            limits = {
                "bytes": before.limit_bytes if before is not None and limit_bytes is None else limit_bytes,
                "inodes": before.limit_inodes if before is not None and max_inodes is None else max_inodes,
            }
            say(f"{path}: {_quota_text(place.tree.set_quota(place.path, **limits))}")


def _area(tree: FileSystem, path: str) -> QuotaTree | None:
    try:
        return tree.get_quota(path)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return None


def _quota_text(area: QuotaTree) -> str:
    of_bytes = "" if area.limit_bytes is None else f" of {format_bytes(area.limit_bytes)}"
    inodes = (
        counted(area.inodes, "inode") if area.limit_inodes is None else f"{area.inodes} of {area.limit_inodes} inodes"
    )
    return f"{format_bytes(area.bytes)}{of_bytes}, {inodes}"


@click.command(
    "defaults",
    short_help="Show or set chunk size, stripe and trash of a directory.",
    epilog="Example: ff fs defaults --chunk 1MiB --stripe 4 /small",
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--chunk", metavar="SIZE", help="Chunk size of new files: a power of two, 64KiB to 64MiB. 0: as the cluster."
)
@click.option(
    "--stripe",
    metavar="N",
    type=WholeNumber(min=0, max=MAX_STRIPE),
    help="Number of chains that a new file is spread over. 0: as the cluster.",
)
@click.option("--trash", metavar="TIME", help="Time to keep removed files, like 7d. 0: delete them at once.")
@files_options
def defaults_command(
    *, paths: tuple[str, ...], chunk: str | None, stripe: int | None, trash: str | None, places: PathResolver
) -> None:
    """Show the settings for files and directories that are made in a directory, or set them, which its owner may. They
    hold for what is made from then on; new directories inherit them. An option that is not given is not changed.

    With --trash, removed files move to /.trash/UID, or to .trash/UID in the directory with the quota that counts them.
    Move them from there to get them back."""
    from fireflyer.base.units import SECOND
    from fireflyer.fs.schema.inodes import Defaults, DirectoryDetails

    changes = {
        "chunk_bytes": None if chunk is None else parse_bytes(chunk),
        "stripe": stripe,
        "trash_s": None if trash is None else 0 if trash == "0" else -(-parse_duration(trash) // SECOND),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    for path in paths:
        with places.each(path):
            place = places.remote(path)
            body = place.tree.stat(place.path).inode.body
            before = body.defaults if isinstance(body, DirectoryDetails) else Defaults()
            after = msgspec.structs.replace(before, **given)
            if given or not isinstance(body, DirectoryDetails):
                place.tree.set_defaults(place.path, after)
            say(f"{path}: {_defaults_text(after)}")


def _defaults_text(defaults: Defaults) -> str:
    chunk = f"chunks of {format_bytes(defaults.chunk_bytes)}" if defaults.chunk_bytes else "default chunk size"
    stripe = f"stripe of {counted(defaults.stripe, 'chain')}" if defaults.stripe else "default stripe"
    trash = f"trash for {_time_text(defaults.trash_s)}" if defaults.trash_s else "no trash"
    return f"{chunk}, {stripe}, {trash}"


def _time_text(seconds: int) -> str:
    """In whole days where it is given so."""
    from fireflyer.base.units import SECOND

    days, rest = divmod(seconds, DAY_S)
    return format_duration(seconds * SECOND) if rest else counted(days, "day")
