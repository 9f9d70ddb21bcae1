"""The updates of the chunks of one replica: who has the lock of a chunk, and what becomes of it at each step.

The part of `fireflyer.fs.core.chain.replica` that looks at one chunk at a time; the protocol is explained there.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.errors import InvariantViolation
from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.fs.core.chain.chunk_state import ChunkState, ChunkUpdate, Phase, QueuedCopy, QueuedPut, QueuedUpdate
from fireflyer.fs.core.chain.effects import (
    ChunkIndex,
    ClientUpdate,
    Commit,
    Drop,
    Effect,
    Entry,
    Failure,
    Release,
    Reply,
    Send,
    Stage,
)
from fireflyer.fs.core.chain.forwarding import AnswerBody, RequestReceiver, RequestSender, SlotNumber
from fireflyer.fs.core.chain.resync import SyncCopy, SyncSource, differs
from fireflyer.fs.core.chain.role import NO_ROLE
from fireflyer.fs.schema.chunks import (
    MAX_SLOTS,
    Accepted,
    Answer,
    Change,
    ChunkVersion,
    CompletionRecord,
    Declined,
    Done,
    InProgress,
    Operation,
    Put,
    RefusalReason,
    Refused,
    UnknownRequest,
    Update,
)
from fireflyer.fs.schema.ids import (
    MAX_CHUNK_BYTES,
    ChainId,
    ChainVersion,
    Channel,
    ChunkId,
    ClientId,
    ContentId,
    TargetId,
)

__all__ = ["REMOVE", "ChunkUpdates", "Limits"]

REMOVE: Final = Change(Operation.REMOVE)
_LAST_CHANNEL: Final = (1 << 32) - 1


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one replica."""

    slots: int = MAX_SLOTS
    """Requests under way to the successor."""
    chunks: int = 1024
    """That are being changed at once; beyond, `BUSY`."""
    queue: int = 32
    """Updates that wait for one chunk; beyond, `BUSY`."""
    completions: int = 1 << 20
    """Channels of clients that are remembered; a new one beyond gets `BUSY`."""
    client_completions: int = 16
    """What a client gets of them while there are any; it gets more while no more than a quarter is taken. So a client
    that uses up what it can does not keep others from their updates: as many clients as there may be have these."""
    resend_ns: int = 2 * SECOND
    """A request without an answer is sent again after this; long, because a large chunk may be under way so long."""
    retry_ns: int = 100 * MS
    """... after this where it is known that it was not taken: the successor is behind, or the connection broke."""
    stall_ns: int = 3 * SECOND
    """Without any answer for so long a peer is reported, and a resync session begins anew."""
    hang_ns: int = 20 * SECOND
    """An engine that has not finished something after so long will not: the target gives up, if others serve."""
    rest_ns: int = 10 * SECOND
    """How long a resync is not tried again whose copy had no space."""
    page: int = 512
    """Completion records or list entries of a resync message."""
    copies: int = 8
    """Chunks that are copied at once."""
    copy_bytes_per_tick: int = 8 * MIB


