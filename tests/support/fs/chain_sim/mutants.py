"""Mutants of the replica, each the real machine with one thing wrong. The simulation must find all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from tests.support.fs.chain_sim.request_world import RequestWorld
from tests.support.fs.chain_sim.world import LIMITS, Deciding, ReplicaWorld

from fireflyer.fs.core.chain import reads
from fireflyer.fs.core.chain.chunk_state import ChunkState, Phase, QueuedPut, QueuedUpdate
from fireflyer.fs.core.chain.effects import (
    ChunkIndex,
    Commit,
    Drop,
    Effect,
    Entry,
    Event,
    InstallRecords,
    Publish,
    Reply,
    TableEntry,
)
from fireflyer.fs.core.chain.forwarding import RequestBody, RequestReceiver, SlotNumber
from fireflyer.fs.core.chain.replica import Replica
from fireflyer.fs.core.chain.resync import SyncSource
from fireflyer.fs.core.chain.role import Role
from fireflyer.fs.schema.chunks import (
    Answer,
    CompletionRecord,
    Done,
    Query,
    QueryReply,
    RefusalReason,
    Refused,
    Request,
    SyncCompletions,
    Update,
)
from fireflyer.fs.schema.ids import ChunkId, TargetId

__all__ = ["MUTANTS", "BeginsWithWorkUnderWay", "KeepsCompletionsFromBefore", "ShowsTheOldVersionAfterDone"]
__all__ += ["TakesAnswersOfAnyVersion", "attempt"]

MakeWorld = Callable[[int], ReplicaWorld]


def _machine(kind: type[Replica]) -> MakeWorld:
    return lambda seed: ReplicaWorld(seed, replica=lambda target, index: kind(1, target, index, LIMITS))


def _told_to_clients(kind: type[Replica]) -> MakeWorld:
    """Before the machine of real clients, which believes what refusals say."""
    return lambda seed: RequestWorld(seed, replica=lambda target, index: kind(1, target, index, LIMITS))


def _reading(decide: Deciding) -> MakeWorld:
    def make(seed: int) -> ReplicaWorld:
        world = ReplicaWorld(seed)
        world.decide = decide
        return world

    return make


class _CommitsBeforeTheAnswer(Replica):
    def _advance(self, chunk: ChunkId, state: ChunkState) -> None:
        work = state.work
        super()._advance(chunk, state)
        if work is not None and state.work is work and work.posted and work.phase is Phase.PENDING:
            self._effects.append(Commit(chunk, work.id))

    def _finish(self, chunk: ChunkId, state: ChunkState) -> None:
        super()._finish(chunk, state)
        first = [index for index, one in enumerate(self._effects) if isinstance(one, Commit) and one.chunk == chunk]
        if self._index.find(chunk) is None or self._index.find(chunk).pending is None:  # type: ignore[union-attr]
            del self._effects[first[-1]]


class _RepliesBeforeTheAnswer(Replica):
    def _advance(self, chunk: ChunkId, state: ChunkState) -> None:
        super()._advance(chunk, state)
        work = state.work
        if work is not None and work.waiter and work.posted and work.phase is Phase.PENDING:
            self._effects.append(Reply(work.waiter, Done(work.id, work.held)))
            work.waiter = 0


class _ForgetsWhatWasDone(Replica):
    def _completion(self, update: Update) -> CompletionRecord | None:
        return None


class _DoesNotReplicateCompletions(Replica):
    def _start_asked(self, chunk: ChunkId, state: ChunkState, item: QueuedPut) -> None:
        super()._start_asked(
            chunk, state, QueuedPut(item.place, msgspec.structs.replace(item.put, completion=None), item.handle)
        )


class _SyncsNoCompletions(SyncSource):
    def next_request(self) -> RequestBody | None:
        body = super().next_request()
        return SyncCompletions(()) if isinstance(body, SyncCompletions) else body


class KeepsCompletionsFromBefore(Replica):
    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        effects = super().handle(now_ns, event)
        return [
            InstallRecords(one.completions, reset=False) if isinstance(one, InstallRecords) else one for one in effects
        ]


class _ShowsTheOldVersion(Replica):
    """What is pending is answered with what is committed, at every replica."""

    def _publish(self) -> None:
        super()._publish()
        for at, one in enumerate(self._effects):
            if isinstance(one, Publish):
                self._effects[at] = Publish(msgspec.structs.replace(one.entry, answers_committed=True))


class ShowsTheOldVersionAfterDone(Replica):
    def _publish(self) -> None:
        granted, source = False, self._source
        if source is not None:
            granted, source.granted = source.granted, False
        super()._publish()
        if source is not None:
            source.granted = granted


class _ReusesVersions(Replica):
    def _start_wanted(self, chunk: ChunkId, state: ChunkState, item: QueuedUpdate) -> None:
        self._used = 0
        super()._start_wanted(chunk, state, item)


class _TakesRequestsOfAnyVersion(Replica):
    def _asked(self, source: TargetId, request: Request, handle: int) -> bool:
        if request.chain_version < self._role.chain_version and self._role.predecessor:
            request = msgspec.structs.replace(
                request, chain_version=self._role.chain_version, session=self._copy.number, number=request.number
            )
            source = self._role.predecessor
        return super()._asked(source, request, handle)


class TakesAnswersOfAnyVersion(Replica):
    def _answered(self, source: TargetId, answer: Answer) -> None:
        session = self._source.number if self._source is not None else 0
        version = self._role.chain_version
        if answer.chain_version < version:
            answer = msgspec.structs.replace(answer, chain_version=version, session=session)
            source = self._role.successor
        super()._answered(source, answer)


class _TakesUpdatesOfAnyVersion(Replica):
    """Also where it is not the head any more."""

    def _refusal(self, update: Update) -> Refused | None:
        role, self._role = self._role, Role(update.chain_version, serving=self._role.serving, head=True)
        refused = super()._refusal(update)
        self._role = role
        return refused


class _KeepsTheQueueOverChanges(Replica):
    def _clear(self, chunk: ChunkId, state: ChunkState, *, keep_work: bool) -> None:
        wanted = [one for one in state.queue if isinstance(one, QueuedUpdate)]
        for one in wanted:
            state.queue.remove(one)
        super()._clear(chunk, state, keep_work=keep_work)
        state.queue.extend(wanted)

    def _start_wanted(self, chunk: ChunkId, state: ChunkState, item: QueuedUpdate) -> None:
        version = self._role.chain_version
        item.update = msgspec.structs.replace(item.update, chain_version=version)
        role, self._role = self._role, msgspec.structs.replace(self._role, head=True)
        super()._start_wanted(chunk, state, item)
        self._role = role


class _DoneWithCopiesUnderWay(SyncSource):
    def next_request(self) -> RequestBody | None:
        active, self._active = self._active, 0
        body = super().next_request()
        self._active = active
        return body


class _ComparesOnlyTheFirstPage(SyncSource):
    def _compare(self, page: object) -> None:
        super()._compare(page)  # type: ignore[arg-type]
        self._end = True


class BeginsWithWorkUnderWay(Replica):
    def _take_part(self, request: Request) -> bool:
        chunks, self._chunks = self._chunks, {}
        result = super()._take_part(request)
        self._chunks = chunks
        return result


class _CommitsWithoutTheSyncing(Replica):
    def _advance(self, chunk: ChunkId, state: ChunkState) -> None:
        work = state.work
        if work is not None and work.phase is Phase.PENDING and self._role.last and self._acts:
            self._finish(chunk, state)
        else:
            super()._advance(chunk, state)


class _NewTailWaitsForTheSyncing(Replica):
    """The design note as it was: what was pending before the change is not shown until the syncing successor has it."""

    def _advance(self, chunk: ChunkId, state: ChunkState) -> None:
        work = state.work
        waits = self._role.last and self._role.successor and not self._session_open
        if work is None or work.phase is not Phase.PENDING or not waits:
            super()._advance(chunk, state)

    def _publish(self) -> None:
        super()._publish()
        for at, one in enumerate(self._effects):
            if isinstance(one, Publish) and self._role.last and self._role.successor:
                shows = self._source is None or not self._source.granted
                self._effects[at] = Publish(msgspec.structs.replace(one.entry, answers_committed=shows))

    def _answered(self, source: TargetId, answer: Answer) -> None:
        was_open = self._session_open
        super()._answered(source, answer)
        if self._session_open and not was_open:
            self._go_on()


class _NewTailDoesNotCommit(Replica):
    def _go_on(self) -> None:
        for chunk, state in list(self._chunks.items()):
            self._touched[chunk] = None
            self._next(chunk, state)


class _ReturnsWithoutItsPending(Replica):
    def _take_up_pending(self) -> None:
        for chunk in self._index.pending():
            entry = self._index.find(chunk)
            if chunk not in self._chunks and entry is not None and entry.pending is not None:
                self._effects.append(Drop(chunk, entry.pending.id, None))


class _RefusesBeforeTheDropIsDurable(Replica):
    def _drop(self, chunk: ChunkId, state: ChunkState, refusal: RefusalReason, message: str) -> None:
        work = state.work
        super()._drop(chunk, state, refusal, message)
        if work is not None:
            self._dropped(chunk, work.id)


class _CarriesOutCopies(Replica):
    """A request that comes a second time is done a second time."""

    def _asked(self, source: TargetId, request: Request, handle: int) -> bool:
        self._inbox = _Forgetful()
        return super()._asked(source, request, handle)


class _Forgetful(RequestReceiver):
    def admit(self, place: SlotNumber) -> bool:
        super().admit(place)
        return True

    def answer(self, place: SlotNumber, body: object) -> bool:
        return True


def _reads_behind_the_fence(_now_ns: int, table: TableEntry | None, index: ChunkIndex, look: Query) -> QueryReply:
    return reads.decide(0, table, index, look)


def _reads_at_any_version(now_ns: int, table: TableEntry | None, index: ChunkIndex, look: Query) -> QueryReply:
    if table is not None:
        look = msgspec.structs.replace(look, chain_version=table.chain_version)
        table = msgspec.structs.replace(table, serving=True)
    return reads.decide(now_ns, table, index, look)


class _PendingShown:
    """An index in which what is pending looks committed."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index

    def find(self, chunk: ChunkId) -> Entry | None:
        entry = self._index.find(chunk)
        return Entry(entry.pending.held) if entry is not None and entry.pending is not None else entry

    def __getattr__(self, name: str) -> object:
        return getattr(self._index, name)


