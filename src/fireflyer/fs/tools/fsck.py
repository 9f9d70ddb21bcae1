"""Looks a whole file system over while it is used: names against inodes, chunks against files, both ways.

    walk      every directory is listed; the chunks of files are listed on all chains, a few hundred files at a time
    sweep     chunks are asked for of every inode number that was ever given out and has no name
    again     what looked wrong is looked at once more, `SETTLE_S` later: by then writers have reported their lengths,
              and what was in between two steps is not any more

Which numbers were given out is found by making a file and removing it. The sweep costs asks in proportion to numbers
times chains, whether or not there are files; `sweep=False` leaves it out.
"""

from __future__ import annotations

import errno
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Final

import msgspec

from fireflyer.base.errors import FireflyerError
from fireflyer.fs.client.attributes import Attributes
from fireflyer.fs.client.file_system import FileSystem
from fireflyer.fs.client.ring import Ring
from fireflyer.fs.core.meta.comparing import Fault, FaultKind, Name, Names, lasting, wrong_chunks
from fireflyer.fs.schema.chunks import MAX_PAGE, Listed
from fireflyer.fs.schema.ids import ChainId, ChunkId
from fireflyer.fs.schema.inodes import FileBody, Inode, InodeId

__all__ = ["Fsck", "Summary", "Unowned"]

SETTLE_S: Final = 6.0
"""Longer than writers wait with a report of a length."""
LOOKS: Final = 5
"""At a directory that changes while it is read."""
FILES_TOGETHER: Final = 256
WINDOW: Final = 2048
"""Lists under way."""
BATCH_IDS: Final = 4096
"""Numbers that a meta service takes at once; others may have taken some that come later."""
SPARE_BATCHES: Final = 4

Progress = Callable[[str, int, int | None], None]
_There = dict[ChainId, tuple[Listed, ...]]


class Unowned(msgspec.Struct, frozen=True):
    """Chunks of what there is not."""

    inode: InodeId
    chunks: tuple[tuple[ChainId, ChunkId], ...]
    bytes: int


class Summary(msgspec.Struct):
    directories: int = 0
    others: int = 0
    """Names of all else."""
    chunks: int = 0
    swept: int = 0
    """Inode numbers."""
    faults: list[Fault] = msgspec.field(default_factory=list)
    unowned: list[Unowned] = msgspec.field(default_factory=list)


