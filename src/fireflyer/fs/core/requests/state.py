"""One request of a client, as its machine knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from fireflyer.base.errors import Unreachable
from fireflyer.fs.core.requests.channels import Channel, Place
from fireflyer.fs.core.requests.effects import Begin
from fireflyer.fs.core.requests.flow_control import Load
from fireflyer.fs.schema.chunks import Change
from fireflyer.fs.schema.ids import ChainVersion, NodeId, Sequence, TargetId
from fireflyer.fs.schema.routing import Member

__all__ = ["NOWHERE", "PendingOperation", "Route", "State"]


class State(enum.Enum):
    WAITS = enum.auto()
    """For its turn or a channel."""
    QUEUED = enum.auto()
    ASKED = enum.auto()
    RESTS = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, frozen=True)
class Route:
    version: ChainVersion
    serving: tuple[Member, ...]


NOWHERE: Final = Route(0, ())


@dataclass(slots=True, eq=False)
class PendingOperation:
    """`asks`: open ones, with the node. `present`: the newest of them."""

    begin: Begin
    load: Load
    state: State = State.WAITS
    begun_ns: int = 0
    due_ns: int = 0
    asks: dict[int, NodeId] = field(default_factory=dict)
    present: int = 0
    target: TargetId = 0
    node: NodeId = 0
    attempts: int = 0
    refusals: int = 0
    damaged: int = 0
    maybe_done: bool = False
    """An attempt that is not open any more may yet be done."""
    channel: Channel | None = None
    sequence: Sequence = 0
    tail: TargetId = 0
    avoid: dict[TargetId, None] = field(default_factory=dict)
    code: str = Unreachable.code
    why: str = "no storage node was asked yet"

    @property
    def place(self) -> Place:
        return self.begin.chain, self.begin.chunk

    @property
    def update(self) -> bool:
        return isinstance(self.begin.what, Change)