def _reads_pending(now_ns: int, table: TableEntry | None, index: ChunkIndex, look: Query) -> QueryReply:
    return reads.decide(now_ns, table, _PendingShown(index), look)  # type: ignore[arg-type]


def _with_session(kind: type[SyncSource]) -> MakeWorld:
    class Syncing(Replica):
        def _drive_session(self) -> None:
            super()._drive_session()
            if self._source is not None:
                self._source.__class__ = kind

    return _machine(Syncing)


class Mutant(NamedTuple):
    """`within`: so many seeds find it, from the first; about five times as many as it took."""

    world: MakeWorld
    within: int


MUTANTS: dict[str, Mutant] = {
    "commits before the successor has it": Mutant(_machine(_CommitsBeforeTheAnswer), 30),
    "replies before the successor has it": Mutant(_machine(_RepliesBeforeTheAnswer), 30),
    "forgets what was done": Mutant(_machine(_ForgetsWhatWasDone), 30),
    "does not replicate rows": Mutant(_machine(_DoesNotReplicateCompletions), 150),
    "syncs no rows": Mutant(_with_session(_SyncsNoCompletions), 2500),
    "shows the old version at every replica": Mutant(_machine(_ShowsTheOldVersion), 600),
    "shows what is pending": Mutant(_reading(_reads_pending), 150),
    "reads behind the fence": Mutant(_reading(_reads_behind_the_fence), 4000),
    "reads without a role": Mutant(_reading(_reads_at_any_version), 600),
    "gives a version twice": Mutant(_machine(_ReusesVersions), 30),
    "takes requests of an older chain": Mutant(_machine(_TakesRequestsOfAnyVersion), 1500),
    "takes updates of an older chain": Mutant(_machine(_TakesUpdatesOfAnyVersion), 1500),
    "keeps its queue when the chain changes": Mutant(_machine(_KeepsTheQueueOverChanges), 1500),
    "done while copies are under way": Mutant(_with_session(_DoneWithCopiesUnderWay), 1000),
    "compares only the first page": Mutant(_with_session(_ComparesOnlyTheFirstPage), 50),
    "commits without the syncing one": Mutant(_machine(_CommitsWithoutTheSyncing), 50),
    "a new tail shows the old version": Mutant(_machine(_NewTailWaitsForTheSyncing), 800),
    "a new tail does not commit": Mutant(_machine(_NewTailDoesNotCommit), 50),
    "returns without what was pending": Mutant(_machine(_ReturnsWithoutItsPending), 150),
    "refuses before the drop is durable": Mutant(_told_to_clients(_RefusesBeforeTheDropIsDurable), 2000),
    "carries copies of requests out": Mutant(_machine(_CarriesOutCopies), 400),
}


def attempt(mutant: str, seed: int) -> str | None:
    """What the simulation found, or None."""
    world = MUTANTS[mutant].world(seed)
    world.plan_faults()
    try:
        world.run()
        world.check()
    except (AttributeError, NameError, TypeError):  # of the mutant itself, as when what it replaces was renamed
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
