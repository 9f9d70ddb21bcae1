"""What commands on files have in common: where paths are, how errors of single files are told, and how work is shown.

A path is one of the cluster that `--dir` or `--manager` names (by default FIREFLYER_FS, then ./fs, then
./platform/storage), or an address `ff://…` that names its cluster itself. Only `put`, `get` and `sync` have paths of
this machine, and say which.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import posixpath
import sys
import threading
from collections.abc import Callable, Iterator
from shlex import quote
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import click
import msgspec

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.cli.fs.connect import TARGET_VARIABLE, ClusterTarget, cluster_options, named, target_of
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem
    from fireflyer.fs.client.ring import Ring
    from fireflyer.fs.tools.plans import Step

__all__ = [
    "TARGET_VARIABLE",
    "Bars",
    "PathResolver",
    "TreePath",
    "clean",
    "files_options",
    "flush_out",
    "jobs_option",
    "reason",
]
__all__ += ["say", "write_out"]

DEFAULT_JOBS: Final = 8
MAX_JOBS: Final = 256
SETTINGS: Final = {"help_option_names": ["--help"]}
"""Of commands whose -h is "human-readable"."""


class TreePath(msgspec.Struct, frozen=True):
    tree: Any
    """A `fireflyer.fs.tools.trees.Tree`."""
    path: str
    """Absolute, as it is in the tree."""
    given: str
    """As it was typed, for messages and listings."""
    remote: bool = True

    @property
    def ends_in_slash(self) -> bool:
        return self.given.endswith("/")

    def below(self, name: str) -> TreePath:
        """`name`: also several names with slashes between them, or nothing."""
        from fireflyer.fs.tools.trees import join

        return msgspec.structs.replace(self, path=join(self.path, name), given=join(self.given, name))


class PathResolver:
    """Connections to the clusters that the arguments of one command name, and the errors that it has met."""

    def __init__(
        self, directory: str | None, managers: tuple[str, ...], token_file: str | None, secret_file: str | None
    ) -> None:
        self._directory, self._managers = directory, managers
        self._token_file, self._secret_file = token_file, secret_file
        self._trees: dict[str, FileSystem] = {}
        self._lock = threading.Lock()
        self.bars: Bars | None = None
        self.failures = 0
        self._unreached: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tree in self._trees.values():
            with contextlib.suppress(FireflyerError, OSError):
                tree.close()

    def remote(self, text: str) -> TreePath:
        """Raises `UsageError`, and what connecting raises."""
        from fireflyer.fs.tools.addresses import SCHEME, Address, clean_path, parse_address

        if text.startswith(SCHEME):
            address = parse_address(text)
        elif text.startswith("/"):
            address = Address(path=text)
        else:
            raise UsageError(
                f"{text!r} is not a path in the cluster: those begin with / or {SCHEME}, for example "
                f"/{text.lstrip('./')}"
            )
        return TreePath(self._tree(address.target), clean_path(address.path), text)

    def local(self, text: str) -> TreePath:
        from fireflyer.fs.tools.trees import LocalTree

        if not text:
            raise UsageError("a path is an empty string; give the path of a file or directory")
        return TreePath(LocalTree(), os.path.abspath(text), text, remote=False)

    def either(self, text: str) -> TreePath:
        """Of this machine unless it begins with `ff://`."""
        from fireflyer.fs.tools.addresses import SCHEME

        return self.remote(text) if text.startswith(SCHEME) else self.local(text)

    def _tree(self, target: str) -> FileSystem:
        target = target or target_of(self._directory, self._managers)
        tree = self._trees.get(target)
        if tree is None:
            try:
                tree = self._trees[target] = connect(self._where(target))
            except FireflyerError as error:
                self._unreached = error
                raise
        return tree

    def ring(self) -> Ring:
        """To all chunks of the cluster that the options name. Raises `UsageError` without the node secret."""
        from fireflyer.fs.client.local import open_ring_to
        from fireflyer.fs.client.ring import open_ring
        from fireflyer.identity import NodeCredential

        where = self._where(target_of(self._directory, self._managers))
        if where.directory:
            return open_ring_to(where.directory)
        if not isinstance(where.credential, NodeCredential):
            raise UsageError(
                "listing the chunks of all users needs the node secret; give --secret-file, not --token-file"
            )
        return open_ring(where.managers, where.credential)

    def _where(self, target: str) -> ClusterTarget:
        return named(target, self._token_file, self._secret_file)

    # --- errors of single files: the command goes on with the others, and ends with 1 ---

    def fail(self, path: str, error: Exception | str) -> None:
        text = f"error: {clean(path)}: {' '.join(reason(error).split())}"
        if _over_quota(error) and (directories := self._quotas_above(path)):
            text += f"; see: ff fs quota {clean(' '.join(map(quote, directories)))}"
        with self._lock:
            self.failures += 1
            if self.bars is None or not self.bars.say(text):
                sys.stderr.write(text + "\n")

    def _quotas_above(self, path: str) -> list[str]:
        """Directories with a quota that count what is at `path`, the innermost first; none where that is not known."""
        if len(self._trees) != 1 or not path.startswith("/"):
            return []
        (tree,) = self._trees.values()
        found = []
        above = path
        while above != "/":
            above = posixpath.dirname(above)
            try:
                tree.get_quota(above)
            except (FireflyerError, OSError):
                continue  # most have none
            found.append(above)
        return found

    @contextlib.contextmanager
    def each(self, path: str) -> Iterator[None]:
        """What cannot be done to this path is told, and the next follows; but not when the cluster is not there."""
        try:
            yield
        except BrokenPipeError:
            raise
        except (FireflyerError, OSError) as error:
            if isinstance(error, UsageError) or error is self._unreached:
                raise
            self.fail(str(getattr(error, "filename", None) or path), error)

    @property
    def code(self) -> int:
        return 1 if self.failures else 0


def _over_quota(error: Exception | str) -> bool:
    """Of the cluster: a disk of this machine may have quotas too."""
    from fireflyer.fs.schema.errors import FileError

    return isinstance(error, FileError) and error.errno == errno.EDQUOT


def connect(where: ClusterTarget) -> FileSystem:
    """The blocking file system of a cluster."""
    from fireflyer.fs import connect as connect_files

    if where.directory:
        return connect_files(f"ff://{where.directory}")
    return connect_files(f"ff://{','.join(where.managers)}", credential=where.credential)


def files_options(function: Callable[..., object]) -> Callable[..., object]:
    """Which cluster; the command gets it as `places`, and returns its exit code or None for that of `places`."""

    @functools.wraps(function)
    def call(
        *args: object,
        directory: str | None,
        managers: tuple[str, ...],
        token_file: str | None,
        secret_file: str | None,
        **options: object,
    ) -> object:
        with PathResolver(directory, managers, token_file, secret_file) as places:
            code = function(*args, places=places, **options)
            return places.code if code is None else code

    return cluster_options(call)


jobs_option = click.option(
    "-j",
    "--jobs",
    type=WholeNumber(min=1, max=MAX_JOBS),
    default=DEFAULT_JOBS,
    show_default=True,
    metavar="N",
    help="Number of files at a time.",
)


def reason(error: Exception | str) -> str:
    """In the words of the system, without a path."""
    if isinstance(error, str):
        return error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return str(error)


def clean(text: str) -> str:
    """For a terminal: what is not printable would act on it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def say(text: str, end: bytes = b"\n") -> None:
    """A line on standard output: names as they are, but for a terminal."""
    with _standard_output():
        sys.stdout.flush()
    if sys.stdout.isatty():
        text = clean(text)
    write_out(os.fsencode(text) + end)


