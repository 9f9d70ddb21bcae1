"""Looks a whole file system over while it is used: names against inodes, chunks against files, both ways.

    chunks    all chains are walked side by side, and the files that they tell of are asked for (`fsck_chunks`)
    names     every directory is listed
    again     what looked wrong is looked at once more, `SETTLE_S` later: by then writers have reported their lengths,
              and what was in between two steps is not any more

Asks grow with the chunks and the names that there are. In memory are pages of both, a few bits for each name, what is
in between (`MAX_DOUBTS`), and what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.ring import Ring
from fireflyer.fs.core.meta.fsck.compare import Fault, Name, NamespaceCheck, lasting
from fireflyer.fs.schema.inodes import Inode, InodeId
from fireflyer.fs.tools.fsck_chunks import ChunkCheck, OrphanChunks

__all__ = ["Fsck", "OrphanChunks", "Summary"]

SETTLE_S: Final = 6.0
"""Longer than writers wait with a report of a length."""
LOOKS: Final = 5
"""At a directory that changes while it is read."""

Progress = Callable[[str, int, int | None], None]


class Summary(msgspec.Struct):
    directories: int = 0
    others: int = 0
    """Names of all else."""
    chunks: int = 0
    asks: int = 0
    """Lists of chunks that were asked for."""
    faults: list[Fault] = msgspec.field(default_factory=list)
    unowned: list[OrphanChunks] = msgspec.field(default_factory=list)


class Fsck:
    """`files` and `ring` have the right to everything. `progress` hears what is done, how far, and of how much."""

    def __init__(self, files: FileSystem, ring: Ring, *, progress: Progress) -> None:
        self._files, self._ring = files, ring
        self._progress = progress
        self.summary = Summary()

    def run(self, *, chunks: bool = True, settle_s: float = SETTLE_S) -> Summary:
        """Raises `FireflyerError` or `OSError` for what could not be looked at."""
        summary, wrong = self.summary, list[Fault]()
        if chunks:
            check = self._chunks(settle_s)
            check.run()
            summary.chunks, summary.asks, summary.unowned, wrong = check.chunks, check.asks, check.unowned, check.faults
        paths = dict.fromkeys((fault.inode for fault in wrong), "")
        found = self._walk(paths).faults()
        if found:
            self._progress("Checking faults again", 0, None)
            threading.Event().wait(settle_s)
            summary.faults += lasting(found, self._walk({}).faults())
        summary.faults += [msgspec.structs.replace(fault, path=paths[fault.inode]) for fault in wrong]
        return summary

    def remove(self, unowned: Iterable[OrphanChunks]) -> int:
        """Chunks that nobody owns. How many are gone."""
        unowned = list(unowned)
        total = sum(one.chunks for one in unowned)
        return self._chunks(0).remove(unowned, lambda done: self._progress("Removing", done, total))

    def _chunks(self, settle_s: float) -> ChunkCheck:
        return ChunkCheck(
            self._files, self._ring, progress=lambda done: self._progress("Chunks", done, None), settle_s=settle_s
        )

    def _walk(self, paths: dict[InodeId, str]) -> NamespaceCheck:
        """The names; and in `paths` one of each of these inodes that has any."""
        root = self._files.stat("/").inode
        names, summary = NamespaceCheck(root), self.summary
        waiting = [("/", root.id)]
        directories = others = 0
        while waiting:
            path, number = waiting.pop()
            found = self._listed(path, number)
            if found is None:
                continue
            inode, entries, steady = found
            below = names.directory(path, inode, entries, steady=steady)
            waiting += [(_under(path, one), one.inode.id) for one in below]
            directories += 1
            others += len(entries) - len(below)
            for one in entries:
                if one.inode.id in paths and not paths[one.inode.id]:
                    paths[one.inode.id] = _under(path, one)
            self._progress("Names", directories + others, None)
        summary.directories, summary.others = directories, others
        return names

    def _listed(self, path: str, number: InodeId) -> tuple[Inode, list[Name], bool] | None:
        """With the directory as it was before, and whether it is so still. None: it is gone."""
        tries = 0
        while True:
            try:
                before = self._files.stat(path, False).inode
                if before.id != number:
                    return None
                entries = [Name(one.name, one.attributes.inode) for one in self._files.scandir(path)]
                steady = self._files.stat(path, False).inode == before
            except (FileNotFoundError, NotADirectoryError):
                return None
            tries += 1
            if steady or tries == LOOKS:
                return before, entries, steady


def _under(path: str, one: Name) -> str:
    return f"{path.rstrip('/')}/{one.name}"
