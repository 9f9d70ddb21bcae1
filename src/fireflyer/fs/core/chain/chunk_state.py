"""What is under way for one chunk of a replica. There is such a record only for chunks that are being changed."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from fireflyer.fs.core.chain.forwarding import SlotNumber
from fireflyer.fs.schema.chunks import Change, ChunkEntry, ChunkVersion, CompletionRecord, Declined, Put, Update
from fireflyer.fs.schema.ids import ContentId

__all__ = ["ChunkState", "ChunkUpdate", "Phase", "QueuedCopy", "QueuedPut", "QueuedUpdate"]


@dataclass(slots=True)
class QueuedUpdate:
    """A client's update that waits for the chunk."""

    waiter: int
    update: Update
    handle: int


@dataclass(slots=True)
class QueuedPut:
    """The predecessor's, likewise."""

    place: SlotNumber
    put: Put
    handle: int


@dataclass(slots=True)
class QueuedCopy:
    """Resync wants the chunk made equal at the successor, which listed this."""

    listed: ChunkEntry


class Phase(enum.Enum):
    STAGING = enum.auto()
    """The engine is at it."""
    PENDING = enum.auto()
    """Durable here; the successor's answer is missing, or the fence."""
    DROPPING = enum.auto()
    """Declined by the successor, or here: gone from memory, and who asked is told when it is gone from the disk."""
    COPYING = enum.auto()
    """Nothing is changed here: resync sends the committed content."""


@dataclass(slots=True)
class ChunkUpdate:
    """The one update that has the chunk's lock."""

    id: ContentId
    base: ContentId | None
    change: Change
    phase: Phase
    handle: int = 0
    held: ChunkVersion | None = None
    """What the whole chunk is after it; before it is staged, what the predecessor says that it must become."""
    completion: CompletionRecord | None = None
    waiter: int = 0
    place: SlotNumber | None = None
    """The predecessor's request, as it is named in this chain version."""
    posted: bool = False
    """On its way to the successor of this chain version."""
    since_ns: int = 0
    """When the engine was asked."""
    declined: Declined | None = None
    """Why it is dropped."""
    told: bool = False
    """`held` came with the predecessor's request, and what the engine made is compared with it."""


@dataclass(slots=True)
class ChunkState:
    """Its committed content, who has the lock, and who waits for it."""

    committed: ChunkVersion | None
    damaged: bool = False
    leftover: ContentId | None = None
    """Something pending that no `ChunkUpdate` here stands for, to be overwritten by resync."""
    work: ChunkUpdate | None = None
    queue: deque[QueuedUpdate | QueuedPut | QueuedCopy] = field(default_factory=deque)

    @property
    def unsound(self) -> bool:
        return self.damaged or self.leftover is not None

    @property
    def idle(self) -> bool:
        return self.work is None and not self.queue
