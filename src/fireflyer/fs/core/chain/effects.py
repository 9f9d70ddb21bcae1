"""What a chain replica hears, what it asks for, and what it may look up: the contract of chunk engine and shell.

The driver takes the effects of one `handle` in order and hands each to its performer before it gives the machine the
next event. `Commit`, `Drop` and `Publish` have taken effect in memory when they were handed over: a read that begins
later sees them. `Stage` and `InstallRecords` take their time and are answered by one event each.

The engine:

- `Stage` makes the new content next to the committed one, which stays readable, and records it as pending together
  with the completion record: one durable record, or nothing. It verifies what it reads of the base. There is never
  something else pending. `Staged` says that all of this survives a power cut; until then readers may or may not see
  the chunk as pending.
- A completion record replaces another of its channel as `CompletionRecord.replaces` says, in whatever order they come.
  Adopts are carried out in order.
- `Drop` has taken effect in memory at once; where it is `awaited`, `Dropped` says that it survives a power cut.
- `Commit` may be lost in a power cut: the content is then pending again, and is committed again. It is durable at the
  latest with the next stage of this chunk.
- After a restart `ChunkIndex` shows what was durable, pending contents too. What an engine finds when it opens it first
  makes durable: a process that was killed may have left records that are in the page cache alone, and what they say is
  committed, answered and shown from then on.
- Damage that was found stays on record, in memory at least, until the chunk is replaced.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import msgspec

from fireflyer.fs.schema.chunks import (
    Change,
    ChunkEntry,
    ChunkVersion,
    CompletionRecord,
    PeerMessage,
    Update,
    UpdateReply,
)
from fireflyer.fs.schema.ids import ChainId, ChainVersion, Channel, ChunkId, ClientId, ContentId, TargetId
from fireflyer.fs.schema.routing import Chain

__all__ = [
    "AskRouting",
    "ChainChanged",
    "ChunkIndex",
    "ClientEnded",
    "ClientUpdate",
    "Commit",
    "CorruptionFound",
    "DiskFailed",
    "Drop",
    "Dropped",
    "Effect",
    "Entry",
    "Event",
    "Failure",
    "FenceExtended",
    "Forget",
    "GiveUp",
    "InstallRecords",
    "MessageFromPeer",
    "PeerLost",
    "PendingContent",
    "Publish",
    "RecordsInstalled",
    "Release",
    "Reply",
    "ReportGone",
    "ReportUnreachable",
    "Send",
    "Stage",
    "StageFailed",
    "Staged",
    "TableEntry",
    "Tick",
    "UpToDate",
]


class PendingContent(msgspec.Struct, frozen=True):
    """`held` is None for a removal."""

    id: ContentId
    held: ChunkVersion | None


class Entry(msgspec.Struct, frozen=True):
    """A chunk's record. `damaged`: its committed content failed verification."""

    committed: ChunkVersion | None = None
    pending: PendingContent | None = None
    damaged: bool = False


class ChunkIndex(Protocol):
    """The engine's records in memory. Looking up changes nothing, and takes no time to speak of."""

    @property
    def completion_count(self) -> int: ...

    def find(self, chunk: ChunkId) -> Entry | None: ...

    def completion(self, client: ClientId, channel: Channel) -> CompletionRecord | None: ...

    def completions(self, after: tuple[ClientId, Channel] | None, limit: int) -> tuple[CompletionRecord, ...]:
        """In the order of (client, channel)."""

    def chunks(self, after: ChunkId | None, limit: int) -> tuple[ChunkEntry, ...]:
        """In order. Those with something pending, or damaged, have no `held`."""

    def of_file(self, file: int, index: int, *, backwards: bool = False) -> Iterator[ChunkId]:
        """Chunks of the file from this index on, upwards or `backwards`; those with something pending too."""

    def pending(self) -> tuple[ChunkId, ...]:
        """Chunks with something pending, in order. They are few: at most what was under way at once."""


# --- events ---


class ChainChanged(msgspec.Struct, frozen=True):
    """Routing says this of the chain. Only routing that knows this incarnation of the node may be told."""

    chain: Chain


class FenceExtended(msgspec.Struct, frozen=True):
    """The manager answered a heartbeat: this target may act until then (node's clock)."""

    until_ns: int


class Tick(msgspec.Struct, frozen=True):
    """Given every few hundredths of a second: what was not answered is sent again, and the rate bound is refilled."""


class ClientUpdate(msgspec.Struct, frozen=True):
    """From an authenticated client with the right to it. `waiter`: to whom the reply goes. `handle`: its data, or 0."""

    waiter: int
    update: Update
    handle: int = 0


class MessageFromPeer(msgspec.Struct, frozen=True):
    """From the node of `source`, authenticated. `handle`: the data that came with a `Put`, or 0."""

    source: TargetId
    message: PeerMessage
    handle: int = 0


class PeerLost(msgspec.Struct, frozen=True):
    """The connection broke: what was not answered will not be."""

    peer: TargetId


class Staged(msgspec.Struct, frozen=True):
    """Durable. `held` is None for a removal; else the length and the checksum of the whole chunk, as computed here."""

    chunk: ChunkId
    id: ContentId
    held: ChunkVersion | None


