"""A resync session: the last serving replica makes its syncing successor equal to itself while updates go on.

    source (last serving)                    copy (syncing)
    SyncStart                        ──>     nothing under way here any more: forget completion records
    SyncCompletions, page by page           ──>     adopt them
    SyncList(after)                  ──>     Page: what it has
      for each chunk of either list, in order, under the chunk's lock:
      Put replace / Put remove       ──>     make it so, at once committed
    SyncDone                         ──>     up to date: tell the manager

From the moment when the source knows that the session has begun it also sends each update, as a replace or a removal,
and commits it when the copy has it; before, it is the tail and commits alone: the comparison brings the copy what was
committed until then. Completion records are read after that moment, so what they do not show comes with an update.

Why no marks and no tombstones. All that the source says of one chunk it says one after the other, under the chunk's
lock, each request carried out at most once (`forwarding`): so the copy just does what it is told, and what it had
before the session does not matter. It must only have no engine operation of an earlier time under way when it begins.

A list page may be old when it is used. The comparison under the lock is between what the source has *then* and what
the copy had; updates in between went to the copy too, so at worst a chunk is sent twice.

*Done* is granted when both lists are through and every copy was answered. Updates may be under way: the copy has their
base. From then on it may be the tail, so the session cannot be taken back; until then the source may begin another one
whenever this one stalls, and goes on alone meanwhile.
"""

from __future__ import annotations

import enum
from collections import deque

from fireflyer.base.errors import InvariantViolation
from fireflyer.fs.core.chain.effects import ChunkIndex
from fireflyer.fs.core.chain.forwarding import AnswerBody, RequestBody, SlotNumber
from fireflyer.fs.schema.chunks import (
    Accepted,
    ChunkEntry,
    ChunkVersion,
    Page,
    SyncCompletions,
    SyncDone,
    SyncList,
    SyncStart,
)
from fireflyer.fs.schema.ids import Channel, ChunkId, ClientId

__all__ = ["SyncCopy", "SyncSource", "differs"]


class _Phase(enum.Enum):
    START = enum.auto()
    ROWS = enum.auto()
    LIST = enum.auto()
    COPY = enum.auto()
    DONE = enum.auto()


class SyncSource:
    """The session of the last serving replica. `number`: of this chain version, from 1."""

    def __init__(self, number: int, index: ChunkIndex, *, page: int, copies: int, tick_bytes: int) -> None:
        self.number = number
        self.granted = False
        """*Done* was said, or is about to be."""
        self._index = index
        self._page = page
        self._copies = copies
        self._tick_bytes = tick_bytes
        self._budget_bytes = tick_bytes
        self._phase = _Phase.START
        self._asked: RequestBody | None = None
        self._completions_after: tuple[ClientId, Channel] | None = None
        self._after: ChunkId | None = None
        self._end = False
        self._todo: deque[ChunkEntry] = deque()
        self._deferred: list[ChunkEntry] = []
        self._active = 0

    @property
    def open(self) -> bool:
        """The copy takes part: updates go to it."""
        return self._phase is not _Phase.START

    @property
    def after(self) -> ChunkId | None:
        """Chunks up to this one are equal, for people who wait."""
        return self._after

    def tick(self) -> None:
        """Refills the budget, and takes up what was put off."""
        self._budget_bytes = min(self._budget_bytes + self._tick_bytes, self._tick_bytes)
        self._todo.extend(self._deferred)
        self._deferred.clear()

    def next_request(self) -> RequestBody | None:
        """What to ask the copy now. One request of the session is under way at a time."""
        if self._asked is not None:
            return None
        if self._phase is _Phase.COPY and not (self._todo or self._deferred or self._active):
            self._phase = _Phase.DONE if self._end else _Phase.LIST
        match self._phase:
            case _Phase.START:
                self._asked = SyncStart()
            case _Phase.ROWS:
                self._asked = SyncCompletions(self._index.completions(self._completions_after, self._page))
            case _Phase.LIST:
                self._asked = SyncList(self._after, self._page)
            case _Phase.DONE if not self.granted:
                self.granted = True
                self._asked = SyncDone()
        return self._asked

    def answered(self, body: AnswerBody) -> None:
        """To the request that was under way. A refusal only means that it has to be asked again."""
        asked, self._asked = self._asked, None
        match asked, body:
            case SyncStart(), Accepted():
                self._phase = _Phase.ROWS
            case SyncCompletions(completions=completions), Accepted():
                if len(completions) < self._page:
                    self._phase = _Phase.LIST
                else:
                    self._completions_after = (completions[-1].client, completions[-1].channel)
            case SyncList(), Page():
                self._compare(body)

    def _compare(self, page: Page) -> None:
        """Merges the page with the own list, as far as both reach."""
        own = self._index.chunks(self._after, self._page)
        theirs = {one.chunk: one for one in page.entries}
        ends = [] if len(own) < self._page else [own[-1].chunk]
        if not page.end and not page.entries:
            return
        if not page.end:
            ends.append(page.entries[-1].chunk)
        upto = min(ends, default=None)
        names = sorted({one.chunk: None for one in (*own, *page.entries)})
        mine = {one.chunk: one.held for one in own}
        for name in names:
            if upto is not None and name > upto:
                break
            listed = theirs.get(name, ChunkEntry(name, None))
            if listed.held is None or listed.held != mine.get(name):
                self._todo.append(listed)
        self._end = upto is None
        self._after = upto if upto is not None else self._after
        self._phase = _Phase.COPY

    def next_copy(self) -> ChunkEntry | None:
        """The next chunk to make equal, within the bounds of number and rate: what the copy had of it."""
        if self._phase is not _Phase.COPY or not self._todo or self._active >= self._copies or self._budget_bytes <= 0:
            return None
        self._active += 1
        return self._todo.popleft()

    def spent(self, length_bytes: int) -> None:
        """So much is being sent. A chunk that is longer than the budget is paid for by the next ticks."""
        self._budget_bytes -= length_bytes

    def put_off(self, listed: ChunkEntry) -> None:
        """It cannot be sent now: damaged here, and nobody else serves. An update or a removal may mend that."""
        self._active -= 1
        self._deferred.append(listed)

    def copied(self) -> None:
        if self._active <= 0:
            raise InvariantViolation("a chunk was copied outside of a resync")
        self._active -= 1


def differs(listed: ChunkVersion | None, own: ChunkVersion | None) -> bool:
    """Whether the chunk has to be sent, or removed there."""
    return listed is None or listed != own


class SyncCopy:
    """The session of the syncing replica: which one it takes part in, and which answers wait for the engine."""

    def __init__(self) -> None:
        self.number = 0
        self.done = False
        """It has everything, and may be serving before it knows."""
        self._adopting: deque[SlotNumber | None] = deque()

    def leave(self) -> None:
        """The chain has changed: what the engine still adopts is nobody's."""
        self.number, self.done = 0, False
        self._adopting = deque(None for _ in self._adopting)

    def adopt(self, place: SlotNumber) -> None:
        self._adopting.append(place)

    def adopted(self) -> SlotNumber | None:
        """Who waits for the oldest `Adopt`. The engine carries them out in order."""
        return self._adopting.popleft() if self._adopting else None

    @property
    def adopting(self) -> bool:
        """The engine is still at completion records, of whatever session."""
        return bool(self._adopting)

    def join(self, number: int) -> None:
        self._adopting = deque(None for _ in self._adopting)
        self.number = number
