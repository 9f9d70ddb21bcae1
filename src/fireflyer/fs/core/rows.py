"""What the cluster manager keeps in the key-value store: keys and values.

    FMle             the lease                          FMst             numbers of the whole cluster
    FMno + id (4)    a node                             FMta + id (8)    a target
    FMch + id (4)    a chain                            FMtb + id (4)    a chain table
    FMse + id (8)    a session                          FMmo + id (4)    a move of the chain with this id

Ids are big-endian, so a range is in the order of ids. A value is one byte, the version of its format, and MessagePack.
What does not decode is `DataCorruption` naming the key: the manager then does not become primary, rather than guess.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import DataCorruption
from fireflyer.fs.schema.ids import ChainId, ChainVersion, ClientId, Incarnation, NodeId, RoutingVersion, TargetId
from fireflyer.fs.schema.routing import Chain, ChainTable
from fireflyer.fs.schema.sessions import SessionsVersion

__all__ = ["CHAINS", "LEASE_KEY", "MOVES", "NODES", "SESSIONS", "STATE_KEY", "TABLES", "TARGETS", "Kind", "LeaseRow"]
__all__ += ["MoveRow", "NodeRow", "SessionRow", "StateRow", "TargetRow", "decode_row", "encode_row"]

FORMAT: Final = 1
PREFIX: Final = b"FM"
LEASE_KEY: Final = PREFIX + b"le"
STATE_KEY: Final = PREFIX + b"st"

R = TypeVar("R")


class LeaseRow(msgspec.Struct, frozen=True):
    """Who is primary. Changed by each renewal, so that a candidate sees that somebody lives."""

    holder: str
    """Of one process: no other one and no later one has the same."""
    address: str
    """Where it is asked."""
    term: int
    """One more with each taking."""
    renewals: int = msgspec.field(name="beat")
    """One more with each renewal that was tried."""
    lease_ns: int
    """What this holder promises: it stops answering half of it after its last renewal. Others wait all of it."""


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


class Kind(Generic[R]):
    """One kind of row that there are many of, by id."""

    def __init__(self, name: bytes, id_bytes: int, row_type: type[R]) -> None:
        self.prefix = PREFIX + name
        self.end = self.prefix[:-1] + bytes([self.prefix[-1] + 1])
        self._id_bytes = id_bytes
        self._row_type = row_type

    def key(self, row_id: int) -> bytes:
        return self.prefix + row_id.to_bytes(self._id_bytes, "big")

    def decode(self, key: bytes, value: bytes) -> tuple[int, R]:
        """Id and row. Raises `DataCorruption`, also when the row is another one's."""
        row = decode_row(key, value, self._row_type)
        row_id: Any = getattr(row, "id", None)
        if not isinstance(row_id, int) or key != self.key(row_id):
            raise DataCorruption(f"row {key.hex()} of the manager's store names id {row_id!r}; restore the store")
        return row_id, row


NODES: Final = Kind(b"no", 4, NodeRow)
TARGETS: Final = Kind(b"ta", 8, TargetRow)
CHAINS: Final = Kind(b"ch", 4, Chain)
TABLES: Final = Kind(b"tb", 4, ChainTable)
SESSIONS: Final = Kind(b"se", 8, SessionRow)
MOVES: Final = Kind(b"mo", 4, MoveRow)


def encode_row(row: msgspec.Struct) -> bytes:
    return bytes([FORMAT]) + msgspec.msgpack.encode(row)


def decode_row(key: bytes, value: bytes, row_type: type[R]) -> R:
    """Raises `DataCorruption` for what `encode_row` did not make."""
    if value[:1] != bytes([FORMAT]):
        raise DataCorruption(
            f"row {key.hex()} of the manager's store has format {value[:1].hex() or 'none'}, not {FORMAT}; "
            "run the version that wrote it, or restore the store"
        )
    try:
        return msgspec.msgpack.decode(value[1:], type=row_type)
    except DECODE_ERRORS as error:
        raise DataCorruption(
            f"row {key.hex()} of the manager's store is damaged: {error}; restore the store"
        ) from error
