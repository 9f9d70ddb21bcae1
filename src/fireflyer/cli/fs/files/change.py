"""`ff fs mkdir`, `touch`, `chown`, `chmod`, `mv`, `rm`: names, in the manner of coreutils."""

from __future__ import annotations

import errno
import os
import posixpath
import stat

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.fs.files.common import Bars, PathResolver, TreePath, clean, files_options, say

__all__ = ["chmod_command", "chown_command", "into", "mkdir_command", "mv_command", "rm_command", "touch_command"]

MAX_ID = (1 << 32) - 2


def _octal(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise click.BadParameter(f"{text!r} is not an octal mode; write it like 755 or 2775")
    return mode


@click.command("mkdir", short_help="Make directories.", epilog="Example: ff fs mkdir -p /data/raw")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-p", "--parents", is_flag=True, help="Make parent directories too; an existing directory is no error.")
@click.option(
    "-m", "--mode", callback=_octal, metavar="OCTAL", help="Permissions, like 755.  [default: 777 without the umask]"
)
@click.option("-v", "--verbose", is_flag=True, help="Print each directory that is made.")
@files_options
def mkdir_command(
    *, paths: tuple[str, ...], parents: bool, mode: int | None, verbose: bool, places: PathResolver
) -> None:
    """Make directories."""
    for path in paths:
        with places.each(path):
            place = places.remote(path)
            if parents:
                try:
                    if stat.S_ISDIR(place.tree.stat(place.path).st_mode):
                        continue
                except FileNotFoundError:
                    place.tree.makedirs(posixpath.dirname(place.path), exist_ok=True)
            try:
                place.tree.mkdir(place.path, 0o777 if mode is None else mode)
            except FileExistsError:
                if not parents or not stat.S_ISDIR(place.tree.stat(place.path).st_mode):
                    raise
            if mode is not None:
                place.tree.chmod(place.path, mode)
            if verbose:
                say(f"{path}: made")


@click.command("touch", short_help="Make empty files, or set times to now.", epilog="Example: ff fs touch /data/done")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-c", "--no-create", "keep_missing", is_flag=True, help="Do not make files; a missing PATH is no error.")
@files_options
def touch_command(*, paths: tuple[str, ...], keep_missing: bool, places: PathResolver) -> None:
    """Make an empty file at each PATH where there is none. Set the access and modification times of existing files and
    directories to now; symbolic links are followed."""
    for path in paths:
        with places.each(path):
            place = places.remote(path)
            try:
                if place.ends_in_slash and not stat.S_ISDIR(place.tree.stat(place.path).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", place.given)
                place.tree.utime(place.path)
            except FileNotFoundError:
                if keep_missing:
                    continue
                if place.ends_in_slash:
                    raise
                place.tree.open(place.path, "ab").close()  # "ab": data that another process wrote by now stays


def _owner(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int]:
    """uid and gid; -1: it stays."""
    uid, colon, gid = text.partition(":")
    numbers = [int(one) if one.isascii() and one.isdigit() and len(one) <= 10 else -1 for one in (uid, gid or uid)]
    if any(not 0 <= one <= MAX_ID for one in numbers) or (colon and not gid):
        raise click.BadParameter(f"{text!r} is not UID or UID:GID; write it like 1000 or 1000:100 (ff user list)")
    return numbers[0], numbers[1] if colon else -1


@click.command("chown", short_help="Give files to another user.", epilog="Example: ff fs chown 1201:1201 /ann")
@click.argument("owner", metavar="UID[:GID]", callback=_owner)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@files_options
def chown_command(*, owner: tuple[int, int], paths: tuple[str, ...], places: PathResolver) -> None:
    """Give each PATH to the user UID, and to the group GID where there is one. Of a symbolic link, the link itself.
    Administrators may, and of groups the owner who is in them."""
    for path in paths:
        with places.each(path):
            place = places.remote(path)
            place.tree.chown(place.path, *owner, follow=False)


@click.command("chmod", short_help="Set the permissions of files.", epilog="Example: ff fs chmod 755 /ann")
@click.argument("mode", metavar="OCTAL", callback=_octal)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@files_options
def chmod_command(*, mode: int, paths: tuple[str, ...], places: PathResolver) -> None:
    """Set the permissions of each PATH to OCTAL, like 755; of a symbolic link, those of what it leads to. The owner
    may, and administrators."""
    for path in paths:
        with places.each(path):
            place = places.remote(path)
            place.tree.chmod(place.path, mode)


@click.command("rm", short_help="Remove files and directories.", epilog="Example: ff fs rm -r /data/kept")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-r", "-R", "--recursive", "recursive", is_flag=True, help="Remove directories with all they contain.")
@click.option("-d", "empty", is_flag=True, help="Remove empty directories.")
@click.option("-f", "--force", is_flag=True, help="A missing file is no error.")
@click.option("-v", "--verbose", is_flag=True, help="Print each PATH that is removed.")
@files_options
def rm_command(
    *, paths: tuple[str, ...], recursive: bool, empty: bool, force: bool, verbose: bool, places: PathResolver
) -> None:
    """Remove files, and directories with -r, without a question. Symbolic links are removed, not followed. Where a
    trash is set (`ff fs defaults --trash`), what is removed is moved there."""
    with Bars(places, "Removing", counts="names") as bars:
        for path in paths:
            with places.each(path):
                place = places.remote(path)
                if place.path == "/" or posixpath.basename(place.path) in (".", ".."):
                    raise UsageError(f"{path}: the root, . and .. cannot be removed; give the names in it")
                try:
                    _remove(place, recursive, empty, bars)
                except FileNotFoundError:
                    if not force:
                        raise
                    continue
                if verbose and not bars.say(f"{clean(path)}: removed"):
                    say(f"{path}: removed")


def _remove(place: TreePath, recursive: bool, empty: bool, bars: Bars) -> None:
    if not stat.S_ISDIR(place.tree.stat(place.path, False).st_mode):
        place.tree.unlink(place.path)
    elif recursive:
        place.tree.rmtree(place.path, progress=bars.at)
    elif empty:
        place.tree.rmdir(place.path)
    else:
        raise IsADirectoryError(errno.EISDIR, "is a directory; -r removes it with all it contains", place.given)


@click.command(
    "mv", short_help="Rename, or move to another directory.", epilog="Example: ff fs mv /data/copy /data/kept"
)
@click.argument("paths", metavar="SOURCE... TARGET", nargs=-1, required=True)
@click.option("-n", "--no-clobber", "keep", is_flag=True, help="Fail if the target exists, do not replace it.")
@click.option(
    "-T", "--no-target-directory", "exact", is_flag=True, help="TARGET is the new name, not a directory to move into."
)
@click.option("-v", "--verbose", is_flag=True, help="Print each file that is moved.")
@files_options
def mv_command(*, paths: tuple[str, ...], keep: bool, exact: bool, verbose: bool, places: PathResolver) -> None:
    """Rename SOURCE to TARGET, or move it into TARGET if that is a directory. Atomic and immediate, whatever the size;
    an existing file is replaced. Only within one cluster, and not into or out of a directory with a quota: use `cp` and
    `rm` there."""
    *sources, last = _at_least_two(paths)
    target = places.remote(last)
    for path in sources:
        with places.each(path):
            source = places.remote(path)
            if source.tree is not target.tree:
                raise UsageError(f"{path} and {last} are in different clusters; use 'ff fs cp' and 'ff fs rm'")
            place = target if exact else into(target, path, several=len(sources) > 1)
            if not place.tree.stat(source.path, False):
                continue
            try:
                place.tree.rename(source.path, place.path, 1 if keep else 0)
            except OSError as error:
                error.filename = f"{path} -> {place.given}"
                raise
            if verbose:
                say(f"{path} -> {place.given}")


def _at_least_two(paths: tuple[str, ...]) -> tuple[str, ...]:
    if len(paths) < 2:
        raise UsageError(f"only one path is given ({paths[0]!r}); give the source and the target")
    return paths


def into(target: TreePath, source: str, *, several: bool = False) -> TreePath:
    """`target`, or the name of `source` in it where it is a directory. Raises `UsageError` where it must be one and is
    not."""
    try:
        directory = stat.S_ISDIR(target.tree.stat(target.path).st_mode)
    except FileNotFoundError:
        directory = False
    if directory:
        name = os.path.basename(source.rstrip("/"))
        if name in ("", ".", ".."):
            raise UsageError(f"{source} has no file name to use in {target.given}; give the full target path")
        return target.below(name)
    if several or target.ends_in_slash:
        why = "several sources need one" if several else "the / at its end asks for one"
        raise UsageError(f"{target.given} is not a directory, and {why}; create it first, or give another target")
    return target
