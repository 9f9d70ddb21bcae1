"""The order of things in one save. `schedule` says when there is one.

`SaveMachine` is one save on one rank, from its snapshot to its end; a new one is made for each save. Ranks talk
through keys of the store, below `prefix/attempt/sequence/`:

    rank 0                                        rank r
    TakeSnapshot                                  TakeSnapshot
    Open        .tmp-step-…                       Await    dir
    Publish     dir                               WriteShard   (file and its name durable)
    WriteShard                                    Publish  record/r
    Await       record/1 … record/W-1             Await    outcome
    Commit      manifest, rename, sync            Finish
    Publish     outcome
    Finish
    Listing, Discard …   (older ones beyond `keep`)
    Forget      keys of the save before

A record that is long (many tensors) is published in parts, `record/r/part/0` and so on, before `record/r`, which says
how many there are; rank 0 awaits and forgets them one rank after the other.

Why it is safe. A record is published when its shard and the shard's name are durable, and the manifest, written after
the last record, is made durable before the rename, with the shard of a rank that is alone: a directory that is called
`step-…` is whole. It is made in the
directory of this attempt's writer; its name carries the attempt, the sequence number and rank 0's random tag, and files
in it are created and never opened again, so neither a writer of an older save nor one of another launch can reach into
it. A newer attempt takes the writer's directory away, and with it what this one could commit or remove (`fence`). Older
checkpoints are removed after the new one's name is durable.

When something fails on rank r, it publishes the failure as its record; rank 0 then gives the save up, publishes that as
the outcome, and removes the directory. Checkpoints that were there before are not touched. When a rank dies, the
others' waits end by `timeout_ns`, or with the attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, InvariantViolation, UsageError, error_to_wire
from fireflyer.checkpoint.core.effects import (
    Await,
    Begin,
    Commit,
    Committed,
    Discard,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Forget,
    KeyReceived,
    Listed,
    Listing,
    Open,
    Publish,
    ShardWritten,
    TakeSnapshot,
    WriteShard,
)
from fireflyer.checkpoint.core.manifest import (
    Manifest,
    PlanRecord,
    Saved,
    ShardRecord,
    check_manifest,
    decode_record,
    encode_manifest,
    encode_record,
    version_of,
)
from fireflyer.checkpoint.core.names import MAX_STEP, is_temporary, shard_name, temporary_name
from fireflyer.checkpoint.core.record_parts import MAX_PARTS, WHOLE_BYTES, join_parts, split_record
from fireflyer.checkpoint.core.retention import to_remove

__all__ = ["Phase", "SaveMachine", "Settings"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change during an attempt. `writer` as in `temporary_name`; its directory; rank 0's count."""

    rank: int
    world_size: int
    attempt: int
    keep: int
    keep_every: int | None = None
    prefix: str
    timeout_ns: int
    job_plan: dict[str, Any] | None = None
    plans: tuple[PlanRecord, ...] = ()
    writer: str = ""
    writer_directory: str = ""
    newest_step: int | None = None
    """The largest that a checkpoint in the directory can have, -1 where there is none; None: not known."""


class Phase(enum.Enum):
    NEW = "new"
    SNAPSHOT = "snapshot"
    OPENING = "opening"
    INVITING = "inviting"
    INVITED = "waiting for the directory"
    WRITING = "writing"
    COLLECTING = "waiting for the other ranks' shards"
    FORGETTING = "forgetting the parts of a record"
    COMMITTING = "committing"
    ANNOUNCING = "announcing"
    REPORTING = "reporting"
    LISTENING = "waiting for rank 0 to commit"
    FINISHING = "finishing"
    TIDYING = "tidying"
    END = "end"


class _Answer(msgspec.Struct, frozen=True):
    """A message between ranks: the failure, or what there is to say."""

    failed: Failed | None = None
    name: str | None = None
    size_bytes: int = 0
    record: msgspec.Raw = msgspec.Raw(b"null")


class _InParts(msgspec.Struct, frozen=True):
    """In the place of a record: it is in so many parts."""

    parts: int = 0


