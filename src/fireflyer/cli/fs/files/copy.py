"""`ff fs cp`, `put`, `get`, `sync`: copying, several files at a time.

A file has its final name when all of it is there. What is interrupted leaves large files under a temporary name beside
the target, and the same command goes on with them (`fireflyer.fs.tools.copying`).
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
import stat
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import counted, format_bytes
from fireflyer.cli.fs.files.change import into
from fireflyer.cli.fs.files.common import Bars, PathResolver, TreePath, files_options, jobs_option, say

if TYPE_CHECKING:
    from fireflyer.fs.tools.copying import CopyOptions
    from fireflyer.fs.tools.plans import Step
    from fireflyer.fs.tools.trees import Attributes, CopyTree

__all__ = ["cp_command", "get_command", "put_command", "sync_command"]

STDIN_BLOCK_BYTES: Final = 4 << 20
_OPTIONS = (
    click.option("-r", "-R", "--recursive", "recursive", is_flag=True, help="Copy directories with all they contain."),
    click.option("-p", "--preserve", is_flag=True, help="Keep permissions and times, and owners if permitted."),
    click.option("-n", "--no-clobber", "keep", is_flag=True, help="Do not replace existing files."),
    click.option("-v", "--verbose", is_flag=True, help="Print each file that is copied."),
    click.option("-q", "--quiet", is_flag=True, help="Show no progress bar."),
    jobs_option,
)


class _Flags(TypedDict):
    recursive: bool
    preserve: bool
    keep: bool
    verbose: bool
    quiet: bool
    jobs: int


def _copy_options(function: Callable[..., object]) -> Callable[..., object]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command(
    "cp", short_help="Copy within the cluster, or to another.", epilog="Example: ff fs cp -r /data/notes /data/copy"
)
@click.argument("paths", metavar="SOURCE... TARGET", nargs=-1, required=True)
@_copy_options
@files_options
def cp_command(*, paths: tuple[str, ...], places: PathResolver, **flags: Unpack[_Flags]) -> None:
    """Copy SOURCE to TARGET, or into TARGET if that is a directory. Both are in clusters; the data pass through this
    machine."""
    _copy(places, paths, places.remote, places.remote, "Copying", **flags)


@click.command(
    "put", short_help="Copy from this machine into the cluster.", epilog="Example: ff fs put -r -p notes /data"
)
@click.argument("paths", metavar="LOCAL... TARGET", nargs=-1, required=True)
@_copy_options
@files_options
def put_command(*, paths: tuple[str, ...], places: PathResolver, **flags: Unpack[_Flags]) -> None:
    """Copy files of this machine to TARGET in the cluster, or into TARGET if that is a directory. LOCAL `-` is standard
    input."""
    if len(paths) == 2 and paths[0] == "-":
        _from_stdin(places.remote(paths[1]))
        return
    _copy(places, paths, places.local, places.remote, "Putting", **flags)


@click.command(
    "get", short_help="Copy from the cluster to this machine.", epilog="Example: ff fs get -r /data/kept back"
)
@click.argument("paths", metavar="SOURCE... LOCAL", nargs=-1, required=True)
@_copy_options
@files_options
def get_command(*, paths: tuple[str, ...], places: PathResolver, **flags: Unpack[_Flags]) -> None:
    """Copy SOURCE in the cluster to LOCAL on this machine, or into LOCAL if that is a directory. To write to standard
    output use `ff fs cat`."""
    _copy(places, paths, places.remote, places.local, "Getting", **flags)


def _copy(
    places: PathResolver,
    paths: tuple[str, ...],
    source_of: Callable[[str], TreePath],
    target_of: Callable[[str], TreePath],
    what: str,
    *,
    recursive: bool,
    preserve: bool,
    keep: bool,
    verbose: bool,
    quiet: bool,
    jobs: int,
) -> None:
    from fireflyer.fs.tools.copying import CopyOptions

    if len(paths) < 2:
        raise UsageError(f"only one path is given ({paths[0]!r}); give the source and the target")
    *given, last = paths
    target = target_of(last)
    with Bars(places, what, quiet=quiet, verbose=verbose) as bars:
        # Of one tree each: sources of several clusters are copied one after the other.
        for text in given:
            with places.each(text):
                source = source_of(text)
                place = into(target, text, several=len(given) > 1)
                _check(source, place)
                name = "" if source.remote else "local:"
                options = CopyOptions(mode=preserve, times=preserve, owner=preserve, source_name=name)
                _copy_one(places, source, place, options, bars, recursive=recursive, keep=keep, jobs=jobs)


def _copy_one(
    places: PathResolver,
    source: TreePath,
    place: TreePath,
    options: CopyOptions,
    bars: Bars,
    *,
    recursive: bool,
    keep: bool,
    jobs: int,
) -> None:
    from fireflyer.fs.tools.beneath import beneath
    from fireflyer.fs.tools.plans import CopyFile, CopyLink, plan_copy
    from fireflyer.fs.tools.running import Runner

    with contextlib.ExitStack() as held:
        read = source.tree
        if stat.S_ISDIR(read.stat(source.path).st_mode):  # a file that was named is followed wherever it leads
            read = held.enter_context(beneath(read, source.path))
        written = held.enter_context(beneath(place.tree, posixpath.dirname(place.path)))

        def failed(error: OSError) -> None:
            places.fail(str(error.filename), error)

        steps: list[Step] = list(plan_copy(read, source.path, place.path, recursive=recursive, failed=failed))
        if keep:
            steps = [one for one in steps if not isinstance(one, CopyFile | CopyLink) or not _there(written, one)]
        bars.total(sum(one.attributes.st_size for one in steps if isinstance(one, CopyFile)))
        Runner(read, written, options, bars, workers=jobs).run(steps)


def _there(target: CopyTree, step: Step) -> bool:
    try:
        target.stat(step.place, False)
    except OSError:
        return False
    return True


def _check(source: TreePath, place: TreePath) -> None:
    """A file copied onto itself, by whatever name, would be lost; a directory into itself would never end."""
    from fireflyer.fs.tools.plans import check_not_inside

    if type(source.tree) is not type(place.tree) or (source.remote and source.tree is not place.tree):
        return
    check_not_inside(source.path, place.path)
    wanted = _identity(source.tree.stat(source.path))
    try:
        if _identity(place.tree.stat(place.path)) == wanted:
            raise UsageError(f"{source.given} and {place.given} are the same file; give another target")
    except FileNotFoundError:
        pass
    above = posixpath.dirname(place.path)
    before = None
    # Physically upwards, as symbolic links lead: the root is where ".." leads nowhere else.
    while (here := _identity(place.tree.stat(above))) != before:
        if here == wanted:
            raise UsageError(f"{place.given} is inside {source.given}: a directory cannot be copied into itself")
        above, before = f"{above.rstrip('/')}/..", here


def _identity(attributes: Attributes) -> tuple[int, int]:
    return getattr(attributes, "st_dev", 0), attributes.st_ino


def _from_stdin(place: TreePath) -> None:
    """The target has its name when standard input has ended."""
    import uuid

    temporary = f"{posixpath.dirname(place.path).rstrip('/')}/.ff-put-{uuid.uuid4().hex}"
    if stat.S_ISDIR(_mode(place)):
        raise IsADirectoryError(errno.EISDIR, "is a directory; for standard input give the name of a file", place.given)
    file = place.tree.open(temporary, "xb")
    try:
        try:
            while block := sys.stdin.buffer.read(STDIN_BLOCK_BYTES):
                view = memoryview(block)
                while view:
                    view = view[file.write(view) or 0 :]
        finally:
            file.close()
        place.tree.rename(temporary, place.path)
    except BaseException:
        place.tree.unlink(temporary)
        raise


def _mode(place: TreePath) -> int:
    try:
        return int(place.tree.stat(place.path).st_mode)
    except FileNotFoundError:
        return 0


@click.command(
    "sync",
    short_help="Make one directory equal to another.",
    epilog="Example: ff fs sync --delete notes ff:///data/notes",
)
@click.argument("source_text", metavar="SOURCE")
@click.argument("target_text", metavar="TARGET")
@click.option("--delete", is_flag=True, help="Remove from TARGET what is not in SOURCE.")
@click.option(
    "-c", "--checksum", is_flag=True, help="Compare the content of files of the same size, not modification times."
)
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Print what is done.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress bar and no summary.")
@jobs_option
@files_options
def sync_command(
    *,
    source_text: str,
    target_text: str,
    delete: bool,
    checksum: bool,
    dry: bool,
    verbose: bool,
    quiet: bool,
    jobs: int,
    places: PathResolver,
) -> None:
    """Make the directory TARGET equal to the directory SOURCE: content, permissions and times.

    Paths in the cluster begin with ff://, as ff:///data; others are of this machine. A file of the same size and
    modification time counts as equal. Nothing is removed without --delete, or if parts of SOURCE could not be read.
    """
    from fireflyer.fs.tools.beneath import beneath
    from fireflyer.fs.tools.copying import CopyOptions
    from fireflyer.fs.tools.plans import CopyFile, SyncOptions, plan_sync
    from fireflyer.fs.tools.running import Runner

    source, target = places.either(source_text), places.either(target_text)
    if not (source.remote or target.remote):
        raise UsageError(
            f"neither {source_text!r} nor {target_text!r} is in the cluster; a path there begins with ff://, as "
            "ff:///data"
        )
    if not stat.S_ISDIR(source.tree.stat(source.path).st_mode):
        raise UsageError(f"{source_text} is not a directory; copy a file with cp, put or get")
    _check(source, target)
    with (
        beneath(source.tree, source.path) as read,
        beneath(target.tree, _named_directory(target)) as written,
        Bars(places, "Comparing", quiet=quiet, verbose=verbose) as bars,
    ):
        steps = list(
            plan_sync(
                read,
                source.path,
                written,
                target.path,
                SyncOptions(delete, checksum),
                failed=lambda error: places.fail(str(error.filename), error),
            )
        )
        if dry:
            _tell(steps)
            return
        bars.total(sum(one.attributes.st_size for one in steps if isinstance(one, CopyFile)))
        options = CopyOptions(mode=True, times=True, source_name="" if source.remote else "local:")
        runner = Runner(read, written, options, bars, workers=jobs)
        runner.run(steps)
    if not quiet:
        done = runner.counts
        say(
            f"{counted(done.files, 'file')} copied or changed ({format_bytes(done.bytes)}), {done.removed} removed"
            + (f", {done.failed} failed" if done.failed else "")
        )


def _named_directory(target: TreePath) -> str:
    """Where what is written begins: the target itself, or what it is to be made in."""
    try:
        there = stat.S_ISDIR(target.tree.stat(target.path).st_mode)
    except FileNotFoundError:
        there = False
    return target.path if there else posixpath.dirname(target.path)


def _tell(steps: Iterable[object]) -> None:
    from fireflyer.fs.tools.plans import CopyFile, CopyLink, MakeDirectory, Remove, SetAttributes

    for step in steps:
        match step:
            case Remove():
                say(f"remove {step.place}{'/' if step.tree else ''}")
            case MakeDirectory():
                say(f"make {step.place}/")
            case CopyFile(compare=True):
                say(f"compare {step.place}")
            case CopyFile() | CopyLink():
                say(f"copy {step.place}")
            case SetAttributes() if not stat.S_ISDIR(step.attributes.st_mode):
                say(f"change {step.place}")
