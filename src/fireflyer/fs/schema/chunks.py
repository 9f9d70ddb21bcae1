"""What clients and replicas say to each other about chunks. Data is never in a message: it follows it on the wire.

Between a client and a replica: `Update` with its `UpdateReply`, `Query` with its `QueryReply`. Between the replicas
of a
chain: `Request`, which carries one of `Put`, `SyncStart`, `SyncCompletions`, `SyncList`, `SyncDone`, `Reminder`,
answered by `Answer` or, where the receiver is in another chain version, by `StaleChainVersion`.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

from fireflyer.fs.schema.ids import (
    MAX_CHUNK_BYTES,
    ChainId,
    ChainVersion,
    Channel,
    ChunkId,
    ClientId,
    ContentId,
    Sequence,
    TargetId,
)

__all__ = [
    "MAX_PAGE",
    "MAX_SLOTS",
    "Accepted",
    "Answer",
    "Change",
    "ChunkEntry",
    "ChunkVersion",
    "CompletionRecord",
    "Declined",
    "Done",
    "Found",
    "InProgress",
    "Missing",
    "NotCommitted",
    "Operation",
    "Page",
    "PeerMessage",
    "Put",
    "Query",
    "QueryKind",
    "QueryReply",
    "RefusalReason",
    "Refused",
    "Reminder",
    "Request",
    "StaleChainVersion",
    "SyncCompletions",
    "SyncDone",
    "SyncList",
    "SyncStart",
    "UnknownRequest",
    "Update",
    "UpdateReply",
]

MAX_SLOTS: Final = 256
"""Of one replica to its successor; a request with a higher slot is refused."""
MAX_PAGE: Final = 1024
"""Completion records or list entries in one message."""

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNK_BYTES)]
_Crc = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Operation(enum.StrEnum):
    WRITE = "write"
    """Bytes [offset, offset + length) become the data; a chunk that ends before `offset` is filled up with zeros."""
    TRUNCATE = "truncate"
    """The chunk's length becomes `length`; what is new is zeros. A chunk that is absent is made."""
    REMOVE = "remove"
    REPLACE = "replace"
    """The data is all of the chunk. Between replicas only."""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """What an update does. `crc`: CRC32C of the data that follows; 0 where none does."""

    operation: Operation
    offset: _Bytes = 0
    length: _Bytes = 0
    crc: _Crc = 0

    @property
    def carries_data(self) -> bool:
        return self.operation in (Operation.WRITE, Operation.REPLACE)


class ChunkVersion(msgspec.Struct, frozen=True, array_like=True):
    """A version of a chunk that is there: which content, how many bytes, CRC32C of all of them."""

    id: ContentId
    length: _Bytes
    crc: _Crc


class CompletionRecord(msgspec.Struct, frozen=True, array_like=True):
    """The last update of a client's channel and what became of it, so that its retry is answered and not done again.

    `id` is None for one that was given up (no space at a successor): a retry may do it, an older one may not come back.
    """

    client: ClientId
    channel: Channel
    sequence: Sequence
    chunk: ChunkId
    id: ContentId | None

    def replaces(self, other: CompletionRecord | None) -> bool:
        """Completion records reach a replica in any order; the newer update's stays, and of one update the one that
        was done."""
        if other is None or self.sequence != other.sequence:
            return other is None or self.sequence > other.sequence
        return other.id is None or (self.id is not None and self.id > other.id)


# --- clients ---


class Update(msgspec.Struct, frozen=True, tag="Update", array_like=True):
    """To the head of the chain. `sequence` grows by one with each update of the channel; a retry has the same."""

    chain: ChainId
    chain_version: ChainVersion
    client: ClientId
    channel: Channel
    sequence: Sequence
    chunk: ChunkId
    change: Change


class Done(msgspec.Struct, frozen=True, tag="Done", array_like=True):
    """Every replica has it durably. `held`: the whole chunk after it; None after a removal, and for a retry that is
    answered when the chunk has been changed again."""

    id: ContentId
    held: ChunkVersion | None


class RefusalReason(enum.StrEnum):
    """Why a replica does not do what it was asked, by the error class that the client raises or acts upon."""

    STALE = "stale_version"
    """Other chain version, other role, or behind the fence: get routing, and ask again."""
    BUSY = "busy"
    NO_SPACE = "no_space"
    USAGE = "usage"
    DUPLICATE = "duplicate"
    """The channel has gone on to a later update."""
    CORRUPT = "data_corruption"
    """The chunk is damaged here, or the data was on the way."""
    DENIED = "permission_denied"
    """No capability for this was presented on this connection, or it has expired: present one, and ask again."""
    ENDED = "aborted"
    """The client's session is over: open another one."""


class Refused(msgspec.Struct, frozen=True, tag="Refused", array_like=True):
    """Not done by this attempt. Another attempt of the same update, still under way, may do it later."""

    refusal: RefusalReason
    message: Annotated[str, msgspec.Meta(max_length=512)]
    chain_version: ChainVersion = 0
    """The receiver's."""


UpdateReply: TypeAlias = Done | Refused


