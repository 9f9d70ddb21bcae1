"""What the cluster manager keeps in the key-value store: keys and values.

    FMle             the lease                          FMst             numbers of the whole cluster
    FMno + id (4)    a node                             FMta + id (8)    a target
    FMch + id (4)    a chain                            FMtb + id (4)    a chain table
    FMse + id (8)    a session                          FMmo + id (4)    a move of the chain with this id

Ids are big-endian, so a range is in the order of ids. The lease is `kvstore.core.fenced.LeaseRow`; how values are
encoded says `kvstore.core.rows`. Of a row that does not decode the manager does not become primary, rather than guess.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.fs.schema.ids import ChainId, ChainVersion, ClientId, Incarnation, NodeId, RoutingVersion, TargetId
from fireflyer.fs.schema.routing import Chain, ChainTable
from fireflyer.fs.schema.sessions import SessionsVersion
from fireflyer.kvstore.core.rows import Kind

__all__ = ["CHAINS", "LEASE_KEY", "MOVES", "NODES", "SESSIONS", "STATE_KEY", "TABLES", "TARGETS"]
__all__ += ["MoveRow", "NodeRow", "SessionRow", "StateRow", "TargetRow"]

PREFIX: Final = b"FM"
LEASE_KEY: Final = PREFIX + b"le"
STATE_KEY: Final = PREFIX + b"st"


class StateRow(msgspec.Struct, frozen=True):
    """Changed by every transaction but those of the lease. (term, number) names the transaction that wrote it."""

    version: RoutingVersion
    failure_timeout_ns: int
    """T, fixed when the cluster is made: storage nodes fence themselves by it whoever is primary."""
    term: int
    number: int
    cluster: str = ""
    """Whose store this is; empty for one whose managers do not say."""
    sessions: SessionsVersion = 0
    next_client: ClientId = 1
    """The id of the next session: ids are never given twice, or a replica would take new updates for old ones."""
    key_ids: tuple[int, ...] = (1,)
    """Of the keys of capabilities; the first one signs."""


class NodeRow(msgspec.Struct, frozen=True):
    id: NodeId
    incarnation: Incarnation = 0
    """0: it has never registered."""
    address: str = ""
    nonce: str = ""
    machine: str = ""
    boot: str = ""


class TargetRow(msgspec.Struct, frozen=True):
    id: TargetId
    node: NodeId
    used: bool = False
    """It has been in a chain, so it may hold chunks."""
    drained: bool = False
    served_until: ChainVersion = 0
    """The last version of its chain in which it served, if it does no more."""
    leaving: bool = False
    """It shall be moved away from: it keeps its role until another target has taken its place, and gets no new one."""
    intact_until: ChainVersion = 0
    """As `served_until`, but 0 once it has begun to be synced since: it has what it had then, and no less."""

    @property
    def unwanted(self) -> bool:
        """No chain gets it."""
        return self.drained or self.leaving


class SessionRow(msgspec.Struct, frozen=True):
    """A session that lives."""

    id: ClientId
    user: str
    nonce: str
    name: str = ""


class MoveRow(msgspec.Struct, frozen=True):
    """A chain that is to be on `node` in the place of `source`: see `manager.migration`."""

    id: ChainId
    source: TargetId
    node: NodeId
    number: int
    """Moves begin in this order."""
    target: TargetId = 0
    """Of `node`, that was put into the chain for it; 0: it has not begun."""
    drained: bool = False
    """The source was drained for it, and by nobody else."""


NODES: Final = Kind(PREFIX + b"no", 4, NodeRow)
TARGETS: Final = Kind(PREFIX + b"ta", 8, TargetRow)
CHAINS: Final = Kind(PREFIX + b"ch", 4, Chain)
TABLES: Final = Kind(PREFIX + b"tb", 4, ChainTable)
SESSIONS: Final = Kind(PREFIX + b"se", 8, SessionRow)
MOVES: Final = Kind(PREFIX + b"mo", 4, MoveRow)
