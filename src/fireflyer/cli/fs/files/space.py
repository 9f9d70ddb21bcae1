"""`ff fs du`, `df`: used and free space."""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cli.fs.files.common import SETTINGS, PathResolver, TreePath, files_options, say
from fireflyer.cli.fs.files.show import print_rows, size_text

if TYPE_CHECKING:
    from fireflyer.fs.tools.trees import Walked

__all__ = ["df_command", "du_command"]

ENDLESS = 1 << 62
"""So many inodes are no limit."""


@click.command(
    "du",
    short_help="Show the size of directories.",
    context_settings=SETTINGS,
    epilog="Example: ff fs du -h -d 1 /data",
)
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("-s", "--summarize", "summary", is_flag=True, help="Show only the sum of each PATH.")
@click.option("-h", "--human-readable", "human", is_flag=True, help="Show sizes like 1.5M.")
@click.option("-b", "--bytes", "as_bytes", is_flag=True, help="Show bytes.  [default: KiB, rounded up]")
@click.option("-a", "--all", "files", is_flag=True, help="Show files too.")
@click.option("-c", "--total", "with_total", is_flag=True, help="Show the sum of all PATHs at the end.")
@click.option(
    "-d",
    "--max-depth",
    "depth",
    type=int,
    default=-1,
    metavar="N",
    help="Show directories at most N levels below PATH.  [default: all]",
)
@click.option("--inodes", is_flag=True, help="Count inodes instead of bytes.")
@files_options
def du_command(
    *,
    paths: tuple[str, ...],
    summary: bool,
    human: bool,
    as_bytes: bool,
    files: bool,
    with_total: bool,
    depth: int,
    inodes: bool,
    places: PathResolver,
) -> None:
    """Show the sum of the lengths of files, by directory. A file with several names counts once. Replicas are not
    counted (`ff fs status` does), and holes count as if they were written. Without PATH: the root."""
    if summary and (files or depth > 0):
        raise UsageError("-s cannot be combined with -a or -d; leave one of them out")

    def show(size: int, given: str) -> None:
        exact = as_bytes or inodes
        say(f"{size_text(size, True) if human else size if exact else -(-size // 1024)}\t{given}")

    summing = _Summing(places, show, depth=0 if summary else depth, files=files, inodes=inodes)
    total = 0
    for path in paths or ("/",):
        with places.each(path):
            total += summing.sum_of(places.remote(path))
    if with_total:
        show(total, "total")


class _Open(msgspec.Struct):
    found: Walked
    size: int


class _Summing:
    """A directory is shown when all below it has been; sums of those that it is in stand on a stack."""

    def __init__(
        self, places: PathResolver, show: Callable[[int, str], None], *, depth: int, files: bool, inodes: bool
    ) -> None:
        self._places, self._show = places, show
        self._depth, self._files, self._inodes = depth, files, inodes
        self._seen: set[tuple[int, int]] = set()
        self._open: list[_Open] = []

    def sum_of(self, place: TreePath) -> int:
        from fireflyer.fs.tools.trees import walk

        def failed(error: OSError) -> None:
            self._places.fail(str(error.filename or place.given), error)

        total = 0
        for found in walk(place.tree, place.path, failed=failed):
            total += self._end(place, found.depth)
            if stat.S_ISDIR(found.attributes.st_mode):
                self._open.append(_Open(found, int(self._inodes)))
                continue
            size = self._size(place, found)
            if self._open:
                self._open[-1].size += size
            else:
                total += size
            if not found.depth or (self._files and self._shown(found)):
                self._show(size, place.below(found.relative).given)
        return total + self._end(place, 0)

    def _size(self, place: TreePath, found: Walked) -> int:
        attributes = found.attributes
        if attributes.st_nlink > 1:
            known = id(place.tree), attributes.st_ino
            if known in self._seen:
                return 0
            self._seen.add(known)
        return 1 if self._inodes else attributes.st_size

    def _shown(self, found: Walked) -> bool:
        return self._depth < 0 or found.depth <= self._depth

    def _end(self, place: TreePath, depth: int) -> int:
        """Of the directories from this depth on; returns the sum of the outermost, if it is among them."""
        size = 0
        while len(self._open) > depth:
            ended = self._open.pop()
            size = ended.size
            if self._open:
                self._open[-1].size += size
                size = 0
            if self._shown(ended.found):
                self._show(ended.size, place.below(ended.found.relative).given)
        return size


@click.command("df", short_help="Show free space.", context_settings=SETTINGS, epilog="Example: ff fs df -h /data")
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("-h", "--human-readable", "human", is_flag=True, help="Show sizes like 1.5M.  [default: KiB]")
@click.option("-i", "--inodes", is_flag=True, help="Show inodes instead of bytes.")
@files_options
def df_command(*, paths: tuple[str, ...], human: bool, inodes: bool, places: PathResolver) -> None:
    """Show size, use and free space of the cluster, or of the quota that limits PATH, in KiB. Without PATH: the
    root."""
    rows = [["Inodes", "Used", "Free", "Use%", "Path"] if inodes else ["Size", "Used", "Avail", "Use%", "Path"]]
    for path in paths or ("/",):
        with places.each(path):
            place = places.remote(path)
            space = place.tree.statvfs(place.path)
            if inodes:
                numbers = space.f_files, space.f_files - space.f_ffree, space.f_ffree
                cells = [str(number) for number in numbers]
            else:
                used = space.f_blocks - space.f_bfree
                numbers = tuple(number * space.f_frsize for number in (space.f_blocks, used, space.f_bavail))
                cells = [size_text(one, True) if human else str(-(-one // 1024)) for one in numbers]
            _, used, free = numbers
            if inodes and space.f_files >= ENDLESS:
                cells, used, free = ["-", str(used) if used else "-", "-"], 0, 0
            rows.append([*cells, f"{-(-100 * used // (used + free))}%" if used + free else "-", path])
    if len(rows) > 1:
        print_rows(rows, right=(0, 1, 2, 3))
