"""The dumps of a group laid side by side: for each rank and each collective, what is known of the rank there.

Pure. A rank that left a dump is known by its records; of one that did not, others of its node and neighbouring nodes
may have seen how many collectives it had entered. Times of all ranks are put on the wall clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.collectives.flight.dump import Dump, Record

__all__ = ["CallState", "Evidence", "RankFacts", "call_name"]


class CallState(Enum):
    """Where a rank stands with one collective."""

    DONE = "done"
    INSIDE = "inside"
    QUEUED = "queued"
    """Called, but an earlier one is still under way."""
    REFUSED = "too late"
    """Called only when the group had already failed."""
    ABSENT = "not called"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class RankFacts:
    """All that is known of one rank."""

    rank: int
    label: str
    dump: Dump | None = None
    calls: dict[int, Record] = field(default_factory=dict)
    """Collectives that its dump records, by number."""
    messages: list[Record] = field(default_factory=list)
    entered: int = 0
    finished: int = 0
    left: bool = False
    seen: bool = False
    """It has a dump, or somebody saw it."""
    first_recorded: int = 0
    too_late: frozenset[int] = frozenset()
    """Collectives that it entered when another rank had already given up."""

    def at(self, seq: int) -> CallState:
        record = self.calls.get(seq)
        if record is not None:
            if record.state == "done":
                return CallState.DONE
            if record.inside and seq not in self.too_late:
                return CallState.INSIDE
            return CallState.REFUSED if record.state == "failed" else CallState.QUEUED
        if seq < self.finished or seq < self.first_recorded:
            return CallState.DONE
        if seq < self.entered:
            return CallState.INSIDE if self.dump is None else CallState.QUEUED
        return CallState.ABSENT if self.seen else CallState.UNKNOWN

    def messages_with(self, kind: str, peer: int, tag: int) -> list[Record]:
        """Ascending in the order of the calls."""
        return [one for one in self.messages if (one.kind, one.peer, one.tag) == (kind, peer, tag)]


class Evidence:
    """Of one group. Raises `UsageError` where the dumps contradict each other."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        if not dumps:
            raise UsageError("no dumps to explain")
        first = dumps[0]
        for dump in dumps:
            for what in ("group", "world_size", "plan"):
                if getattr(dump, what) != getattr(first, what):
                    raise UsageError(
                        f"the dumps of rank {first.rank} and rank {dump.rank} are of different groups: {what} is "
                        f"{getattr(first, what)!r} and {getattr(dump, what)!r}"
                    )
        self.group = first.group
        self.timeout_ns = first.timeout_ns
        self.patience_ns = min(SECOND, first.timeout_ns // 4)
        """Who has waited for less is not yet held up."""
        latest: dict[int, Dump] = {}
        for dump in sorted(dumps, key=lambda dump: dump.snapshot.realtime_ns):
            latest[dump.rank] = dump
        self.dumps = [latest[rank] for rank in sorted(latest)]
        self.ranks = [RankFacts(rank, self._label(rank)) for rank in range(first.world_size)]
        for dump in self.dumps:
            self._take(dump)
        for dump in self.dumps:
            self._take_peer_progress(dump)
        self._find_late()

    def _label(self, rank: int) -> str:
        for dump in self.dumps:
            if rank in dump.labels:
                return dump.labels[rank]
        return f"rank {rank}"

    def _take(self, dump: Dump) -> None:
        facts = self.ranks[dump.rank]
        facts.dump, facts.seen = dump, True
        facts.calls = {record.seq: record for record in dump.snapshot.records if not record.message}
        facts.messages = [record for record in dump.snapshot.records if record.message]
        facts.entered, facts.finished = dump.snapshot.submitted, dump.snapshot.finished
        ended = [record.seq for record in facts.calls.values() if record.state in ("done", "failed")]
        facts.first_recorded = min(ended, default=0)

    def _take_peer_progress(self, dump: Dump) -> None:
        for progress in dump.snapshot.peer_progress:
            facts = self.ranks[progress.rank]
            facts.left |= progress.left
            if facts.dump is None:
                facts.seen = True
                facts.entered = max(facts.entered, progress.entered)
                facts.finished = max(facts.finished, progress.finished)

    def _find_late(self) -> None:
        """Whoever entered after the failure noticed it at once; the others had waited."""
        ends = [
            (self.wall_ns(facts.rank, record.finished_ns), facts.rank)
            for facts in self.ranks
            for record in facts.calls.values()
            if record.state == "failed" and record.inside
        ]
        if not ends:
            return
        failed_ns, witness = min(ends)
        for facts in self.ranks:
            if facts.dump is not None and facts.rank != witness:
                facts.too_late = frozenset(
                    seq
                    for seq, record in facts.calls.items()
                    if record.state == "failed"
                    and self.wall_ns(facts.rank, record.started_ns) > failed_ns
                    and self.waited_ns(facts.rank, record) < self.patience_ns
                )

    def stuck(self) -> int | None:
        """The first collective that somebody began, or waits to begin, and has not ended well."""
        open_calls = [seq for facts in self.ranks for seq, record in facts.calls.items() if record.state != "done"]
        unseen = [facts.finished for facts in self.ranks if facts.dump is None and facts.entered > facts.finished]
        return min(open_calls + unseen, default=None)

    def call(self, seq: int) -> Record | None:
        """What the first rank that recorded it called."""
        return next((facts.calls[seq] for facts in self.ranks if seq in facts.calls), None)

    def wall_ns(self, rank: int, monotonic_ns: int) -> int:
        return self._dump_of(rank).wall_ns(monotonic_ns)

    def dumped_ns(self, rank: int) -> int:
        return self._dump_of(rank).snapshot.realtime_ns

    def waited_ns(self, rank: int, record: Record) -> int:
        """How long the rank has been, or was, inside an operation."""
        return (record.finished_ns or self._dump_of(rank).snapshot.monotonic_ns) - record.started_ns

    def _dump_of(self, rank: int) -> Dump:
        dump = self.ranks[rank].dump
        assert dump is not None  # noqa: S101 - times are asked for of ranks with records, and those come from dumps
        return dump


def call_name(seq: int, record: Record | None) -> str:
    """`allreduce #17 of 1000 f32`."""
    if record is None:
        return f"collective #{seq}"
    kind, rest = record.kind, record.call()[len(record.kind) :]
    return f"{kind} #{seq}{rest}"
