"""`ff fs find`: names below directories that meet all of some conditions."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.fs.files.common import PathResolver, files_options, say

if TYPE_CHECKING:
    from fireflyer.cli.fs.files.common import TreePath
    from fireflyer.fs.tools.trees import Walked

__all__ = ["Condition", "conditions", "find_command"]

Condition = Callable[["TreePath", "Walked"], bool]
_KINDS: Final = {
    "f": stat.S_IFREG,
    "d": stat.S_IFDIR,
    "l": stat.S_IFLNK,
    "p": stat.S_IFIFO,
    "s": stat.S_IFSOCK,
    "c": stat.S_IFCHR,
    "b": stat.S_IFBLK,
}
_UNITS: Final = {"": 512, "b": 512, "c": 1, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DAY_NS: Final = 86400 * SECOND


@click.command(
    "find", short_help="Find files below directories.", epilog="Example: ff fs find /data -name '*.txt' -size -2k"
)
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("-name", "--name", metavar="PATTERN", help="The file name matches PATTERN: *, ?, [a-z].")
@click.option("-iname", "--iname", metavar="PATTERN", help="As -name, ignoring case.")
@click.option("-path", "--path", "whole", metavar="PATTERN", help="The whole path matches; * matches / too.")
@click.option(
    "-type",
    "--type",
    "kinds",
    metavar="KINDS",
    help="f file, d directory, l symbolic link, p fifo, s socket, c character or b block device; several: f,l.",
)
@click.option(
    "-size",
    "--size",
    metavar="[+-]N[ckMGT]",
    help="Size in bytes (c), KiB (k), MiB (M), GiB (G), TiB (T) or 512-byte blocks, rounded up: more than "
    "(+), less than (-) or exactly N.",
)
@click.option(
    "-mtime",
    "--mtime",
    metavar="[+-]DAYS",
    help="Content changed more than (+), less than (-) or exactly DAYS days ago.",
)
@click.option("-mmin", "--mmin", metavar="[+-]MINUTES", help="As -mtime, in minutes.")
@click.option("-newer", "--newer", metavar="PATH", help="Changed after the file PATH was.")
@click.option("-empty", "--empty", is_flag=True, help="Empty files and empty directories.")
@click.option(
    "-mindepth", "--mindepth", type=int, default=0, metavar="N", help="At least N levels below PATH.  [default: 0]"
)
@click.option(
    "-maxdepth", "--maxdepth", type=int, default=-1, metavar="N", help="At most N levels below PATH.  [default: all]"
)
@click.option("-print0", "--print0", "zero", is_flag=True, help="End each path with a zero byte, for `xargs -0`.")
@files_options
def find_command(
    *,
    paths: tuple[str, ...],
    name: str | None,
    iname: str | None,
    whole: str | None,
    kinds: str | None,
    size: str | None,
    mtime: str | None,
    mmin: str | None,
    newer: str | None,
    empty: bool,
    mindepth: int,
    maxdepth: int,
    zero: bool,
    places: PathResolver,
) -> None:
    """Print each PATH and what is below it, if it meets all conditions. Without PATH: from the root.
    Options are as those of find(1), and come in any order."""
    from fireflyer.fs.tools.trees import walk

    newer_ns = None
    if newer is not None:
        reference = places.remote(newer)
        newer_ns = reference.tree.stat(reference.path).st_mtime_ns
    wanted = conditions(
        name=name,
        iname=iname,
        path=whole,
        kinds=kinds,
        size=size,
        mtime=mtime,
        mmin=mmin,
        newer_ns=newer_ns,
        empty=empty,
        now_ns=time.time_ns(),
    )
    for text in paths or ("/",):
        with places.each(text):
            place = places.remote(text)

            def failed(error: OSError, text: str = text) -> None:
                places.fail(str(error.filename or text), error)

            for found in walk(place.tree, place.path, failed=failed, max_depth=maxdepth):
                here = place.below(found.relative)
                if found.depth >= mindepth and all(meets(here, found) for meets in wanted):
                    say(here.given, b"\0" if zero else b"\n")


def conditions(
    *,
    name: str | None = None,
    iname: str | None = None,
    path: str | None = None,
    kinds: str | None = None,
    size: str | None = None,
    mtime: str | None = None,
    mmin: str | None = None,
    newer_ns: int | None = None,
    empty: bool = False,
    now_ns: int,
) -> list[Condition]:
    """Raises `UsageError` for what is no condition."""
    found: list[Condition] = []
    if name is not None:
        found.append(_named(_pattern(name)))
    if iname is not None:
        found.append(_named(_pattern(iname, re.IGNORECASE)))
    if path is not None:
        matches = _pattern(path)
        found.append(lambda here, _: matches(here.given))
    if kinds is not None:
        formats = _formats(kinds)
        found.append(lambda _, one: stat.S_IFMT(one.attributes.st_mode) in formats)
    if size is not None:
        unit, fits = _size(size)
        found.append(lambda _, one: fits(-(-one.attributes.st_size // unit)))
    if mtime is not None:
        days = _number(mtime, "-mtime")
        found.append(lambda _, one: days((now_ns - one.attributes.st_mtime_ns) // _DAY_NS))
    if mmin is not None:
        minutes = _number(mmin, "-mmin")
        found.append(lambda _, one: minutes(-((one.attributes.st_mtime_ns - now_ns) // (60 * SECOND))))
    if newer_ns is not None:
        found.append(lambda _, one: one.attributes.st_mtime_ns > newer_ns)
    if empty:
        found.append(_empty)
    return found


def _named(matches: Callable[[str], bool]) -> Condition:
    return lambda here, _: matches(os.path.basename(here.given.rstrip("/")) or "/")


def _pattern(text: str, flags: re.RegexFlag = re.NOFLAG) -> Callable[[str], bool]:
    expression = re.compile(fnmatch.translate(text), flags)
    return lambda name: expression.match(name) is not None


def _formats(kinds: str) -> set[int]:
    unknown = [one for one in kinds.split(",") if one not in _KINDS]
    if unknown:
        raise UsageError(f"-type {kinds}: {unknown[0]!r} is not a kind; give one or more of {', '.join(_KINDS)}")
    return {_KINDS[one] for one in kinds.split(",")}


def _number(text: str, option: str) -> Callable[[int], bool]:
    match = re.fullmatch(r"([+-]?)([0-9]+)", text)
    if match is None:
        raise UsageError(f"{option} {text!r} is not a number; write it like 7, +7 (more) or -7 (less)")
    limit = int(match[2])
    if match[1] == "+":
        return lambda value: value > limit
    return (lambda value: value < limit) if match[1] == "-" else (lambda value: value == limit)


def _size(text: str) -> tuple[int, Callable[[int], bool]]:
    match = re.fullmatch(r"([+-]?[0-9]+)([bckMGT]?)", text)
    if match is None:
        raise UsageError(f"-size {text!r} is not a size; write it like +1M, -4k or 100c")
    return _UNITS[match[2]], _number(match[1], "-size")


def _empty(here: TreePath, found: Walked) -> bool:
    if stat.S_ISREG(found.attributes.st_mode):
        return found.attributes.st_size == 0
    if not stat.S_ISDIR(found.attributes.st_mode):
        return False
    try:
        return next(iter(here.tree.scandir(here.path)), None) is None
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ENOENT):
            return False
        raise