class Failure(enum.StrEnum):
    NO_SPACE = "no space"
    BAD_DATA = "data do not match their checksum"
    DAMAGED = "the chunk is damaged"


class StageFailed(msgspec.Struct, frozen=True):
    """Nothing was staged and nothing will be."""

    chunk: ChunkId
    id: ContentId
    failure: Failure


class Dropped(msgspec.Struct, frozen=True):
    """An awaited `Drop` is durable: no power cut brings the content back."""

    chunk: ChunkId
    id: ContentId


class RecordsInstalled(msgspec.Struct, frozen=True):
    """The completion records of the oldest `InstallRecords` that was not yet answered are durable."""


class CorruptionFound(msgspec.Struct, frozen=True):
    """A reader, the scrub, or a `Send` of content found the chunk damaged; it is on record."""

    chunk: ChunkId


class DiskFailed(msgspec.Struct, frozen=True):
    """Nothing that this disk says is believed any more in this incarnation."""

    message: str


class ClientEnded(msgspec.Struct, frozen=True):
    """Its session is over at the manager: nothing of it is admitted any more. What waits of it is refused, and what
    is known of it forgotten."""

    client: ClientId


class GiveUp(msgspec.Struct, frozen=True):
    """Stop what this chain version lets the target do: an administrator drains it, or the manager takes it for the one
    that is cut off. Of no meaning in another version, or without a role."""

    chain_version: ChainVersion
    reason: str


Event: TypeAlias = (
    ChainChanged
    | FenceExtended
    | Tick
    | ClientUpdate
    | MessageFromPeer
    | PeerLost
    | Staged
    | StageFailed
    | Dropped
    | RecordsInstalled
    | CorruptionFound
    | DiskFailed
    | ClientEnded
    | GiveUp
)

# --- effects ---


class Stage(msgspec.Struct, frozen=True):
    """Answered by `Staged` or `StageFailed`. `base` is the committed content; None: the chunk is absent. A
    REPLACE does not look at it."""

    chunk: ChunkId
    id: ContentId
    base: ContentId | None
    change: Change
    handle: int
    completion: CompletionRecord | None


class Commit(msgspec.Struct, frozen=True):
    """The pending content `id` is the committed one; a pending removal is done, and the record goes."""

    chunk: ChunkId
    id: ContentId


class Drop(msgspec.Struct, frozen=True):
    """The pending content `id` goes; `completion`, if any, is the record of its channel from now on. If `awaited`,
    answered by `Dropped`."""

    chunk: ChunkId
    id: ContentId
    completion: CompletionRecord | None
    awaited: bool = False


class InstallRecords(msgspec.Struct, frozen=True):
    """Take completion records; `reset`: forget all others first."""

    completions: tuple[CompletionRecord, ...]
    reset: bool


class Forget(msgspec.Struct, frozen=True):
    """All completion records of the client."""

    client: ClientId


class Send(msgspec.Struct, frozen=True):
    """To a replica of this chain. The data that follow: of `handle`, or, where `content` is set, the chunk with this
    content id (pending or committed) from the engine; damage found there is told by `CorruptionFound`. At most once:
    whatever is lost is sent again."""

    peer: TargetId
    message: PeerMessage
    handle: int = 0
    content: ContentId | None = None


class Release(msgspec.Struct, frozen=True):
    """The data of `handle` are not needed any more."""

    handle: int


class Reply(msgspec.Struct, frozen=True):
    waiter: int
    reply: UpdateReply


class TableEntry(msgspec.Struct, frozen=True):
    """What the read path obeys: see `fireflyer.fs.core.chain.reads`."""

    chain: ChainId
    chain_version: ChainVersion
    serving: bool
    fence_until_ns: int
    tail: TargetId
    answers_committed: bool
    """A chunk with something pending is answered with its committed content, not with `NotCommitted`."""


class Publish(msgspec.Struct, frozen=True):
    entry: TableEntry


class UpToDate(msgspec.Struct, frozen=True):
    """Tell the manager, until the chain changes, that this target has everything of this chain version."""

    chain_version: ChainVersion


class ReportGone(msgspec.Struct, frozen=True):
    """Tell the manager that this target does nothing any more that this chain version lets it do. In a later one that
    does not let it serve it is back, and can be synced; unless it has `failed`: its disk is not to be trusted."""

    chain_version: ChainVersion
    reason: str
    failed: bool = False
    changed_in: ChainVersion = 0
    """The last chain version in which it has changed anything, or began to serve."""


class ReportUnreachable(msgspec.Struct, frozen=True):
    """This peer has not answered for long, though the manager says that it is there."""

    peer: TargetId


class AskRouting(msgspec.Struct, frozen=True):
    """Somebody knows a later version of the chain."""


Effect: TypeAlias = (
    Stage
    | Commit
    | Drop
    | InstallRecords
    | Forget
    | Send
    | Release
    | Reply
    | Publish
    | UpToDate
    | ReportGone
    | ReportUnreachable
    | AskRouting
)