class QueryKind(enum.StrEnum):
    READ = "read"
    STAT = "stat"
    LAST = "last"
    """The last chunk of the file, at or below the index."""
    LIST = "list"
    """The chunks of the file from the index, at most `length` of them."""
    CHAIN = "chain"
    """The chunks of all files from this one on, at most `length` of them, each right by itself: a chunk that is there
    all the time is told once by whoever goes on behind the last of a page. Only who holds the node secret may ask."""


class Query(msgspec.Struct, frozen=True, tag="Look", array_like=True):
    """To any serving replica. READ: bytes [offset, offset + length), fewer where the chunk ends."""

    chain: ChainId
    chain_version: ChainVersion
    kind: QueryKind
    chunk: ChunkId
    offset: _Bytes = 0
    length: _Bytes = MAX_CHUNK_BYTES


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True):
    """A chunk in a list. `held` is None where what is there has to be replaced: uncommitted, or damaged."""

    chunk: ChunkId
    held: ChunkVersion | None


_Entries = Annotated[tuple[ChunkEntry, ...], msgspec.Meta(max_length=MAX_PAGE)]


class Found(msgspec.Struct, frozen=True, tag="Found", array_like=True):
    """READ: one entry, data follows. STAT, LAST: one entry. LIST, CHAIN: the chunks."""

    entries: _Entries


class Missing(msgspec.Struct, frozen=True, tag="Missing", array_like=True):
    """There is no such chunk."""


class NotCommitted(msgspec.Struct, frozen=True, tag="NotCommitted", array_like=True):
    """An update is under way here. The tail knows; when this is the tail, ask again."""

    tail: TargetId


QueryReply: TypeAlias = Found | Missing | NotCommitted | Refused


# --- between replicas ---


class Put(msgspec.Struct, frozen=True, tag="Put", array_like=True):
    """Make this content of the chunk. `held` is the whole chunk after it, None after a removal."""

    chunk: ChunkId
    id: ContentId
    base: ContentId | None
    """Which content it changes; None: the chunk is absent. Means nothing to a syncing replica."""
    change: Change
    held: ChunkVersion | None
    completion: CompletionRecord | None
    """None for what resync copies: it sends the completion records apart."""


class SyncStart(msgspec.Struct, frozen=True, tag="SyncStart", array_like=True):
    """Forget the completion records that you have, and take part in this session."""


class SyncCompletions(msgspec.Struct, frozen=True, tag="SyncRows", array_like=True):
    """A page of the predecessor's completion records."""

    completions: Annotated[tuple[CompletionRecord, ...], msgspec.Meta(max_length=MAX_PAGE)]


class SyncList(msgspec.Struct, frozen=True, tag="SyncList", array_like=True):
    """Answered by `Page`: what you have after this chunk, in order; from the first for None."""

    after: ChunkId | None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)]


class SyncDone(msgspec.Struct, frozen=True, tag="SyncDone", array_like=True):
    """You have all that I have. From now on you may be the tail."""


class Reminder(msgspec.Struct, frozen=True, tag="Reminder", array_like=True):
    """In the place of a copy of a `Put` with data: what of it? Answered by its answer, `InProgress`, or
    `UnknownRequest`."""

    chunk: ChunkId


class Request(msgspec.Struct, frozen=True, tag="Request", array_like=True):
    """To the successor. Of one slot one request at a time is under way, and a number is carried out at most once."""

    chain: ChainId
    chain_version: ChainVersion
    session: _Number
    """0 to a serving successor; else which resync session of this chain version, from 1."""
    slot: _Slot
    number: _Number
    body: Put | SyncStart | SyncCompletions | SyncList | SyncDone | Reminder


class Accepted(msgspec.Struct, frozen=True, tag="Accepted", array_like=True):
    """Durable here and at all after me."""


class Declined(msgspec.Struct, frozen=True, tag="Declined", array_like=True):
    """Not done, and this request never will be, by me or by any after me."""

    refusal: RefusalReason
    message: Annotated[str, msgspec.Meta(max_length=512)]


class Page(msgspec.Struct, frozen=True, tag="Page", array_like=True):
    entries: _Entries
    end: bool
    """Nothing comes after the last of these."""


class InProgress(msgspec.Struct, frozen=True, tag="Waiting", array_like=True):
    """To a copy: your request came, and I am at it, or wait for the one behind me. It stays under way."""


class UnknownRequest(msgspec.Struct, frozen=True, tag="Unheard", array_like=True):
    """To a reminder: no such request came, or it could not be taken. Send all of it."""


class Answer(msgspec.Struct, frozen=True, tag="Answer", array_like=True):
    chain: ChainId
    chain_version: ChainVersion
    session: _Number
    slot: _Slot
    number: _Number
    body: Accepted | Declined | Page | InProgress | UnknownRequest


class StaleChainVersion(msgspec.Struct, frozen=True, tag="Behind", array_like=True):
    """Your request was not of my chain version, which is this one. Who is behind asks for routing."""

    chain: ChainId
    chain_version: ChainVersion


PeerMessage: TypeAlias = Request | Answer | StaleChainVersion
