"""Chunks against files: all chains are walked side by side, and the files that they tell of are asked for by number.

What looks wrong is a *doubt*. Doubts are looked at once more, each file on the chains on which it looked wrong, when
writers have had time to report; what was in between two steps is not any more. So asks grow with the chunks that there
are and the doubts, and memory with neither: a page of each chain, a batch of files, and the doubts until there are
`MAX_DOUBTS`, which are then looked at before the walk goes on.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import msgspec

from fireflyer.base.units import counted, format_bytes
from fireflyer.fs.client.files.attributes import Attributes
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.ring import Ring
from fireflyer.fs.core.meta.fsck.chain_walk import ChainWalk, Piece
from fireflyer.fs.core.meta.fsck.compare import Fault, FaultKind, lasting, wrong_chunks
from fireflyer.fs.schema.chunks import MAX_PAGE, ChunkEntry
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.ids import MAX_INDEX, ChainId
from fireflyer.fs.schema.inodes import FileDetails, InodeId

__all__ = ["ChunkCheck", "OrphanChunks"]

FILES_TOGETHER: Final = 1024
LISTED_TOGETHER: Final = 1 << 15
WINDOW: Final = 2048
"""Lists and removals under way."""
MAX_DOUBTS: Final = 1 << 16

_Take: TypeAlias = Callable[[tuple[ChunkEntry, ...]], object]
_Batch: TypeAlias = dict[InodeId, dict[ChainId, list[ChunkEntry]]]


class OrphanChunks(msgspec.Struct, frozen=True):
    """Chunks of what is no file."""

    inode: InodeId
    chains: tuple[ChainId, ...]
    chunks: int
    bytes: int


@dataclass(slots=True)
class _Suspect:
    faults: list[Fault] = field(default_factory=list)
    chains: dict[ChainId, None] = field(default_factory=dict)
    unowned: int = 0
    bytes: int = 0


class ChunkCheck:
    """`run`, then what it found; `asks`: lists that were asked for."""

    def __init__(self, files: FileSystem, ring: Ring, *, progress: Callable[[int], None], settle_s: float) -> None:
        self._files, self._ring, self._settle_s = files, ring, settle_s
        self._progress = progress
        self._tables: dict[int, tuple[ChainId, ...]] = {}
        self._tag = 0
        self._takers: dict[int, tuple[ChainId, _Take]] = {}
        self.asks = 0
        self.chunks = 0
        self.faults: list[Fault] = []
        """Without paths."""
        self.unowned: list[OrphanChunks] = []

    def run(self) -> None:
        """Raises `FireflyerError` for what could not be looked at."""
        doubts: dict[InodeId, _Suspect] = {}
        count = 0
        for batch in _batches(self._everything()):
            count += self._compare(batch, doubts)
            self.chunks += sum(len(listed) for there in batch.values() for listed in there.values())
            self._progress(self.chunks)
            if count >= MAX_DOUBTS:
                last = max(batch)  # of which there may be more
                kept = {last: doubts.pop(last)} if last in doubts else {}
                self._look_again(doubts)
                doubts, count = kept, 0
        self._look_again(doubts)

    def remove(self, unowned: Iterable[OrphanChunks], progress: Callable[[int], None]) -> int:
        """What is there of them now, and still is no file: how many chunks."""
        removed = 0
        for batch in _batches(self._listed((one.inode, chain) for one in unowned for chain in one.chains)):
            for (_, there), state in zip(batch.items(), self._files.stat_inodes(batch), strict=True):
                if _no_file(state):
                    for chain, listed in there.items():
                        removed += self._remove(chain, listed)
                        progress(removed)
        return removed

    # --- comparing ---

    def _compare(self, batch: _Batch, doubts: dict[InodeId, _Suspect]) -> int:
        """How many more there are. The inodes are asked for behind the chunks: what has been removed since is gone."""
        count = 0
        for (inode, there), state in zip(batch.items(), self._files.stat_inodes(batch), strict=True):
            faults: list[Fault] = []
            if isinstance(state, Attributes) and state.inode.links and isinstance(state.inode.body, FileDetails):
                faults = wrong_chunks("", state.inode, self._chains(state.inode.body.layout.table), there)
            if faults or _no_file(state):
                doubt = doubts.setdefault(inode, _Suspect())
                doubt.faults += faults
                doubt.chains |= dict.fromkeys(there)
                count += max(1, len(faults))
                if not faults:
                    every = [one for listed in there.values() for one in listed]
                    doubt.unowned += len(every)
                    doubt.bytes += sum(one.held.length for one in every if one.held is not None)
        return count

    def _look_again(self, doubts: dict[InodeId, _Suspect]) -> None:
        if not doubts:
            return
        threading.Event().wait(self._settle_s)
        again: dict[InodeId, _Suspect] = {}
        for batch in _batches(self._listed((inode, chain) for inode, one in doubts.items() for chain in one.chains)):
            self._compare(batch, again)
        for inode, before in sorted(doubts.items()):
            now = again.get(inode, _Suspect())
            self.faults += lasting(before.faults, now.faults)
            if before.unowned and now.unowned:
                self.unowned.append(OrphanChunks(inode, tuple(now.chains), now.unowned, now.bytes))
                text = f"{counted(now.unowned, 'chunk')} with {format_bytes(now.bytes)} that belong to no file"
                self.faults.append(Fault(FaultKind.UNOWNED, inode, "", text))

    def _chains(self, table: int) -> tuple[ChainId, ...]:
        if table not in self._tables:
            self._tables[table] = self._ring.chains(table)
        return self._tables[table]

    # --- asking ---

    def _everything(self) -> Iterator[Piece]:
        walk = ChainWalk([chain.id for chain in self._ring.routing.chains])
        while not walk.over:
            self._ask(walk)
            self._wait(1)
            for piece in walk.pieces():
                yield piece
                self._ask(walk)

    def _ask(self, walk: ChainWalk) -> None:
        for chain, start in walk.wanted():
            self.asks += 1
            take = partial(walk.take, chain)
            self._ring.prepare_list_all(self._next(chain, take), chain, start, limit=walk.page)
            self._ring.submit()

    def _listed(self, wanted: Iterable[tuple[InodeId, ChainId]]) -> Iterator[Piece]:
        """The chunks of these files on these chains, a page each."""
        fresh = ((inode, chain, 0) for inode, chain in wanted)
        more: list[tuple[InodeId, ChainId, int]] = []
        there: list[Piece] = []
        under = 0
        while True:
            while under < WINDOW and (one := more.pop() if more else next(fresh, None)) is not None:
                inode, chain, start = one
                self.asks += 1
                take = partial(_keep, there, inode, chain)
                self._ring.prepare_list(self._next(chain, take), chain, inode, start=start)
                under += 1
            if not under:
                return
            self._wait(1)
            under -= len(there)
            more += [
                (piece.file, piece.chain, piece.chunks[-1].chunk.index + 1)
                for piece in there
                if len(piece.chunks) == MAX_PAGE and piece.chunks[-1].chunk.index < MAX_INDEX
            ]
            pieces = [piece for piece in there if piece.chunks]
            there.clear()
            yield from pieces

    def _remove(self, chain: ChainId, listed: list[ChunkEntry]) -> int:
        gone: list[tuple[ChunkEntry, ...]] = []
        for first in range(0, len(listed), WINDOW):
            part = listed[first : first + WINDOW]
            for one in part:
                self._ring.prepare_remove(self._next(chain, gone.append), chain, one.chunk)
            while len(gone) < first + len(part):
                self._wait(1)
        return len(listed)

    def _next(self, chain: ChainId, take: _Take) -> int:
        """The tag of what is asked of the chain; `take` hears the answer."""
        self._tag += 1
        self._takers[self._tag] = chain, take
        return self._tag

    def _wait(self, least: int) -> None:
        """Whose answers come may have been asked for elsewhere: several walks are under way at a time."""
        over = self._ring.wait(least)
        for tag in over.tags.tolist():
            chain, take = self._takers.pop(tag)
            if tag in over.errors:
                error = over.errors[tag]
                raise type(error)(f"chain {chain}: {error.message}")
            listed = over.values.get(tag)
            take(listed if isinstance(listed, tuple) else ())


def _batches(pieces: Iterable[Piece]) -> Iterator[_Batch]:
    """By file. What is left of a large file is in the next one."""
    batch: _Batch = {}
    count = 0
    for piece in pieces:
        if count >= LISTED_TOGETHER or (len(batch) >= FILES_TOGETHER and piece.file not in batch):
            yield batch
            batch, count = {}, 0
        batch.setdefault(piece.file, {}).setdefault(piece.chain, []).extend(piece.chunks)
        count += len(piece.chunks)
    if batch:
        yield batch


def _keep(there: list[Piece], inode: InodeId, chain: ChainId, listed: tuple[ChunkEntry, ...]) -> None:
    there.append(Piece(inode, chain, listed))


def _no_file(state: Attributes | FileError) -> bool:
    if isinstance(state, Attributes):
        return not isinstance(state.inode.body, FileDetails)
    return state.errno in (errno.ESTALE, errno.ENOENT)
