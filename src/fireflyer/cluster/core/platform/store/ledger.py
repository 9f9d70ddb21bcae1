"""What the leader knows to be in the store, and the draft of the next transaction.

    get      sees the draft; `committed` does not
    pending  the rows of the draft, or None if there are none
    commit   the store has written them            rollback   it never will

Who asks is answered from what is committed. Only the leader writes, and it has one draft at a time, so what it has in
memory is what the store has.

*Cluster time.* All durable times are nanoseconds of one clock that never goes back: that of the leader, set once, when
it begins to lead, to its wall clock, or to the time of the last transaction if that is later. So spans inside one term
are exact on one monotonic clock, spans across terms are as good as the wall clocks of managers, and all spans of a task
add up, whatever clocks do. Nothing that must be safe depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec

from fireflyer.base.errors import DataCorruption, InvariantViolation
from fireflyer.cluster.core.health.records import NodeHealth, PartHistory, RepairTicket
from fireflyer.cluster.core.platform.store.history import HistoryRow, encode_history
from fireflyer.cluster.core.platform.store.index import Index
from fireflyer.cluster.core.platform.store.rows import (
    CONFIG_KEY,
    HEALTH,
    JOBS,
    NODES,
    NOTIFICATIONS,
    PARTS,
    PLACES,
    REPAIRS,
    RUNS,
    STATE_KEY,
    SUBMISSIONS,
    TASKS,
    USAGE,
    WEBHOOKS,
    ClusterRow,
    ConfigRow,
    JobRow,
    NodeRow,
    NotificationRow,
    PlaceRow,
    RowKind,
    RunRow,
    SubmissionRow,
    TaskRow,
    UsageRow,
    WebhookRow,
    decode_row,
    encode_row,
    outbox_key,
)

__all__ = ["RANGES", "Change", "Ledger", "Table"]

K = TypeVar("K")
R = TypeVar("R", bound=msgspec.Struct)

RANGES = (
    (
        (STATE_KEY, STATE_KEY + b"\0"),
        (CONFIG_KEY, CONFIG_KEY + b"\0"),
        *((kind.prefix, kind.end) for kind in (WEBHOOKS, NOTIFICATIONS, HEALTH, REPAIRS, PARTS)),
    ),
    *(((kind.prefix, kind.end),) for kind in (NODES, PLACES, USAGE, SUBMISSIONS, TASKS, RUNS, JOBS)),
)
"""What a new leader reads, one transaction after the other: nobody else writes meanwhile, so together they are one
state. The outbox is not read."""
CLEARED_PER_DRAFT = 2000


class Change(msgspec.Struct, frozen=True):
    """That somebody may watch."""

    what: str
    name: str
    state: str


class Table(Generic[K, R]):
    """Rows of one kind."""

    def __init__(self, kind: RowKind[R]) -> None:
        self.kind = kind
        self._rows: dict[K, R] = {}
        self._draft: dict[K, R | None] = {}

    @property
    def committed(self) -> Mapping[K, R]:
        return MappingProxyType(self._rows)

    def get(self, key: K) -> R | None:
        return self._draft[key] if key in self._draft else self._rows.get(key)

    def known(self, key: K) -> R:
        row = self.get(key)
        if row is None:
            raise InvariantViolation(f"no row {key!r} of {self.kind.prefix.decode()}")
        return row

    def put(self, key: K, row: R | None) -> None:
        """None removes it."""
        self._draft[key] = row

    def rows(self) -> Iterator[tuple[K, R]]:
        """With the draft."""
        for key, row in self._rows.items():
            if key not in self._draft:
                yield key, row
        for key, new in self._draft.items():
            if new is not None:
                yield key, new

    def changes(self) -> Mapping[K, R | None]:
        return MappingProxyType(self._draft)

    def load(self, key: K, row: R) -> None:
        self._rows[key] = row

    def writes(self) -> Iterator[tuple[bytes, bytes | None]]:
        for key, row in self._draft.items():
            if row is not None:
                yield self.kind.key(row), encode_row(row)
            elif key in self._rows:
                yield self.kind.key(self._rows[key]), None

    def commit(self) -> None:
        for key, row in self._draft.items():
            if row is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = row
        self._draft.clear()

    def rollback(self) -> None:
        self._draft.clear()

    def __len__(self) -> int:
        """Of what is committed."""
        return len(self._rows)


class Ledger:
    def __init__(self, *, term: int, cluster: str, history: bool, wall_ns: int, now_ns: int) -> None:
        """Empty, as a cluster begins; `load` and then `begin` make it what the store has."""
        self.tasks: Table[int, TaskRow] = Table(TASKS)
        self.submissions: Table[int, SubmissionRow] = Table(SUBMISSIONS)
        self.runs: Table[tuple[int, int], RunRow] = Table(RUNS)
        self.nodes: Table[str, NodeRow] = Table(NODES)
        self.places: Table[str, PlaceRow] = Table(PLACES)
        self.usage: Table[str, UsageRow] = Table(USAGE)
        self.webhooks: Table[int, WebhookRow] = Table(WEBHOOKS)
        self.notifications: Table[int, NotificationRow] = Table(NOTIFICATIONS)
        self.jobs: Table[tuple[int, int], JobRow] = Table(JOBS)
        self.health: Table[str, NodeHealth] = Table(HEALTH)
        self.tickets: Table[int, RepairTicket] = Table(REPAIRS)
        self.parts: Table[str, PartHistory] = Table(PARTS)
        self.index = Index()
        self.config, self._next_config = ConfigRow(), None
        self.state = ClusterRow(cluster=cluster, time_ns=wall_ns, totals_at_ns=wall_ns)
        self._state_raw: bytes | None = None
        self.term = term
        self._history = history
        self._number = 0
        self._wall_ns, self._anchor_ns = wall_ns, now_ns
        self._base_ns = wall_ns
        self._next_state: ClusterRow | None = None
        self._draft = self.state
        self._changes: list[Change] = []
        self._outbox: list[bytes] = []

    _next_config: ConfigRow | None

    def tables(self) -> tuple[Table[Any, Any], ...]:
        return (
            self.nodes, self.places, self.usage, self.submissions, self.tasks, self.runs, self.webhooks,
            self.notifications, self.jobs, self.health, self.tickets, self.parts,
        )  # fmt: skip

    # --- loading ---

    def load(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises `DataCorruption` for rows that are not the platform's."""
        for key, value in items:
            if key == STATE_KEY:
                self.state, self._state_raw = decode_row(key, value, ClusterRow), value
            elif key == CONFIG_KEY:
                self.config = decode_row(key, value, ConfigRow)
            else:
                self._load_one(key, value)

    def _load_one(self, key: bytes, value: bytes) -> None:
        for table in self.tables():
            if key.startswith(table.kind.prefix):
                row = table.kind.decode(key, value)
                match row:
                    case NotificationRow():
                        table.load(row.number, row)
                    case TaskRow() | SubmissionRow() | WebhookRow() | RepairTicket():
                        table.load(row.id, row)
                    case PartHistory():
                        table.load(row.key, row)
                    case RunRow() | JobRow():
                        table.load((row.task, row.number), row)
                    case _:
                        table.load(row.name, row)
                return
        raise DataCorruption(f"row {key.hex()} is of no kind that the platform keeps; restore the store")

    def begin(self) -> None:
        """After all is loaded: sets cluster time, and the index."""
        self._base_ns = max(self._wall_ns, self.state.time_ns)
        self._number = self.state.number if self.state.term == self.term else 0
        self._reset()

    def _reset(self) -> None:
        self._draft, self._next_state, self._next_config = self.state, None, None
        self._changes, self._outbox = [], []
        self.index = Index.of(
            self.tasks.committed.values(), self.runs.committed.values(), self.places.committed.values(),
            self.submissions.committed.values(), self.webhooks.committed.values(),
            self.notifications.committed.values(),
        )  # fmt: skip

    def time_ns(self, now_ns: int) -> int:
        """Cluster time."""
        return self._base_ns + now_ns - self._anchor_ns

    # --- the draft ---

    def put_task(self, row: TaskRow) -> None:
        self.index.task(self.tasks.get(row.id), row, self.submissions.known(row.submission).spec)
        self.tasks.put(row.id, row)

    def drop_task(self, row: TaskRow) -> None:
        """With its runs; and its submission with the last task of it."""
        submission = self.submissions.known(row.submission)
        self.index.task(row, None, submission.spec)
        self.tasks.put(row.id, None)
        for number in range(row.runs):
            self.drop_run((row.id, number))
        for number in range(row.jobs):
            if self.jobs.get((row.id, number)) is not None:
                self.jobs.put((row.id, number), None)
        if not self.index.tasks_of_submission(submission.id):
            self.index.submission(submission, None, row.user)
            self.submissions.put(submission.id, None)

    def put_run(self, row: RunRow) -> None:
        key = row.task, row.number
        self.index.run(self.runs.get(key), row)
        self.runs.put(key, row)

    def drop_run(self, key: tuple[int, int]) -> None:
        """Nothing happens where there is none."""
        row = self.runs.get(key)
        if row is not None:
            self.index.run_dropped(row)
            self.runs.put(key, None)

    def put_place(self, node: str, place: PlaceRow | None) -> None:
        self.index.place(self.places.get(node), place)
        self.places.put(node, place)

    def put_submission(self, row: SubmissionRow, user: str) -> None:
        self.index.submission(None, row, user)
        self.submissions.put(row.id, row)

    def put_webhook(self, row: WebhookRow, *, keep: bool = True) -> None:
        self.index.webhook(row, keep=keep)
        self.webhooks.put(row.id, row if keep else None)

    def put_notification(self, row: NotificationRow, *, keep: bool = True) -> None:
        """One that is new, or (not `keep`) goes."""
        self.index.notification(row, keep=keep)
        self.notifications.put(row.number, row if keep else None)

    @property
    def settings(self) -> ConfigRow:
        """What the site sets, with the draft."""
        return self._next_config or self.config

    def put_settings(self, row: ConfigRow) -> None:
        self._next_config = row

    def new_tasks(self, count: int) -> int:
        """Id of the first one."""
        first = self._draft.next_task
        self._draft = msgspec.structs.replace(self._draft, next_task=first + count)
        return first

    def new_webhook(self) -> int:
        self._draft = msgspec.structs.replace(self._draft, next_webhook=self._draft.next_webhook + 1)
        return self._draft.next_webhook - 1

    def new_notification(self) -> int:
        self._draft = msgspec.structs.replace(self._draft, next_notification=self._draft.next_notification + 1)
        return self._draft.next_notification - 1

    def add_productive(self, node_ns: int) -> None:
        self._draft = msgspec.structs.replace(self._draft, productive_ns=self._draft.productive_ns + node_ns)

    def put_totals(self, *, at_ns: int, node_ns: int, healthy_ns: int, allocated_ns: int) -> None:
        """Written with the next transaction."""
        self._draft = msgspec.structs.replace(
            self._draft, totals_at_ns=at_ns, node_ns=node_ns, healthy_ns=healthy_ns, allocated_ns=allocated_ns
        )

    @property
    def draft_state(self) -> ClusterRow:
        return self._draft

    def changed(self, what: str, name: str, state: str) -> None:
        self._changes.append(Change(what, name, state))

    def record(self, row: HistoryRow) -> None:
        if self._history:
            self._outbox.append(encode_history(row))

    def clear_outbox(self, until: int) -> int:
        """Of rows that were copied, as many as one draft clears. The first one that is left."""
        last = min(until, self._draft.outbox_next, self._draft.outbox_first + CLEARED_PER_DRAFT)
        self._draft = msgspec.structs.replace(self._draft, outbox_first=max(last, self._draft.outbox_first))
        return self._draft.outbox_first

    def outbox_rows(self) -> int:
        return self._draft.outbox_next - self._draft.outbox_first + len(self._outbox)

    def draft_rows(self) -> int:
        return sum(len(table.changes()) for table in self.tables()) + len(self._outbox)

    def pending(self, time_ns: int) -> tuple[tuple[tuple[bytes, bytes | None], ...], tuple[bytes, bytes | None]] | None:
        """Rows to write, and the row that must be there still: of the transaction before. None: the draft is empty."""
        writes = [write for table in self.tables() for write in table.writes()]
        if self._next_config is not None:
            writes.append((CONFIG_KEY, encode_row(self._next_config)))
        writes += [(outbox_key(number), None) for number in range(self.state.outbox_first, self._draft.outbox_first)]
        if not writes and self._state_raw is not None and not self._outbox:
            self._draft = self.state
            return None
        first = self._draft.outbox_next
        writes += [(outbox_key(first + place), row) for place, row in enumerate(self._outbox)]
        self._number += 1
        self._next_state = msgspec.structs.replace(
            self._draft,
            term=self.term,
            number=self._number,
            time_ns=time_ns,
            changes=self._draft.changes + len(self._changes),
            outbox_next=first + len(self._outbox),
        )
        writes.append((STATE_KEY, encode_row(self._next_state)))
        return tuple(writes), (STATE_KEY, self._state_raw)

    def commit(self) -> tuple[int, list[Change]]:
        """Changes that may be told, and the number of the first one."""
        if self._next_state is None:
            raise InvariantViolation("the platform's manager commits a draft that was never pending")
        first, changes = self.state.changes + 1, self._changes
        self.state, self._next_state = self._next_state, None
        self._state_raw = encode_row(self.state)
        self._draft = self.state
        if self._next_config is not None:
            self.config, self._next_config = self._next_config, None
        self._changes, self._outbox = [], []
        for table in self.tables():
            table.commit()
        return first, changes

    def rollback(self) -> None:
        for table in self.tables():
            table.rollback()
        self._reset()
