"""A model of the chunk engine: what is in memory, what is in the journal, and what of the journal is durable.

Records are appended in order and made durable in order. A power cut keeps what was durable and, by chance, some more
of the journal from there on; a record that was torn is as good as absent, and so is what follows it. Data carry their
checksum: bits that flip are found by whoever reads the block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fireflyer.base.units import MS
from fireflyer.fs.core.chain.effects import (
    Commit,
    Drop,
    Dropped,
    Entry,
    Failure,
    Forget,
    InstallRecords,
    PendingContent,
    RecordsInstalled,
    Stage,
    Staged,
    StageFailed,
)
from fireflyer.fs.schema.chunks import Change, ChunkEntry, ChunkVersion, CompletionRecord, Operation
from fireflyer.fs.schema.ids import Channel, ChunkId, ClientId, ContentId
from fireflyer.native import crc32c

__all__ = ["Block", "Disk", "Engine", "changed"]


@dataclass(eq=False)
class Block:
    """Bytes on the disk, with the checksum that was written beside them."""

    data: bytes
    crc: int

    @property
    def sound(self) -> bool:
        return crc32c(self.data) == self.crc


@dataclass(frozen=True)
class Record:
    """`held` and `block` are None where nothing is committed, or a removal is pending."""

    held: ChunkVersion | None = None
    block: Block | None = None
    pending: PendingContent | None = None
    pending_block: Block | None = None
    damaged: bool = False


Journal = Stage | Commit | Drop | InstallRecords | Forget


@dataclass
class Books:
    """What a journal says, applied record by record. It is the index that the machine looks into."""

    records: dict[ChunkId, Record] = field(default_factory=dict)
    known_completions: dict[tuple[ClientId, Channel], CompletionRecord] = field(default_factory=dict)

    def apply(self, entry: Journal, held: ChunkVersion | None, block: Block | None) -> None:
        match entry:
            case Stage():
                self._stage(entry, held, block)
            case Commit(chunk, content):
                record = self._with_pending(chunk, content)
                held = record.pending.held if record.pending else None
                self._put(chunk, Record(held, record.pending_block))
            case Drop(chunk, content, completion):
                record = self._with_pending(chunk, content)
                self._put(chunk, replace(record, pending=None, pending_block=None))
                if completion is not None:
                    self._drop_completion(completion)
            case InstallRecords(completions, reset):
                if reset:
                    self.known_completions.clear()
                for one in completions:
                    self._completion(one)
            case Forget(client):
                for key in [key for key in self.known_completions if key[0] == client]:
                    del self.known_completions[key]

    def _stage(self, entry: Stage, held: ChunkVersion | None, block: Block | None) -> None:
        record = self.records.get(entry.chunk, Record())
        self._put(entry.chunk, replace(record, pending=PendingContent(entry.id, held), pending_block=block))
        if entry.completion is not None:
            self._completion(entry.completion)

    def _with_pending(self, chunk: ChunkId, content: ContentId) -> Record:
        record = self.records[chunk]
        assert record.pending is not None, f"nothing is pending of {chunk}"
        assert record.pending.id == content
        return record

    def _drop_completion(self, completion: CompletionRecord) -> None:
        last = self.known_completions.get((completion.client, completion.channel))
        if last is None or last.sequence == completion.sequence:
            self.known_completions[completion.client, completion.channel] = completion

    def _completion(self, completion: CompletionRecord) -> None:
        if completion.replaces(self.known_completions.get((completion.client, completion.channel))):
            self.known_completions[completion.client, completion.channel] = completion

    def _put(self, chunk: ChunkId, record: Record) -> None:
        if record.held is None and record.pending is None:
            self.records.pop(chunk, None)
        else:
            self.records[chunk] = record

    # --- the index ---

    @property
    def completion_count(self) -> int:
        return len(self.known_completions)

    def find(self, chunk: ChunkId) -> Entry | None:
        record = self.records.get(chunk)
        return None if record is None else Entry(record.held, record.pending, record.damaged)

    def completion(self, client: ClientId, channel: Channel) -> CompletionRecord | None:
        return self.known_completions.get((client, channel))

    def completions(self, after: tuple[ClientId, Channel] | None, limit: int) -> tuple[CompletionRecord, ...]:
        keys = sorted(key for key in self.known_completions if after is None or key > after)
        return tuple(self.known_completions[key] for key in keys[:limit])

    def chunks(self, after: ChunkId | None, limit: int) -> tuple[ChunkEntry, ...]:
        names = sorted(name for name in self.records if after is None or name > after)[:limit]
        return tuple(self._listed(name, self.records[name]) for name in names)

    def _listed(self, name: ChunkId, record: Record) -> ChunkEntry:
        return ChunkEntry(name, None if record.pending is not None or record.damaged else record.held)

    def of_file(self, file: int, index: int, *, backwards: bool = False) -> Iterator[ChunkId]:
        names = sorted((name for name in self.records if name.file == file), reverse=backwards)
        return iter([name for name in names if (name.index <= index if backwards else name.index >= index)])

    def pending(self) -> tuple[ChunkId, ...]:
        return tuple(sorted(name for name, record in self.records.items() if record.pending is not None))


@dataclass
class Disk:
    """What survives the process."""

    journal: list[tuple[Journal, ChunkVersion | None, Block | None]] = field(default_factory=list)
    durable: int = 0
    """So many records of the journal are on the platter."""

    def cut_power(self, rng: random.Random) -> None:
        kept = rng.randint(self.durable, len(self.journal))
        del self.journal[kept:]
        self.durable = kept


def changed(data: bytes | None, change: Change, given: bytes) -> bytes | None:
    """What becomes of a chunk's content. The definition, in three lines."""
    old = data or b""
    match change.operation:
        case Operation.WRITE:
            return old[: change.offset].ljust(change.offset, b"\0") + given + old[change.offset + len(given) :]
        case Operation.TRUNCATE:
            return old[: change.length].ljust(change.length, b"\0")
        case Operation.REPLACE:
            return given
    return None


