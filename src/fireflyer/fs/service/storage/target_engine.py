"""One open target: the machine's view of the native engine, in both directions.

Lookups of the machine (`ChunkIndex`) are tuples there and structs here; what the machine wants done is handed on at
once, and what the engine's threads say later is told as the machine's events.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.schema.chunks import ChunkEntry, ChunkVersion, CompletionRecord, Operation
from fireflyer.fs.schema.ids import Channel, ChunkId, ClientId, ContentId, TargetId
from fireflyer.native import ChunkError, ChunkTarget

__all__ = ["EngineEffect", "TargetEngine"]

_log = logging.getLogger(__name__)
_FILE_PAGE: Final = 256
_FAILURES: Final = {
    "no_space": fx.Failure.NO_SPACE,
    "bad_data": fx.Failure.BAD_DATA,
    "damaged": fx.Failure.DAMAGED,
}
_REMOVED: Final = -1
"""The length of a pending removal."""

_Completion = tuple[int, int, int, int, int, int, int]
EngineEffect = fx.Stage | fx.Commit | fx.Drop | fx.InstallRecords | fx.Forget


class TargetEngine:
    """`ChunkIndex` of the target, and performer of its engine's effects."""

    def __init__(self, native: ChunkTarget, target: TargetId) -> None:
        self.native = native
        self.target = target
        self._jobs = 0
        self._staging: dict[int, fx.Stage] = {}
        self._dropping: dict[int, fx.Dropped] = {}

    # --- what the machine wants ---

    def perform(self, effect: EngineEffect) -> fx.DiskFailed | None:
        """Returns what the machine must hear if that is not possible."""
        try:
            self._perform(effect)
        except ChunkError as error:
            kind, message = error.args
            if kind != "failed":
                _log.error(
                    "chunk engine refused target=%d request=%s reason=%s (%s)",
                    self.target,
                    type(effect).__name__,
                    message,
                    kind,
                )
            return fx.DiskFailed(f"{kind}: {message}")
        return None

    def _perform(self, effect: EngineEffect) -> None:
        match effect:
            case fx.Stage(chunk, content, base, change, handle, completion):
                self._jobs += 1
                self._staging[self._jobs] = effect
                self.native.stage(
                    self._jobs,
                    (chunk.file, chunk.index),
                    (content.made_in, content.version),
                    (base.made_in, base.version) if base is not None else None,
                    change.operation.value,
                    change.offset,
                    change.length,
                    change.crc,
                    handle,
                    (completion.client, completion.channel, completion.sequence) if completion is not None else None,
                )
            case fx.Commit(chunk, content):
                self.native.commit((chunk.file, chunk.index), (content.made_in, content.version))
            case fx.Drop(chunk, content, completion, awaited):
                self._drop(chunk, content, _plain(completion) if completion is not None else None, awaited=awaited)
            case fx.InstallRecords(completions, reset):
                self._jobs += 1
                self.native.adopt(self._jobs, [_plain(completion) for completion in completions], reset)
            case fx.Forget(client):
                self.native.forget(client)

    def _drop(self, chunk: ChunkId, content: ContentId, completion: _Completion | None, *, awaited: bool) -> None:
        job = 0
        if awaited:
            job = self.number_job()
            self._dropping[job] = fx.Dropped(chunk, content)
        self.native.drop(job, (chunk.file, chunk.index), (content.made_in, content.version), completion)

    # --- what the engine says ---

    def staged(self, job: int, made_in: int, version: int, length: int, crc: int) -> fx.Staged:
        stage = self._staging.pop(job)
        removed = stage.change.operation is Operation.REMOVE
        return fx.Staged(
            stage.chunk, stage.id, None if removed else ChunkVersion(ContentId(made_in, version), length, crc)
        )

    def stage_failed(self, job: int, kind: str, message: str) -> fx.StageFailed | fx.DiskFailed:
        stage = self._staging.pop(job)
        failure = _FAILURES.get(kind)
        if failure is not None:
            return fx.StageFailed(stage.chunk, stage.id, failure)
        # The disk, or the engine and the machine contradict each other: either way this target cannot be believed.
        return fx.DiskFailed(f"{kind}: {message}")

    def dropped(self, job: int) -> fx.Dropped:
        return self._dropping.pop(job)

    def number_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def verify(self, after: tuple[int, int] | None, limit_bytes: int) -> int:
        """Reads what is behind `after`, in the background; the number of that job."""
        job = self.number_job()
        self.native.verify(job, after, limit_bytes)
        return job

    # --- ChunkIndex ---

    @property
    def completion_count(self) -> int:
        return self.native.completion_count

    def find(self, chunk: ChunkId) -> fx.Entry | None:
        found = self.native.find((chunk.file, chunk.index))
        if found is None:
            return None
        committed, pending, damaged = found
        waiting = None
        if pending is not None:
            made = ContentId(pending[0], pending[1])
            waiting = fx.PendingContent(
                made, None if pending[2] == _REMOVED else ChunkVersion(made, pending[2], pending[3])
            )
        return fx.Entry(_held(committed), waiting, damaged)

    def completion(self, client: ClientId, channel: Channel) -> CompletionRecord | None:
        found = self.native.completion(client, channel)
        return None if found is None else _completion(found)

    def completions(self, after: tuple[ClientId, Channel] | None, limit: int) -> tuple[CompletionRecord, ...]:
        return tuple(_completion(one) for one in self.native.completions(after, limit))

    def chunks(self, after: ChunkId | None, limit: int) -> tuple[ChunkEntry, ...]:
        place = (after.file, after.index) if after is not None else None
        return tuple(ChunkEntry(ChunkId(*chunk), _held(held)) for chunk, held in self.native.chunks(place, limit))

    def of_file(self, file: int, index: int, *, backwards: bool = False) -> Iterator[ChunkId]:
        while True:
            page = self.native.of_file(file, index, _FILE_PAGE, backwards=backwards)
            for one in page:
                yield ChunkId(file, one)
            if len(page) < _FILE_PAGE:
                return
            index = page[-1] + (-1 if backwards else 1)
            if not 0 <= index < 1 << 32:
                return

    def pending(self) -> tuple[ChunkId, ...]:
        return tuple(ChunkId(*one) for one in self.native.pending())


def _held(held: tuple[int, int, int, int] | None) -> ChunkVersion | None:
    return None if held is None else ChunkVersion(ContentId(held[0], held[1]), held[2], held[3])


def _completion(completion: _Completion) -> CompletionRecord:
    client, channel, sequence, file, index, made_in, version = completion
    made = ContentId(made_in, version) if version else None
    return CompletionRecord(client, channel, sequence, ChunkId(file, index), made)


def _plain(completion: CompletionRecord) -> _Completion:
    made_in, version = (completion.id.made_in, completion.id.version) if completion.id is not None else (0, 0)
    chunk = completion.chunk
    return completion.client, completion.channel, completion.sequence, chunk.file, chunk.index, made_in, version
