"""What is to be done to copy a tree, or to make one like another: plans first, carried out by `running`.

A plan is a sequence of steps in which a directory comes before what is in it. Steps on files and links may be done at
the same time; removals come last in a plan that makes trees equal, and only when the source was read without errors,
so a directory that could not be read never looks like an empty one.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterator

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.fs.tools.partial import is_partial
from fireflyer.fs.tools.trees import Attributes, CopyTree, join, walk

__all__ = ["CopyFile", "CopyLink", "MakeDirectory", "Remove", "SetAttributes", "Step", "SyncOptions"]
__all__ += ["check_not_inside", "plan_copy", "plan_sync"]

Failed = Callable[[OSError], None]


class MakeDirectory(msgspec.Struct, frozen=True):
    path: str
    place: str
    attributes: Attributes


class CopyFile(msgspec.Struct, frozen=True):
    path: str
    place: str
    attributes: Attributes
    compare: bool = False
    """Only where the content differs; there is a file of this size."""


class CopyLink(msgspec.Struct, frozen=True):
    path: str
    place: str


class SetAttributes(msgspec.Struct, frozen=True):
    """The content is the same already."""

    place: str
    attributes: Attributes


class Remove(msgspec.Struct, frozen=True):
    place: str
    tree: bool
    last: bool = True
    """After everything else; False: it is in the way of the next step."""


Step = MakeDirectory | CopyFile | CopyLink | SetAttributes | Remove


class SyncOptions(msgspec.Struct, frozen=True):
    delete: bool = False
    checksum: bool = False
    """Files of one size are compared by content, whatever their times say."""


def check_not_inside(path: str, place: str) -> None:
    """Of one tree. Raises `UsageError` when `place` is `path`, or below it. Both resolved."""
    if place == path:
        raise UsageError(f"{path} and {place} are the same file; give another target")
    if place.startswith(path.rstrip("/") + "/"):
        raise UsageError(f"{place} is inside {path}: a directory cannot be copied into itself")


def plan_copy(
    source: CopyTree, path: str, place: str, *, recursive: bool, follow: bool = True, failed: Failed | None = None
) -> Iterator[Step]:
    """`follow`: a symbolic link at `path` itself is followed; those below are copied as links. What is neither file,
    directory nor link is told to `failed`. Raises `OSError`, EISDIR for a directory that is not `recursive`."""
    if not recursive and stat.S_ISDIR(source.stat(path, follow).st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory; -r copies it", path)
    for found in walk(source, path, follow=follow, failed=failed):
        if is_partial(posixpath.basename(found.path)):
            continue
        step = _step(found.path, join(place, found.relative), found.attributes)
        if step is not None:
            yield step
        elif failed is not None:
            failed(OSError(errno.EINVAL, "neither file, directory nor link; left out", found.path))


def _step(path: str, place: str, attributes: Attributes) -> MakeDirectory | CopyFile | CopyLink | None:
    mode = attributes.st_mode
    if stat.S_ISDIR(mode):
        return MakeDirectory(path, place, attributes)
    if stat.S_ISREG(mode):
        return CopyFile(path, place, attributes)
    return CopyLink(path, place) if stat.S_ISLNK(mode) else None


def plan_sync(
    source: CopyTree, path: str, target: CopyTree, place: str, options: SyncOptions, *, failed: Failed
) -> Iterator[Step]:
    """Makes what is in the directory `place` as what is in the directory `path`: content, permission bits and times.
    A file of the same size and time of change is taken to be the same. Without `delete` nothing is removed, and what
    is of another kind is told to `failed`. Attributes of directories that stay are set too, since what happens in them
    changes their times."""
    return _Sync(source, target, options, failed).steps(path, place)


class _Sync:
    def __init__(self, source: CopyTree, target: CopyTree, options: SyncOptions, failed: Failed) -> None:
        self._source, self._target = source, target
        self._options, self._failed = options, failed
        self._removals: list[Remove] = []

    def steps(self, path: str, place: str) -> Iterator[Step]:
        clean = True
        waiting = [(path, place, self._source.stat(path))]
        while waiting:
            here, there, attributes = waiting.pop()
            try:
                wanted = {one.name: one.attributes for one in self._source.scandir(here) if not is_partial(one.name)}
            except OSError as error:
                clean = False
                self._failed(error)
                continue
            present = _present(self._target, there)
            yield MakeDirectory(here, there, attributes) if present is None else SetAttributes(there, attributes)
            present = present or {}
            below = []
            for name in sorted(wanted, key=os.fsencode):
                paths = join(here, name), join(there, name)
                one, other = wanted[name], present.get(name)
                if other is not None and stat.S_IFMT(other.st_mode) != stat.S_IFMT(one.st_mode):
                    if not self._options.delete:
                        self._failed(FileExistsError(errno.EEXIST, "of another kind; --delete replaces it", paths[1]))
                        continue
                    yield Remove(paths[1], stat.S_ISDIR(other.st_mode), last=False)
                    other = None
                if stat.S_ISDIR(one.st_mode):
                    below.append((*paths, one))
                else:
                    yield from self._difference(paths, one, other)
            self._removals += _extra(there, present, wanted)
            waiting += reversed(below)
        if self._options.delete and clean:
            yield from self._removals

    def _difference(self, paths: tuple[str, str], one: Attributes, other: Attributes | None) -> Iterator[Step]:
        if not (stat.S_ISREG(one.st_mode) or stat.S_ISLNK(one.st_mode)):
            self._failed(OSError(errno.EINVAL, "neither file, directory nor link; left out", paths[0]))
        elif stat.S_ISLNK(one.st_mode):
            if other is None or self._source.readlink(paths[0]) != self._target.readlink(paths[1]):
                yield CopyLink(*paths)
        elif other is None or one.st_size != other.st_size:
            yield CopyFile(*paths, one)
        elif self._options.checksum:
            yield CopyFile(*paths, one, compare=True)
        elif one.st_mtime_ns != other.st_mtime_ns:
            yield CopyFile(*paths, one)
        elif (one.st_mode ^ other.st_mode) & 0o1777:  # set-user-id is not kept without the owner
            yield SetAttributes(paths[1], one)


def _present(target: CopyTree, there: str) -> dict[str, Attributes] | None:
    """None: it is not there yet."""
    try:
        return {entry.name: entry.attributes for entry in target.scandir(there)}
    except (FileNotFoundError, NotADirectoryError):
        return None


def _extra(there: str, present: dict[str, Attributes], wanted: dict[str, Attributes]) -> list[Remove]:
    return [
        Remove(join(there, name), stat.S_ISDIR(present[name].st_mode))
        for name in sorted(present, key=os.fsencode)
        if name not in wanted and not is_partial(name)
    ]
