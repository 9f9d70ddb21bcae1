"""`ff fs ls`, `cat`, `stat`: looking at files, in the manner of coreutils."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click
import msgspec

from fireflyer.cli.fs.files.common import (
    SETTINGS,
    PathResolver,
    TreePath,
    clean,
    files_options,
    flush_out,
    say,
    write_out,
)

if TYPE_CHECKING:
    from fireflyer.fs.schema.inodes import Layout
    from fireflyer.fs.tools.trees import Attributes

__all__ = ["cat_command", "ls_command", "print_rows", "size_text", "stat_command", "to_json"]

BLOCK_BYTES: Final = 4 << 20
COLUMN_GAP: Final = 2


def size_text(size: int, human: bool) -> str:
    """`1.5M` as coreutils write it: rounded up, so that nothing looks smaller than it is."""
    if not human or size < 1024:
        return str(size)
    value, units = size, "KMGTPE"
    for unit in units:
        tenths = -(-value * 10 // 1024)
        if tenths < 100:
            return f"{tenths // 10}.{tenths % 10}{unit}"
        whole = -(-value // 1024)
        if whole < 1024 or unit == units[-1]:
            return f"{whole}{unit}"
        value = whole
    raise AssertionError("units end with a return")


class _Names:
    """Of users and groups of this machine; numbers where it knows none."""

    def __init__(self, numeric: bool) -> None:
        self._numeric = numeric
        self._users: dict[int, str] = {}
        self._groups: dict[int, str] = {}

    def user(self, uid: int) -> str:
        if uid not in self._users:
            self._users[uid] = str(uid)
            if not self._numeric:
                import pwd

                try:
                    self._users[uid] = pwd.getpwuid(uid).pw_name
                except KeyError:
                    pass
        return self._users[uid]

    def group(self, gid: int) -> str:
        if gid not in self._groups:
            self._groups[gid] = str(gid)
            if not self._numeric:
                import grp

                try:
                    self._groups[gid] = grp.getgrgid(gid).gr_name
                except KeyError:
                    pass
        return self._groups[gid]


class _Listed(msgspec.Struct, frozen=True):
    name: str
    attributes: Attributes
    place: TreePath


class _ListOptions(msgspec.Struct, frozen=True):
    long: bool
    hidden: bool
    human: bool
    itself: bool
    recursive: bool
    single: bool
    order: str
    reverse: bool
    numeric: bool
    numbers: bool


@click.command("ls", short_help="List directories.", context_settings=SETTINGS, epilog="Example: ff fs ls -l -h /data")
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("-l", "long", is_flag=True, help="Show mode, links, owner, group, size in bytes and modification time.")
@click.option("-a", "--all", "-A", "hidden", is_flag=True, help="Show names that begin with a dot.")
@click.option("-h", "--human-readable", "human", is_flag=True, help="With -l: sizes like 1.5M.")
@click.option("-d", "--directory", "itself", is_flag=True, help="Show directories themselves, not their content.")
@click.option("-R", "--recursive", "recursive", is_flag=True, help="List directories below too.")
@click.option(
    "-1", "single", is_flag=True, help="One name per line.  [default: columns on a terminal, else one per line]"
)
@click.option("-S", "order", flag_value="size", help="Sort by size, largest first.  [default: by name]")
@click.option("-t", "order", flag_value="time", help="Sort by modification time, newest first.")
@click.option("-r", "--reverse", "reverse", is_flag=True, help="Reverse the order.")
@click.option("-n", "--numeric-uid-gid", "numeric", is_flag=True, help="With -l: uids and gids instead of names.")
@click.option("-i", "--inode", "numbers", is_flag=True, help="Show inode numbers.")
@files_options
def ls_command(
    *,
    paths: tuple[str, ...],
    long: bool,
    hidden: bool,
    human: bool,
    itself: bool,
    recursive: bool,
    single: bool,
    order: str | None,
    reverse: bool,
    numeric: bool,
    numbers: bool,
    places: PathResolver,
) -> None:
    """List directories and files. Without PATH: the root."""
    options = _ListOptions(
        long,
        hidden,
        human,
        itself,
        recursive,
        single or not sys.stdout.isatty(),
        order or "name",
        reverse,
        numeric,
        numbers,
    )
    files, directories = [], []
    for path in paths or ("/",):
        with places.each(path):
            place = places.remote(path)
            attributes = place.tree.stat(place.path, place.ends_in_slash or not (long or itself))
            if stat.S_ISDIR(attributes.st_mode) and not itself:
                directories.append(place)
            else:
                files.append(_Listed(path, attributes, place))
    if files:
        _print(_ordered(files, options), options)
    titled = len(directories) + len(files) > 1 or recursive
    first = not files
    while directories:
        here = directories.pop(0)
        below: list[TreePath] = []
        with places.each(here.given):
            found = [
                _Listed(entry.name, entry.attributes, here.below(entry.name))
                for entry in here.tree.scandir(here.path)
                if hidden or not entry.name.startswith(".")
            ]
            found = _ordered(found, options)
            if titled:
                say(("" if first else "\n") + f"{here.given}:")
            first = False
            _print(found, options)
            below = [one.place for one in found if recursive and stat.S_ISDIR(one.attributes.st_mode)]
        directories[:0] = below


def _ordered(found: list[_Listed], options: _ListOptions) -> list[_Listed]:
    found = sorted(found, key=lambda one: os.fsencode(one.name))
    if options.order == "size":
        found.sort(key=lambda one: -one.attributes.st_size)
    elif options.order == "time":
        found.sort(key=lambda one: -one.attributes.st_mtime_ns)
    return found[::-1] if options.reverse else found


def _print(found: list[_Listed], options: _ListOptions) -> None:
    if options.long:
        _print_long(found, options)
        return
    names = [f"{one.attributes.st_ino} {one.name}" if options.numbers else one.name for one in found]
    if options.single:
        for name in names:
            say(name)
        return
    for line in _columns([clean(name) for name in names], shutil.get_terminal_size().columns):
        say(line)


def _columns(names: list[str], width: int) -> list[str]:
    """Down, then across, in as few lines as fit."""
    lines = 1
    while lines < len(names):
        widths = [max(map(len, names[at : at + lines])) + COLUMN_GAP for at in range(0, len(names), lines)]
        if sum(widths) - COLUMN_GAP <= width:
            break
        lines += 1
    widths = [max(map(len, names[at : at + lines])) + COLUMN_GAP for at in range(0, len(names), lines)]
    return [
        "".join(name.ljust(size) for name, size in zip(names[row::lines], widths, strict=False)).rstrip()
        for row in range(min(lines, len(names)))
    ]


def _print_long(found: list[_Listed], options: _ListOptions) -> None:
    names = _Names(options.numeric)
    rows = []
    for one in found:
        at = one.attributes
        name = one.name
        if stat.S_ISLNK(at.st_mode):
            name += f" -> {one.place.tree.readlink(one.place.path)}"
        shown = time.strftime("%Y-%m-%d %H:%M", time.localtime(at.st_mtime_ns // 10**9))
        row = [stat.filemode(at.st_mode), str(at.st_nlink), names.user(at.st_uid), names.group(at.st_gid)]
        rows.append(
            ([str(at.st_ino)] if options.numbers else []) + row + [size_text(at.st_size, options.human), shown, name]
        )
    print_rows(rows, right=(1, 4) if not options.numbers else (0, 2, 5))


def print_rows(rows: list[list[str]], right: Iterable[int]) -> None:
    if not rows:
        return
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        say(" ".join([*cells, row[-1]]))


@click.command("cat", short_help="Write files to standard output.", epilog="Example: ff fs cat /data/raw/hello")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@files_options
def cat_command(*, paths: tuple[str, ...], places: PathResolver) -> None:
    """Write the content of files to standard output, one after the other."""
    block = memoryview(bytearray(BLOCK_BYTES))
    for path in paths:
        with places.each(path):
            place = places.remote(path)
            file = place.tree.open(place.path, "rb")
            try:
                while count := file.readinto(block):
                    write_out(block[:count])
            finally:
                file.close()
    flush_out()


_KINDS: Final = {
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


@click.command("stat", short_help="Show the attributes of files.", epilog="Example: ff fs stat /data/raw/hello")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-L", "--dereference", "follow", is_flag=True, help="Follow symbolic links.  [default: show the link]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@files_options
def stat_command(*, paths: tuple[str, ...], follow: bool, as_json: bool, places: PathResolver) -> None:
    """Show type, size, inode, owner, times and layout (chunk size and stripe) of files."""
    names = _Names(numeric=False)
    for path in paths:
        with places.each(path):
            place = places.remote(path)
            at = place.tree.stat(place.path, follow)
            target = place.tree.readlink(place.path) if stat.S_ISLNK(at.st_mode) else None
            layout = getattr(getattr(getattr(at, "inode", None), "body", None), "layout", None)
            if as_json:
                say(to_json(path, at, target, layout).decode())
                continue
            say(f"  File: {path}" + (f" -> {target}" if target is not None else ""))
            kind = _KINDS[stat.S_IFMT(at.st_mode)]
            say(f"  Size: {at.st_size:<15} Inode: {at.st_ino:<12} Links: {at.st_nlink:<5} {kind}")
            say(
                f"Access: ({stat.S_IMODE(at.st_mode):04o}/{stat.filemode(at.st_mode)})  "
                f"Uid: ({at.st_uid}/{names.user(at.st_uid)})  Gid: ({at.st_gid}/{names.group(at.st_gid)})"
            )
            if layout is not None:
                say(f"Layout: chunks of {layout.chunk_bytes} bytes on {layout.stripe} chains of table {layout.table}")
            for word, at_ns in (("Access", at.st_atime_ns), ("Modify", at.st_mtime_ns), ("Change", at.st_ctime_ns)):
                say(f"{word}: {_time_text(at_ns)}")


def to_json(path: str, at: Attributes, target: str | None, layout: Layout | None) -> bytes:
    """Of `ff fs stat --json`."""
    fields = ("ino", "nlink", "uid", "gid", "size", "atime_ns", "mtime_ns", "ctime_ns")
    shown = {"path": path, "kind": _KINDS[stat.S_IFMT(at.st_mode)], "mode": stat.S_IMODE(at.st_mode)}
    shown |= {name: getattr(at, f"st_{name}") for name in fields}
    shown |= {"target": target} if target is not None else {}
    shown |= (
        {"chunk_bytes": layout.chunk_bytes, "stripe": layout.stripe, "table": layout.table}
        if layout is not None
        else {}
    )
    return msgspec.json.encode(shown)


def _time_text(at_ns: int) -> str:
    there = time.localtime(at_ns // 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', there)}.{at_ns % 10**9:09d} {time.strftime('%z', there)}"