def write_out(data: bytes | memoryview) -> None:
    with _standard_output():
        sys.stdout.buffer.write(data)


def flush_out() -> None:
    with _standard_output():
        sys.stdout.buffer.flush()


@contextlib.contextmanager
def _standard_output() -> Iterator[None]:
    """What goes wrong there is no error of the path that is shown, and the end."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        from fireflyer.cli.output import lost_output

        raise lost_output(error) from error


class Bars:
    """How far long work is, on standard error where that is a terminal; nothing otherwise."""

    def __init__(
        self, places: PathResolver, what: str, *, counts: str = "", quiet: bool = False, verbose: bool = False
    ) -> None:
        """`counts`: of what, where it is not bytes."""
        self._places, self._what, self._verbose = places, what, verbose
        self._counts = counts
        self._progress: Any = None
        self._task: Any = None
        self._shown = not quiet and sys.stderr.isatty()

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns: list[Any] = [TextColumn("{task.description}"), BarColumn()]
            if self._counts:
                columns += [TextColumn("{task.completed} " + self._counts)]
            else:
                columns += [DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()]
            self._progress = Progress(
                *columns,
                console=Console(file=sys.stderr, highlight=False, markup=False, emoji=False),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=None)
        self._places.bars = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.bars = None
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> bool:
        """Above the bar; False where there is none."""
        if self._progress is None:
            return False
        self._progress.console.print(text, soft_wrap=True)
        return True

    def total(self, size: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, total=size)

    def at(self, done: int, total: int | None = None, what: str | None = None) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, description=what)

    # --- `fireflyer.fs.tools.running.Observer` ---

    def advanced(self, size: int) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, size)

    def done(self, step: Step) -> None:
        if self._verbose:
            text = clean(f"{getattr(step, 'path', 'removed')} -> {step.place}")
            if not self.say(text):
                say(text)

    def failed(self, path: str, error: Exception) -> None:
        self._places.fail(str(getattr(error, "filename", None) or path), error)