class SaveMachine:
    """One save on one rank. `refused` are the checkpoints that the restore of this attempt passed over; the store may
    still hold keys of the sequence numbers from `forget_from` on (None: of none)."""

    def __init__(
        self,
        settings: Settings,
        *,
        step: int,
        sequence: int,
        values: dict[str, Any],
        refused: Sequence[str] = (),
        forget_from: int | None = None,
        saved: Saved | None = None,
    ) -> None:
        if not 0 <= step <= MAX_STEP:
            raise UsageError(f"step {step} is out of range; it must be between 0 and {MAX_STEP}")
        self.settings = settings
        self.step = step
        self.sequence = sequence
        self.phase = Phase.NEW
        name = temporary_name(step, settings.attempt, sequence, settings.writer)
        self.directory = f"{settings.writer_directory}/{name}" if settings.writer_directory else name
        """Rank 0's, from the checkpoint directory; the others are told with `dir`."""
        self._values = values
        self._refused = refused
        self._saved = saved
        self._records: list[ShardRecord] = []
        self._forget_from = sequence if forget_from is None else forget_from
        self._parts: list[bytes] = []
        """Of the record that rank 0 is collecting."""
        self._parts_left = 0
        self._whole: list[ShardRecord] = []
        """The one that was collected in parts, while these are being forgotten."""
        self._announcements: list[Effect] = []
        self._tidy: list[Effect] = []
        self._answer = _Answer()
        self.notes: list[str] = []
        """What went wrong without harm, for the log."""

    def handle(self, now_ns: int, event: Event) -> list[Effect]:  # noqa: ARG002 - a machine's signature
        if isinstance(event, Failed):
            return self._failed(event)
        return self._lead(event) if self.settings.rank == 0 else self._follow(event)

    def _prefix(self, sequence: int) -> str:
        return f"{self.settings.prefix}/{self.settings.attempt}/{sequence}/"

    def _key(self, name: str) -> str:
        return self._prefix(self.sequence) + name

    def _enter(self, phase: Phase, *effects: Effect) -> list[Effect]:
        self.phase = phase
        return list(effects)

    def _unexpected(self, event: Event) -> InvariantViolation:
        return InvariantViolation(f"save of step {self.step}: {type(event).__name__} in phase {self.phase.value!r}")

    def _write(self) -> list[Effect]:
        file = shard_name(self.settings.rank, self.settings.world_size)
        return self._enter(Phase.WRITING, WriteShard(self.directory, file))

    # Rank 0.

    def _lead(self, event: Event) -> list[Effect]:
        match (self.phase, event):
            case (Phase.NEW, Begin()):
                return self._enter(Phase.SNAPSHOT, TakeSnapshot())
            case (Phase.SNAPSHOT, Done()):
                return self._enter(Phase.OPENING, Open(self.directory))
            case (Phase.OPENING, Done()) if self.settings.world_size > 1:
                invitation = msgspec.json.encode(_Answer(name=self.directory))
                return self._enter(Phase.INVITING, Publish(self._key("dir"), invitation))
            case (Phase.OPENING | Phase.INVITING, Done()):
                return self._write()
            case (Phase.WRITING, ShardWritten(record)):
                return self._collect(record)
            case (Phase.COLLECTING, KeyReceived(payload)):
                return self._receive(payload)
            case (Phase.COMMITTING, Committed(name)):
                size_bytes = sum(record.file_bytes for record in self._records)
                self._answer = _Answer(name=name, size_bytes=size_bytes)
                return self._announce("outcome")
            case (Phase.ANNOUNCING, Done()):
                return self._announce_next()
            case (Phase.FINISHING, Done()):
                return self._after_finish()
            case (Phase.TIDYING, Listed(names)):
                return self._plan_tidying(list(names))
            case (Phase.FORGETTING | Phase.TIDYING, Done()):
                return self._forgotten()
        raise self._unexpected(event)

    def _collect(self, record: ShardRecord) -> list[Effect]:
        self._records.append(record)
        rank = len(self._records)
        if rank < self.settings.world_size:
            return self._enter(Phase.COLLECTING, Await(self._key(f"record/{rank}"), self.settings.timeout_ns))
        manifest = Manifest(
            version=version_of(self._records),
            step=self.step,
            attempt=self.settings.attempt,
            world_size=self.settings.world_size,
            shards=tuple(self._records),
            values=self._values,
            job_plan=self.settings.job_plan,
            plans=self.settings.plans,
            saved=self._saved,
        )
        try:
            check_manifest(manifest)  # older checkpoints are removed for this one: it must be one that is read again
            data = encode_manifest(manifest)
        except Exception as error:  # whatever it is, such as an encoder's: the others wait to hear of it
            return self._failed(Failed(*error_to_wire(error)))
        newest = self.settings.newest_step
        first = newest is not None and self.step > newest
        return self._enter(Phase.COMMITTING, Commit(self.directory, self.step, data, first))

    def _forgotten(self) -> list[Effect]:
        return self._collect(self._whole.pop()) if self.phase is Phase.FORGETTING else self._tidy_next()

    def _receive(self, payload: bytes) -> list[Effect]:
        return self._receive_part(payload) if self._parts_left else self._receive_record(payload)

    def _receive_record(self, payload: bytes) -> list[Effect]:
        rank = len(self._records)
        try:
            answer = _decode_answer(payload)
            if answer.failed is not None:
                return self._failed(Failed(answer.failed.code, f"rank {rank}: {answer.failed.message}"))
            self._parts_left = _parts_of(answer, rank)
            if self._parts_left:
                self._parts = []
                return self._await_part()
            record = self._decoded(bytes(answer.record))
        except (DataCorruption, UsageError) as error:
            return self._failed(Failed(error.code, error.message))
        return self._collect(record)

    def _await_part(self) -> list[Effect]:
        key = self._key(f"record/{len(self._records)}/part/{len(self._parts)}")
        return self._enter(Phase.COLLECTING, Await(key, self.settings.timeout_ns))

    def _receive_part(self, payload: bytes) -> list[Effect]:
        self._parts.append(payload)
        self._parts_left -= 1
        if self._parts_left:
            return self._await_part()
        rank, parts, self._parts = len(self._records), self._parts, []
        try:
            self._whole = [self._decoded(join_parts(parts, f"shard record of rank {rank}"))]
        except (DataCorruption, UsageError) as error:
            return self._failed(Failed(error.code, error.message))
        return self._enter(Phase.FORGETTING, Forget(self._key(f"record/{rank}/part/")))

    def _decoded(self, data: bytes) -> ShardRecord:
        """Of the rank whose turn it is."""
        rank = len(self._records)
        record = decode_record(data, rank, self.settings.world_size)
        if record.layout != self._records[0].layout:
            raise UsageError(
                f"rank {rank} has other shared tensors than rank 0; State.shared must be the same on every rank"
            )
        return record

    def _announce(self, *keys: str) -> list[Effect]:
        payload = msgspec.json.encode(self._answer)
        if self.settings.world_size > 1:
            self._announcements = [Publish(self._key(key), payload) for key in keys]
        return self._announce_next()

    def _announce_next(self) -> list[Effect]:
        if not self._announcements:
            return self._finish()
        return self._enter(Phase.ANNOUNCING, self._announcements.pop(0))

    def _finish(self) -> list[Effect]:
        answer = self._answer
        return self._enter(Phase.FINISHING, Finish(answer.name, answer.size_bytes, answer.failed))

    def _after_finish(self) -> list[Effect]:
        if self._answer.failed is not None:
            self._tidy = [self._discard(self.directory)]
            return self._tidy_next()
        return self._enter(Phase.TIDYING, Listing())

    def _plan_tidying(self, names: list[str]) -> list[Effect]:
        committed = self._answer.name or ""
        keep, keep_every = self.settings.keep, self.settings.keep_every
        removable = to_remove(names, committed=committed, keep=keep, keep_every=keep_every, refused=self._refused)
        self._tidy = [self._discard(name) for name in removable]
        if self.settings.world_size > 1:
            # Every rank has sent its record of this save, so none still reads keys of those before.
            self._tidy += [Forget(self._prefix(sequence)) for sequence in range(self._forget_from, self.sequence)]
        return self._tidy_next()

    def _discard(self, name: str) -> Effect:
        return Discard(name, self.settings.writer_directory)

    def _tidy_next(self) -> list[Effect]:
        if not self._tidy:
            return self._enter(Phase.END)
        return self._enter(Phase.TIDYING, self._tidy.pop(0))

    # The other ranks.

    def _follow(self, event: Event) -> list[Effect]:
        match (self.phase, event):
            case (Phase.NEW, Begin()):
                return self._enter(Phase.SNAPSHOT, TakeSnapshot())
            case (Phase.SNAPSHOT, Done()):
                return self._enter(Phase.INVITED, Await(self._key("dir"), self.settings.timeout_ns))
            case (Phase.INVITED, KeyReceived(payload)):
                return self._hear(payload) or self._accept()
            case (Phase.WRITING, ShardWritten(record)):
                return self._send_record(encode_record(record))
            case (Phase.REPORTING, Done()) if self._announcements:
                return self._enter(Phase.REPORTING, self._announcements.pop(0))
            case (Phase.REPORTING, Done()) if self._answer.failed is None:
                return self._enter(Phase.LISTENING, Await(self._key("outcome"), self.settings.timeout_ns))
            case (Phase.REPORTING, Done()):
                return self._finish()
            case (Phase.LISTENING, KeyReceived(payload)):
                return self._hear(payload) or self._finish()
            case (Phase.FINISHING, Done()):
                return self._enter(Phase.END)
        raise self._unexpected(event)

    def _accept(self) -> list[Effect]:
        name, self._answer = self._answer.name or "", _Answer()
        if not is_temporary(name):
            return self._failed(
                Failed(DataCorruption.code, f"rank 0 announced the directory {name[:80]!r}, which is no temporary name")
            )
        self.directory = name
        return self._write()

    def _send_record(self, record: bytes) -> list[Effect]:
        if len(record) <= WHOLE_BYTES:
            return self._report(_Answer(record=msgspec.Raw(record)))
        parts = split_record(record)
        keys = [self._key(f"record/{self.settings.rank}/part/{number}") for number in range(len(parts))]
        self._announcements = [Publish(key, part) for key, part in zip(keys, parts, strict=True)]
        self._announcements += self._report(_Answer(record=msgspec.Raw(msgspec.json.encode(_InParts(len(parts))))))
        return self._enter(Phase.REPORTING, self._announcements.pop(0))

    def _report(self, answer: _Answer) -> list[Effect]:
        key = self._key(f"record/{self.settings.rank}")
        return self._enter(Phase.REPORTING, Publish(key, msgspec.json.encode(answer)))

    def _hear(self, payload: bytes) -> list[Effect] | None:
        """Takes over what rank 0 said. Effects when that ends the save."""
        try:
            self._answer = _decode_answer(payload)
        except DataCorruption as error:
            self._answer = _Answer(failed=Failed(error.code, error.message))
        return self._finish() if self._answer.failed is not None else None

    # Failures.

    def _failed(self, failure: Failed) -> list[Effect]:
        if self.phase is Phase.TIDYING:
            self.notes.append(failure.message)
            return self._tidy_next()
        if self.phase is Phase.ANNOUNCING:
            self.notes.append(failure.message)
            return self._announce_next()
        if self.phase is Phase.REPORTING and self._answer.failed is not None:
            self.notes.append(failure.message)
            return self._finish()
        if self.phase in (Phase.FINISHING, Phase.END):
            raise self._unexpected(failure)
        self._answer = _Answer(failed=failure)
        if self.settings.rank == 0:
            # Some ranks wait for the directory, others for the outcome already.
            early = self.phase in (Phase.SNAPSHOT, Phase.OPENING, Phase.INVITING)
            return self._announce("dir", "outcome") if early else self._announce("outcome")
        if self.phase in (Phase.SNAPSHOT, Phase.INVITED, Phase.WRITING, Phase.REPORTING):
            self._announcements = []
            return self._report(self._answer)
        return self._finish()


def _parts_of(answer: _Answer, rank: int) -> int:
    """0: the record is in the answer. Raises `DataCorruption`."""
    try:
        parts = decode_json(answer.record, _InParts).parts
    except DECODE_ERRORS as error:
        raise DataCorruption(f"shard record of rank {rank} is not readable: {error}") from error
    if not 0 <= parts <= MAX_PARTS:
        raise DataCorruption(f"shard record of rank {rank} claims {parts} parts, at most {MAX_PARTS} are allowed")
    return parts


def _decode_answer(payload: bytes) -> _Answer:
    try:
        return decode_json(payload, _Answer)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"a message of another rank is not readable: {error}") from error