class Fsck:
    """`files` and `ring` have the right to everything. `progress` hears what is done, how far, and of how much."""

    def __init__(self, files: FileSystem, ring: Ring, *, progress: Progress) -> None:
        self._files, self._ring = files, ring
        self._progress = progress
        self._tables: dict[int, tuple[ChainId, ...]] = {}
        self._all = tuple(sorted(chain.id for chain in ring.routing.chains))
        self.summary = Summary()

    def run(self, *, sweep: bool = True, settle_s: float = SETTLE_S) -> Summary:
        """Raises `FireflyerError` or `OSError` for what could not be looked at."""
        names, wrong = self._walk(chunks=True)
        unowned = self._sweep(names.known) if sweep else {}
        faults = names.faults()
        if not (faults or wrong or unowned):
            return self.summary
        self._progress("Looking again", 0, None)
        threading.Event().wait(settle_s)
        if faults:
            again, _ = self._walk(chunks=False)
            self.summary.faults += lasting(faults, again.faults())
        self._wrong_again(wrong)
        self._unowned_again(unowned)
        return self.summary

    def remove(self, unowned: Iterable[Unowned]) -> int:
        """Chunks that nobody owns. How many are gone."""
        wanted = [place for one in unowned for place in one.chunks]
        for first in range(0, len(wanted), WINDOW):
            part = wanted[first : first + WINDOW]
            for tag, (chain, chunk) in enumerate(part):
                self._ring.prepare_remove(tag, chain, chunk)
            left = len(part)
            while left:
                over = self._ring.wait(1)
                left -= len(over.tags)
                for error in over.errors.values():
                    raise error
            self._progress("Removing", first + len(part), len(wanted))
        return len(wanted)

    # --- names, and the chunks of what has one ---

    def _walk(self, *, chunks: bool) -> tuple[Names, dict[InodeId, tuple[str, list[Fault]]]]:
        """The names; and of files with wrong chunks where they are and what is wrong."""
        root = self._files.stat("/").inode
        names, wrong = Names(root), dict[InodeId, tuple[str, list[Fault]]]()
        waiting, files = [("/", root)], list[tuple[str, Inode]]()
        summary = Summary()
        while waiting:
            path, inode = waiting.pop()
            found = self._listed(path, inode)
            if found is None:
                continue
            inode, entries, steady = found
            names.directory(path, inode, entries, steady=steady)
            summary.directories += 1
            for one in entries:
                below = f"{path.rstrip('/')}/{one.name}"
                if stat.S_ISDIR(Attributes(one.inode).st_mode):
                    waiting.append((below, one.inode))
                    continue
                summary.others += 1
                if isinstance(one.inode.body, FileBody) and chunks:
                    files.append((below, one.inode))
            while len(files) >= FILES_TOGETHER or (files and not waiting):
                wrong |= self._chunks_of(files[:FILES_TOGETHER])
                del files[:FILES_TOGETHER]
            self._progress("Names", summary.directories + summary.others, None)
        self.summary.directories, self.summary.others = summary.directories, summary.others
        return names, wrong

    def _listed(self, path: str, inode: Inode) -> tuple[Inode, list[Name], bool] | None:
        """With the directory as it was before, and whether it is so still. None: it is gone."""
        tries = 0
        while True:
            try:
                before = self._files.stat(path, False).inode
                if before.id != inode.id:
                    return None
                entries = [Name(one.name, one.attributes.inode) for one in self._files.scandir(path)]
                steady = self._files.stat(path, False).inode == before
            except (FileNotFoundError, NotADirectoryError):
                return None
            tries += 1
            if steady or tries == LOOKS:
                return before, entries, steady

    def _chunks_of(self, files: list[tuple[str, Inode]]) -> dict[InodeId, tuple[str, list[Fault]]]:
        wrong = {}
        there = dict(self._lists(inode.id for _, inode in files))
        for path, inode in files:
            chunks = there.get(inode.id, {})
            self.summary.chunks += sum(map(len, chunks.values()))
            body = inode.body
            assert isinstance(body, FileBody)  # noqa: S101
            faults = wrong_chunks(path, inode, self._chains(body.layout.table), chunks)
            if faults:
                wrong[inode.id] = path, faults
        return wrong

    def _chains(self, table: int) -> tuple[ChainId, ...]:
        if table not in self._tables:
            self._tables[table] = self._ring.chains(table)
        return self._tables[table]

    def _wrong_again(self, wrong: dict[InodeId, tuple[str, list[Fault]]]) -> None:
        for (inode, (path, faults)), now in zip(wrong.items(), self._files.stat_inodes(wrong), strict=True):
            if isinstance(now, Attributes) and now.inode.links:
                _, again = self._chunks_of([(path, now.inode)]).get(inode, (path, []))
                self.summary.faults += lasting(faults, again)

    # --- chunks of what has no name ---

    def _sweep(self, known: set[InodeId]) -> dict[InodeId, _There]:
        top = self._newest()
        swept = [number for number in range(1, top) if number not in known]
        self.summary.swept = len(swept)
        found = {}
        for done, (inode, there) in enumerate(self._lists(iter(swept), every=True), 1):
            if there:
                found[inode] = there
            if not done % BATCH_IDS or done == len(swept):
                self._progress("Numbers without a name", done, len(swept))
        return self._without_inode(found)

    def _newest(self) -> int:
        path = f"/.ff-fsck-{uuid.uuid4().hex}"
        with self._files.open_file(path, "xb") as file:
            number = file.inode_id
        self._files.unlink(path)
        return (number // BATCH_IDS + 1 + SPARE_BATCHES) * BATCH_IDS

    def _without_inode(self, found: dict[InodeId, _There]) -> dict[InodeId, _There]:
        """What was made since, or waits to be collected, has one."""
        states = zip(found.items(), self._files.stat_inodes(found), strict=True)
        return {inode: there for (inode, there), state in states if _gone(state)}

    def _unowned_again(self, unowned: dict[InodeId, _There]) -> None:
        there_now = self._without_inode(dict(self._lists(iter(unowned))))
        for inode, there in there_now.items():
            chunks = [(chain, one.chunk) for chain, listed in sorted(there.items()) for one in listed]
            size = sum(one.held.length for listed in there.values() for one in listed if one.held is not None)
            self.summary.unowned.append(Unowned(inode, tuple(chunks), size))
            text = f"{len(chunks)} chunks with {size} bytes are there, and no such file"
            self.summary.faults.append(Fault(FaultKind.UNOWNED, inode, "", text))

    # --- asking ---

    def _lists(self, inodes: Iterable[InodeId], *, every: bool = False) -> Iterator[tuple[InodeId, _There]]:
        """Of each inode its chunks by chain; those without any only when `every`."""
        asks = ((inode, chain, 0) for inode, chain in product(inodes, self._all))
        left: dict[InodeId, int] = {}
        found: dict[InodeId, _There] = {}
        for inode, chain, listed in self._answers(asks):
            if listed:
                found.setdefault(inode, {})[chain] = listed
            left[inode] = left.get(inode, len(self._all)) - 1
            if not left[inode]:
                del left[inode]
                there = found.pop(inode, {})
                if there or every:
                    yield inode, there

    def _answers(
        self, asks: Iterator[tuple[InodeId, ChainId, int]]
    ) -> Iterator[tuple[InodeId, ChainId, tuple[Listed, ...]]]:
        under: dict[int, tuple[InodeId, ChainId, tuple[Listed, ...]]] = {}
        tag = 0
        more: list[tuple[InodeId, ChainId, int, tuple[Listed, ...]]] = []
        while True:
            while len(under) < WINDOW:
                if more:
                    inode, chain, start, before = more.pop()
                elif (ask := next(asks, None)) is not None:
                    (inode, chain, start), before = ask, ()
                else:
                    break
                tag += 1
                under[tag] = inode, chain, before
                self._ring.prepare_list(tag, chain, inode, start=start)
            if not under:
                return
            over = self._ring.wait(min(len(under), WINDOW // 4))
            for each in over.tags.tolist():
                inode, chain, before = under.pop(each)
                if each in over.errors:
                    raise _told(over.errors[each], chain)
                listed = over.values.get(each, ())
                assert isinstance(listed, tuple)  # noqa: S101
                if len(listed) == MAX_PAGE:
                    more.append((inode, chain, listed[-1].chunk.index + 1, before + listed))
                else:
                    yield inode, chain, before + listed


def _gone(state: object) -> bool:
    return isinstance(state, OSError) and state.errno in (errno.ESTALE, errno.ENOENT)


def _told(error: FireflyerError, chain: ChainId) -> FireflyerError:
    return type(error)(f"chain {chain} cannot be looked at: {error.message}")