class ChunkUpdates:
    """State of a replica, and what it does about one chunk. Subclassed by `Replica`, which decides on its role."""

    def __init__(self, chain: ChainId, target: TargetId, index: ChunkIndex, limits: Limits | None = None) -> None:
        self._chain_id = chain
        self._target = target
        self._index = index
        self._limits = limits or Limits()
        self._role = NO_ROLE
        self._fence_until_ns = 0
        self._now_ns = 0
        self._gone = False
        self._changed_in: ChainVersion = 0
        """The last chain version in which something was changed here, or in which this replica began to serve."""
        self._chunks: dict[ChunkId, ChunkState] = {}
        self._touched: dict[ChunkId, None] = {}
        self._completions: dict[tuple[ClientId, Channel], CompletionRecord] = {}
        self._used = 0
        """The highest version that was given in this chain version to a content that is gone."""
        self._outbox = RequestSender(self._limits.slots)
        self._inbox = RequestReceiver()
        self._source: SyncSource | None = None
        self._sessions = 0
        self._copy = SyncCopy()
        self._effects: list[Effect] = []

    @property
    def _acts(self) -> bool:
        placed = self._role.serving or self._role.syncing
        return placed and not self._gone and self._now_ns < self._fence_until_ns

    @property
    def _session_open(self) -> bool:
        return self._source is not None and self._source.open

    def _wanted(self, event: ClientUpdate) -> None:
        update, item = event.update, QueuedUpdate(event.waiter, event.update, event.handle)
        refused = self._refusal(update)
        if refused is not None:
            self._refuse(item, refused.refusal, refused.message)
            return
        if update.chunk not in self._chunks and len(self._chunks) >= self._limits.chunks:
            self._refuse(
                item,
                RefusalReason.BUSY,
                f"the target is overloaded: {self._limits.chunks} chunks are being changed; try again",
            )
            return
        state = self._chunk(update.chunk)
        for at, other in enumerate(state.queue):
            if isinstance(other, QueuedUpdate) and _channel(other.update) == _channel(update):
                older, newer = sorted((other, item), key=lambda one: one.update.sequence)
                state.queue[at] = newer
                self._refuse(older, RefusalReason.DUPLICATE, "a later attempt or update of this channel is waiting")
                return
        if len(state.queue) >= self._limits.queue:
            self._refuse(item, RefusalReason.BUSY, f"{self._limits.queue} updates of this chunk are waiting; try again")
            return
        state.queue.append(item)
        self._next(update.chunk, state)

    def _refusal(self, update: Update) -> Refused | None:
        version = self._role.chain_version
        if not self._acts or not self._role.head or update.chain != self._chain_id:
            return Refused(
                RefusalReason.STALE, "this target is not the head of the chain; get the routing again", version
            )
        if update.chain_version != version:
            message = f"the chain has version {version}, the request {update.chain_version}; get the routing again"
            return Refused(RefusalReason.STALE, message, version)
        change = update.change
        end = change.length + (change.offset if change.operation is Operation.WRITE else 0)
        if change.operation is Operation.REPLACE or update.sequence < 1 or end > MAX_CHUNK_BYTES:
            message = f"{change} with sequence {update.sequence}: a chunk has at most {MAX_CHUNK_BYTES} bytes, "
            return Refused(
                RefusalReason.USAGE, message + "sequences start at 1, and clients cannot replace chunks", version
            )
        return None

    def _start_wanted(self, chunk: ChunkId, state: ChunkState, item: QueuedUpdate) -> None:
        update = item.update
        refused = self._refusal(update)
        completion = self._completion(update)
        if refused is not None:
            self._refuse(item, refused.refusal, refused.message)
        elif completion is not None and completion.sequence > update.sequence:
            self._refuse(item, RefusalReason.DUPLICATE, f"the channel is at update {completion.sequence} already")
        elif completion is not None and completion.sequence == update.sequence and completion.id is not None:
            if completion.chunk == chunk:
                same = state.committed if state.committed and state.committed.id == completion.id else None
                self._effects.append(Reply(item.waiter, Done(completion.id, same)))
                self._release(item.handle)
            else:
                self._refuse(
                    item,
                    RefusalReason.USAGE,
                    f"update {update.sequence} of this channel was of chunk {completion.chunk}",
                )
        elif completion is None and not self._has_room_for_completion(update.client):
            taken = self._index.completion_count
            self._refuse(
                item, RefusalReason.BUSY, f"{taken} update channels are open; use fewer, or close some clients"
            )
        else:
            base = state.committed.id if state.committed else None
            made = ContentId(self._role.chain_version, max(base.version if base else 0, self._used) + 1)
            completion = CompletionRecord(update.client, update.channel, update.sequence, chunk, made)
            work = ChunkUpdate(
                made, base, update.change, Phase.STAGING, item.handle, completion=completion, waiter=item.waiter
            )
            self._stage(chunk, state, work)

    def _has_room_for_completion(self, client: ClientId) -> bool:
        taken, limits = self._index.completion_count, self._limits
        if taken < limits.completions // 4:
            return True
        before = (client - 1, _LAST_CHANNEL) if client else None
        own = self._index.completions(before, limits.client_completions)
        return taken < limits.completions and sum(one.client == client for one in own) < limits.client_completions

    def _completion(self, update: Update) -> CompletionRecord | None:
        key = _channel(update)
        return self._completions.get(key) or self._index.completion(*key)

    # --- updates of the predecessor ---

    def _start_asked(self, chunk: ChunkId, state: ChunkState, item: QueuedPut) -> None:
        put = item.put
        if self._has(state, put):
            self._answer(item.place, Accepted())
            self._release(item.handle)
        elif not self._fits(state, put):
            self._release(item.handle)
            self._leave(
                f"chunk {chunk}: {put.id} on {put.base} does not follow {state.committed}; this target must be synced"
            )
        else:
            work = ChunkUpdate(
                put.id, put.base, put.change, Phase.STAGING, item.handle, put.held, put.completion, place=item.place
            )
            work.told = True
            if self._role.syncing:
                self._prepare_copy(chunk, state, work)
            self._stage(chunk, state, work)

    def _prepare_copy(self, chunk: ChunkId, state: ChunkState, work: ChunkUpdate) -> None:
        """A syncing replica puts it in the place of whatever it has."""
        if state.leftover is not None:
            self._change(Drop(chunk, state.leftover, None))
            state.leftover = None
        work.base = state.committed.id if state.committed else None
        if work.completion is None and work.held is None and work.base is not None:
            work.id = ContentId(self._role.chain_version, work.base.version + 1)

    def _has(self, state: ChunkState, put: Put) -> bool:
        """It was committed here in an earlier version of the chain, or copied already."""
        if self._role.syncing:
            return put.completion is None and put.held == state.committed and not state.unsound
        if state.committed is None:
            return put.held is None and put.base is not None
        return state.committed.id == put.id

    def _fits(self, state: ChunkState, put: Put) -> bool:
        if self._role.syncing:
            return put.change.operation in (Operation.REPLACE, Operation.REMOVE)
        if state.committed is None:
            return put.base is None
        return put.base == state.committed.id

    # --- copies of resync ---

    def _start_copying(self, chunk: ChunkId, state: ChunkState, item: QueuedCopy) -> None:
        source, own = self._source, state.committed
        if source is None:
            return
        if not differs(item.listed.held, own):
            source.copied()
        elif own is not None and state.damaged and self._role.alone:
            source.put_off(item.listed)
        elif own is not None and state.damaged:
            self._damaged(chunk)
        else:
            source.spent(own.length if own else 0)
            content = own.id if own else ContentId(self._role.chain_version, 1)  # the copy names an absence itself
            state.work = ChunkUpdate(content, None, REMOVE, Phase.COPYING, held=own)
            self._advance(chunk, state)

    # --- one chunk ---

    def _change(self, effect: Stage | Commit | Drop) -> None:
        self._changed_in = self._role.chain_version
        self._effects.append(effect)

    def _chunk(self, chunk: ChunkId) -> ChunkState:
        self._touched[chunk] = None
        state = self._chunks.get(chunk)
        if state is None:
            entry = self._index.find(chunk) or Entry()
            state = ChunkState(entry.committed, entry.damaged, entry.pending.id if entry.pending else None)
            self._chunks[chunk] = state
        return state

    def _next(self, chunk: ChunkId, state: ChunkState) -> None:
        while state.work is None and state.queue and self._acts:
            item = state.queue.popleft()
            match item:
                case QueuedUpdate():
                    self._start_wanted(chunk, state, item)
                case QueuedPut():
                    self._start_asked(chunk, state, item)
                case QueuedCopy():
                    self._start_copying(chunk, state, item)

    def _stage(self, chunk: ChunkId, state: ChunkState, work: ChunkUpdate) -> None:
        state.work, work.since_ns = work, self._now_ns
        self._change(Stage(chunk, work.id, work.base, work.change, work.handle, work.completion))

    def _staged(self, chunk: ChunkId, content: ContentId, held: ChunkVersion | None) -> None:
        state = self._chunks.get(chunk)
        work = state.work if state else None
        if state is None or work is None or work.phase is not Phase.STAGING or work.id != content:
            return
        self._touched[chunk] = None
        if self._gone or not (self._role.serving or (self._role.syncing and work.place is not None)):
            self._release(work.handle)
            state.work, state.leftover = None, content
            return
        expected, work.held, work.phase = work.held, held, Phase.PENDING
        if work.told and expected != held:
            self._drop(
                chunk,
                state,
                RefusalReason.CORRUPT,
                f"chunk {chunk}: the head has content {expected}, this replica {held}",
            )
        else:
            self._advance(chunk, state)

    def _stage_failed(self, chunk: ChunkId, content: ContentId, failure: Failure) -> None:
        state = self._chunks.get(chunk)
        work = state.work if state else None
        if state is None or work is None or work.phase is not Phase.STAGING or work.id != content:
            return
        self._touched[chunk] = None
        state.work = None
        self._release(work.handle)
        if failure is Failure.DAMAGED:
            self._damaged(chunk)
        elif failure is Failure.NO_SPACE and self._copy.done:
            self._leave(f"no space for chunk {chunk}")
        refusal = RefusalReason.NO_SPACE if failure is Failure.NO_SPACE else RefusalReason.CORRUPT
        self._reply_refused(work, refusal, f"chunk {chunk}: {failure.value}")
        if work.place is not None:
            self._answer(work.place, Declined(refusal, f"chunk {chunk}: {failure.value}"))
        self._next(chunk, state)

    def _advance(self, chunk: ChunkId, state: ChunkState) -> None:
        """What the present role does about the chunk's work. Asked again whenever something has changed."""
        work = state.work
        if work is None or work.phase in (Phase.STAGING, Phase.DROPPING) or work.posted or not self._acts:
            return
        if work.phase is Phase.PENDING and (self._role.syncing or (self._role.last and not self._session_open)):
            self._finish(chunk, state)
            return
        work.posted = True
        if self._role.last or not self._outbox.room:
            self._give_back(work)
        whole = self._role.last or (work.change.carries_data and not work.handle)
        put, content = self._put(chunk, work, whole=whole)
        self._outbox.post(chunk, put, work.handle, content)

    def _put(self, chunk: ChunkId, work: ChunkUpdate, *, whole: bool) -> tuple[Put, ContentId | None]:
        """What the successor is asked for, and, where it is sent `whole`, the content to send from the engine."""
        change, content = work.change, None
        if whole and work.held is not None:
            change, content = Change(Operation.REPLACE, 0, work.held.length, work.held.crc), work.id
        return Put(chunk, work.id, work.base, change, work.held, work.completion), content

    def _give_back(self, work: ChunkUpdate) -> None:
        """The data are durable here: who waits for others keeps no memory, or replicas could wait for each other's."""
        self._release(work.handle)
        work.handle = 0

    def _finish(self, chunk: ChunkId, state: ChunkState) -> None:
        """Everybody behind has it."""
        work, state.work = state.work, None
        if work is None:
            raise InvariantViolation(f"chunk {chunk} has no update in progress")
        self._change(Commit(chunk, work.id))
        state.committed, state.damaged = work.held, False
        if work.held is None:
            self._used = max(self._used, work.id.version)
        if work.waiter:
            self._effects.append(Reply(work.waiter, Done(work.id, work.held)))
        if work.place is not None:
            self._answer(work.place, Accepted())
        self._release(work.handle)
        self._next(chunk, state)

    def _drop(self, chunk: ChunkId, state: ChunkState, refusal: RefusalReason, message: str) -> None:
        """Given up: no replica from here on has committed it, and none behind this one has it pending any more.

        Who asked is told when that is durable here too: else all could die, and the first that is back would find it
        pending, and do it.
        """
        work = state.work
        if work is None:
            raise InvariantViolation(f"chunk {chunk} has no update in progress")
        completion = work.completion
        if completion is not None:
            completion = CompletionRecord(completion.client, completion.channel, completion.sequence, chunk, None)
            key = (completion.client, completion.channel)
            last = self._completions.get(key) or self._index.completion(*key)
            if last is None or last.sequence == completion.sequence:
                self._completions[key] = completion
        self._used = max(self._used, work.id.version)
        self._change(Drop(chunk, work.id, completion, awaited=True))
        self._give_back(work)
        work.phase, work.posted, work.since_ns = Phase.DROPPING, False, self._now_ns
        work.declined = Declined(refusal, message[:512])

    def _dropped(self, chunk: ChunkId, content: ContentId) -> None:
        state = self._chunks.get(chunk)
        work = state.work if state else None
        if state is None or work is None or work.id != content or work.declined is None:
            return
        self._touched[chunk] = None
        state.work = None
        self._reply_refused(work, work.declined.refusal, work.declined.message)
        if work.place is not None:
            self._answer(work.place, work.declined)
        self._next(chunk, state)

    # --- what others of this machine do ---

    def _leave(self, reason: str) -> None:
        raise NotImplementedError

    def _damaged(self, chunk: ChunkId) -> None:
        raise NotImplementedError

    # --- answers ---

    def _answer(self, place: SlotNumber, body: AnswerBody) -> None:
        """To the predecessor. Behind the fence it is only kept: the copy that is sent again gets it."""
        if self._inbox.answer(place, body) and self._acts:
            self._send_answer(place, body)

    def _send_answer(self, place: SlotNumber, body: AnswerBody | InProgress | UnknownRequest) -> None:
        session = self._copy.number if self._role.syncing else 0
        answer = Answer(self._chain_id, self._role.chain_version, session, *place, body)
        self._effects.append(Send(self._role.predecessor, answer))

    def _refuse(self, item: QueuedUpdate, refusal: RefusalReason, message: str) -> None:
        self._effects.append(Reply(item.waiter, Refused(refusal, message[:512], self._role.chain_version)))
        self._release(item.handle)

    def _reply_refused(self, work: ChunkUpdate, refusal: RefusalReason, message: str) -> None:
        if work.waiter:
            refused = Refused(refusal, message[:512], self._role.chain_version)
            self._effects.append(Reply(work.waiter, refused))
            work.waiter = 0

    def _release(self, handle: int) -> None:
        if handle:
            self._effects.append(Release(handle))


def _channel(update: Update) -> tuple[ClientId, Channel]:
    return update.client, update.channel
