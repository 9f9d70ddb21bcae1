"""The manager's state: what is committed, and at most one draft of what shall be next.

    load      once, from the rows that the new primary read
    put ...   into the draft; reads see the draft, `committed` does not
    pending   the rows of the draft, or None if there are none
    commit    the store has written them          rollback   it never will

Whoever is answered is answered from what is committed. Only the primary writes and it has one draft at a time, so what
it has in memory is what the store has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar

import msgspec

from fireflyer.base.errors import DataCorruption, InvariantViolation
from fireflyer.fs.core.routing import RoutingLog
from fireflyer.fs.core.rows import (
    CHAINS,
    MOVES,
    NODES,
    SESSIONS,
    STATE_KEY,
    TABLES,
    TARGETS,
    MoveRow,
    NodeRow,
    SessionRow,
    StateRow,
    TargetRow,
)
from fireflyer.fs.schema.ids import ClientId, RoutingVersion
from fireflyer.fs.schema.routing import Chain, ChainTable, Member, RoutingDelta, TargetState
from fireflyer.kvstore.core.rows import Kind, decode_row, encode_row

__all__ = ["Ledger", "Table"]

_BEING_CHANGED: Final = (TargetState.SERVING, TargetState.SYNCING, None)
"""None: in no state, since it is not in the chain."""

R = TypeVar("R", bound=msgspec.Struct)


class Table(Generic[R]):
    """Rows of one kind. `get` and `ids` see the draft."""

    def __init__(self, kind: Kind[R]) -> None:
        self.kind = kind
        self._rows: dict[int, R] = {}
        self._draft: dict[int, R | None] = {}

    @property
    def committed(self) -> Mapping[int, R]:
        return MappingProxyType(self._rows)

    def get(self, row_id: int) -> R | None:
        return self._draft[row_id] if row_id in self._draft else self._rows.get(row_id)

    def ids(self) -> list[int]:
        """Sorted."""
        merged: dict[int, R | None] = {**self._rows, **self._draft}
        return sorted(row_id for row_id, row in merged.items() if row is not None)

    def __len__(self) -> int:
        created = sum(1 for row_id, row in self._draft.items() if row is not None and row_id not in self._rows)
        removed = sum(1 for row_id, row in self._draft.items() if row is None and row_id in self._rows)
        return len(self._rows) + created - removed

    def put(self, row_id: int, row: R | None) -> None:
        """None removes it."""
        self._draft[row_id] = row

    def in_draft(self, row_id: int) -> bool:
        return row_id in self._draft

    def load(self, key: bytes, value: bytes) -> None:
        row_id, row = self.kind.decode(key, value)
        self._rows[row_id] = row

    def changes(self) -> Iterator[tuple[int, R | None]]:
        yield from self._draft.items()

    def commit(self) -> None:
        for row_id, row in self._draft.items():
            if row is None:
                self._rows.pop(row_id, None)
            else:
                self._rows[row_id] = row
        self._draft.clear()

    def rollback(self) -> None:
        self._draft.clear()


class Ledger:
    """All tables, the state row, and which target is in which chain."""

    def __init__(self, term: int, failure_timeout_ns: int, cluster: str = "") -> None:
        """Empty, as a cluster begins; `failure_timeout_ns` and `cluster` are what it then gets."""
        self.nodes, self.targets = Table(NODES), Table(TARGETS)
        self.chains, self.tables = Table(CHAINS), Table(TABLES)
        self.sessions, self.moves = Table(SESSIONS), Table(MOVES)
        self.state = StateRow(0, failure_timeout_ns, 0, 0, cluster)
        self._state_raw: bytes | None = None
        self._next_state: StateRow | None = None
        self._next_keys: tuple[int, ...] | None = None
        self._term = term
        self._number = 0
        self._next_client = self.state.next_client
        self.log = RoutingLog(0)
        self._chain_of: dict[int, int] = {}
        self._targets_of: dict[int, dict[int, None]] = {}

    def load(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises `DataCorruption` for rows that are not the manager's."""
        tables = self._tables()
        for key, value in items:
            if key == STATE_KEY:
                self.state, self._state_raw = decode_row(key, value, StateRow), value
                continue
            owner = next((one for one in tables if key.startswith(one.kind.prefix)), None)
            if owner is None:
                raise DataCorruption(f"row {key.hex()} is of no kind that the manager keeps; restore the store")
            owner.load(key, value)
        for chain in self.chains.committed.values():
            self._chain_of.update((member.target, chain.id) for member in chain.members)
        for target in self.targets.committed.values():
            self._targets_of.setdefault(target.node, {})[target.id] = None
        self.log = RoutingLog(self.state.version)
        self._number = self.state.number if self.state.term == self._term else 0
        self._next_client = self.state.next_client

    @property
    def term(self) -> int:
        """Of the primary whose it is."""
        return self._term

    def _tables(
        self,
    ) -> tuple[Table[NodeRow], Table[TargetRow], Table[Chain], Table[ChainTable], Table[SessionRow], Table[MoveRow]]:
        return self.nodes, self.targets, self.chains, self.tables, self.sessions, self.moves

    # --- reading what is committed ---

    def chain_of(self, target: int) -> int | None:
        return self._chain_of.get(target)

    def targets_of(self, node: int) -> list[int]:
        return sorted(self._targets_of.get(node, {}))

    def chains_of_node(self, node: int) -> list[int]:
        """Of its targets, sorted."""
        found = {self._chain_of[target]: None for target in self._targets_of.get(node, {}) if target in self._chain_of}
        return sorted(found)

    def delta(self, known: RoutingVersion) -> RoutingDelta | None:
        """What changed since, of what is committed; None if nothing did."""
        nodes, chains, tables = self.nodes.committed, self.chains.committed, self.tables.committed
        return self.log.delta(known, self.state.version, nodes, chains, tables)

    # --- the draft ---

    def put_chain(self, chain_id: int, members: tuple[Member, ...]) -> None:
        """Its next version; one more than the committed one, however often it is put."""
        old = self.chains.committed.get(chain_id)
        version = old.version if old is not None else 0
        self.chains.put(chain_id, Chain(chain_id, version + 1, members))
        before = {member.target: member.state for member in old.members} if old is not None else {}
        after = {member.target: member.state for member in members}
        for target in (*before, *(one for one in after if one not in before)):
            row = self.targets.get(target)
            if row is None:
                continue
            changed = row
            left = before.get(target) is TargetState.SERVING and after.get(target) is not TargetState.SERVING
            if left:
                changed = msgspec.structs.replace(row, served_until=version, intact_until=version)
            elif after.get(target) in _BEING_CHANGED or target not in before:
                changed = msgspec.structs.replace(row, intact_until=0)
            if changed != row:
                self.targets.put(target, changed)

    def new_client(self) -> ClientId:
        """The id of a new session; given out when the draft is committed."""
        self._next_client += 1
        return self._next_client - 1

    @property
    def key_ids(self) -> tuple[int, ...]:
        """The draft's."""
        return self._next_keys if self._next_keys is not None else self.state.key_ids

    def put_keys(self, key_ids: tuple[int, ...]) -> None:
        self._next_keys = key_ids

    def draft_rows(self) -> int:
        return sum(1 for table in self._tables() for _ in table.changes())

    def pending(self) -> tuple[tuple[tuple[bytes, bytes | None], ...], tuple[bytes, bytes | None]] | None:
        """Rows to write, and the row that must be there still: of the transaction before. None: the draft is empty."""
        writes: list[tuple[bytes, bytes | None]] = []
        public = False
        for table in self._tables():
            for row_id, row in table.changes():
                writes.append((table.kind.key(row_id), None if row is None else encode_row(row)))
                public = public or table.kind not in (TARGETS, SESSIONS, MOVES)
        if not writes and self._next_keys is None and self._state_raw is not None:
            return None
        self._number += 1
        version = self.state.version + (1 if public or self._state_raw is None else 0)
        sessions = self.state.sessions + (1 if any(True for _ in self.sessions.changes()) else 0)
        self._next_state = msgspec.structs.replace(
            self.state,
            version=version,
            term=self._term,
            number=self._number,
            sessions=sessions,
            next_client=self._next_client,
            key_ids=self.key_ids,
        )
        writes.append((STATE_KEY, encode_row(self._next_state)))
        return tuple(writes), (STATE_KEY, self._state_raw)

    def commit(self) -> None:
        if self._next_state is None:
            raise InvariantViolation("the manager commits a draft that was never pending")
        self.state, self._next_state, self._next_keys = self._next_state, None, None
        self._state_raw = encode_row(self.state)
        for table in self._tables():
            for row_id, _ in table.changes():
                self.log.record(table.kind.prefix, row_id, self.state.version)
        for chain_id, chain in self.chains.changes():
            old = self.chains.committed.get(chain_id)
            for member in old.members if old is not None else ():
                self._chain_of.pop(member.target, None)
            self._chain_of.update((member.target, chain_id) for member in (chain.members if chain is not None else ()))
        for target_id, target in self.targets.changes():
            known = self.targets.committed.get(target_id)
            if target is not None:
                self._targets_of.setdefault(target.node, {})[target_id] = None
            elif known is not None:
                self._targets_of.get(known.node, {}).pop(target_id, None)
        for table in self._tables():
            table.commit()

    def rollback(self) -> None:
        self._next_state, self._next_client, self._next_keys = None, self.state.next_client, None
        for table in self._tables():
            table.rollback()