class Engine:
    """One incarnation's engine. `stage` and `adopt` say how long they take, and what to do when that is over."""

    def __init__(self, disk: Disk, rng: random.Random) -> None:
        self.disk = disk
        self.index = Books()
        disk.durable = len(disk.journal)
        for entry, held, block in disk.journal:
            self.index.apply(entry, held, block)
        self.slow_ns = 0
        self.full = False
        self._rng = rng
        self._adopt_due_ns = 0

    def stage(self, effect: Stage, given: bytes) -> tuple[int, int, Staged | StageFailed]:
        """(delay, number of the record that must be durable by then, event). The content is made at once."""
        record = self.index.records.get(effect.chunk, Record())
        assert record.pending is None, f"{effect} over {record.pending}"
        if effect.change.operation is not Operation.REPLACE:
            assert effect.base == (record.held.id if record.held else None), f"{effect} on {record.held}"
        removes = effect.change.operation is Operation.REMOVE
        if effect.change.carries_data and crc32c(given) != effect.change.crc:
            return self.delay_ns(), 0, StageFailed(effect.chunk, effect.id, Failure.BAD_DATA)
        if self.full and not removes:
            return self.delay_ns(), 0, StageFailed(effect.chunk, effect.id, Failure.NO_SPACE)
        reads = effect.change.operation in (Operation.WRITE, Operation.TRUNCATE)
        if reads and record.block is not None and not record.block.sound:
            self.note_damage(effect.chunk)
            return self.delay_ns(), 0, StageFailed(effect.chunk, effect.id, Failure.DAMAGED)
        content = changed(record.block.data if record.block else None, effect.change, given)
        held = block = None
        if content is not None:
            block = Block(content, crc32c(content))
            held = ChunkVersion(effect.id, len(content), block.crc)
        self.disk.journal.append((effect, held, block))
        return self.delay_ns(), len(self.disk.journal), Staged(effect.chunk, effect.id, held)

    def staged(self, record: int) -> None:
        self._sync(record)
        self.index.apply(*self.disk.journal[record - 1])

    def adopt(self, effect: InstallRecords, now_ns: int) -> tuple[int, int, RecordsInstalled]:
        self.disk.journal.append((effect, None, None))
        self._adopt_due_ns = max(self._adopt_due_ns, now_ns + self.delay_ns()) + 1
        return self._adopt_due_ns - now_ns, len(self.disk.journal), RecordsInstalled()

    def drop(self, effect: Drop) -> tuple[int, int, Dropped]:
        self.note(effect)
        return self.delay_ns(), len(self.disk.journal), Dropped(effect.chunk, effect.id)

    def finish(self, record: int, event: Staged | StageFailed | Dropped | RecordsInstalled) -> None:
        """That record is durable; 0: there is none."""
        if isinstance(event, Dropped):
            self._sync(record)
        elif record:
            self.staged(record)

    def note(self, effect: Commit | Drop | Forget) -> None:
        """At once in memory; in the journal, and durable with what is made durable next."""
        self.disk.journal.append((effect, None, None))
        self.index.apply(effect, None, None)

    def note_damage(self, chunk: ChunkId) -> None:
        """In memory: after a restart it has to be found again."""
        if chunk in self.index.records:
            self.index.records[chunk] = replace(self.index.records[chunk], damaged=True)

    def load(self, chunk: ChunkId, content: ContentId) -> bytes | None:
        """The content; None if it is not there any more or damaged, which is put on record."""
        record = self.index.records.get(chunk, Record())
        for held, block in (
            (record.held, record.block),
            (record.pending and record.pending.held, record.pending_block),
        ):
            if held is not None and block is not None and held.id == content:
                if block.sound:
                    return block.data
                self.note_damage(chunk)
        return None

    def flip(self) -> bool:
        """Turns a bit of some committed block over."""
        blocks = [one.block for _, one in sorted(self.index.records.items()) if one.block and one.block.data]
        if blocks:
            block = self._rng.choice(blocks)
            at = self._rng.randrange(len(block.data))
            block.data = block.data[:at] + bytes([block.data[at] ^ 1 << self._rng.randrange(8)]) + block.data[at + 1 :]
        return bool(blocks)

    def delay_ns(self) -> int:
        return self._rng.randrange(MS // 10, 3 * MS) + (self._rng.randrange(self.slow_ns) if self.slow_ns else 0)

    def _sync(self, record: int) -> None:
        self.disk.durable = max(self.disk.durable, record)
