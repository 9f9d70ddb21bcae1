"""A chain replica (CRAQ): one target's part in making updates, and in saying what may be read here.

    client ──Update──> head ──Put──> middle ──Put──> tail
           <──Done───       <─Accepted──     <─Accepted──

Each update of a chunk has the chunk's lock at every replica from its start to its commit; others of the chunk queue.

    (queued) ─> STAGING ─> PENDING ─> committed          `ChunkUpdate`, in `chunk_state`
                engine     successor
                    └──────────> DROPPING ─> declined     when this replica, or one behind it, cannot do it

- The *head* checks a client's update when it leaves the queue: role, chain version, and the completion record of its
  channel (answered before? gone on to a later one?). It names the content `(chain version, version)`, with a version
  above the chunk's and above all that this head gave to contents that are gone: removed chunks have no record, and
  there is one head in a chain version, so its memory is enough to name nothing twice.
- A replica with a successor sends it the same change, and commits when it is accepted; the last one commits at once.
  So what any replica has committed is durable at all behind it, and pending or committed at all before it.
- A successor that *declines* has not done it and never will (`forwarding`): the update is dropped, and when that is
  durable declined in turn, back to the head. So a refusal that reaches the client is one that no power cut takes back.
- Who is asked again while it waits for its own successor, or for its engine, says so (`InProgress`): the one before
must
  not take it for one that cannot be reached. Whose engine is at it for too long gives up by itself, if others serve.
- Where a checksum of the whole chunk differs from the head's, it is declined, with both checksums.

When the chain changes, requests of the old version are nobody's; who is pending sends again, to whom is there now, and
a request for a content that is under way joins it. **Who is the last serving one commits what is pending at once**: a
tail that is gone may have shown it. That holds also where a syncing target is added in the same change.

With a syncing successor the last one stays the tail alone until a session is open (`resync`); then it waits for the
successor too, and answers reads with what it has committed until *done* is granted, since nobody else can have shown
more.

Nothing is done behind the fence: neither reads (the table says until when) nor anything that others could act upon.
What the engine finishes meanwhile waits. A replica that must not go on (disk, damage with others serving, no space
when it has just been synced, or a message that contradicts the protocol) first stops serving, then reports itself gone;
its target comes back through the manager. A restart is a death, so nothing of a machine's memory has to survive.
"""

from __future__ import annotations

from fireflyer.fs.core.chain.chunk_state import ChunkState, ChunkUpdate, Phase, QueuedCopy, QueuedPut, QueuedUpdate
from fireflyer.fs.core.chain.chunks import REMOVE, ChunkUpdates, Limits
from fireflyer.fs.core.chain.effects import (
    AskRouting,
    ChainChanged,
    ChunkIndex,
    ClientEnded,
    ClientUpdate,
    CorruptionFound,
    DiskFailed,
    Dropped,
    Effect,
    Event,
    FenceExtended,
    Forget,
    GiveUp,
    InstallRecords,
    MessageFromPeer,
    PeerLost,
    Publish,
    RecordsInstalled,
    ReportGone,
    ReportUnreachable,
    Send,
    Staged,
    StageFailed,
    TableEntry,
    Tick,
    UpToDate,
)
from fireflyer.fs.core.chain.forwarding import AnswerBody, PendingRequest, SlotNumber
from fireflyer.fs.core.chain.resync import SyncSource
from fireflyer.fs.core.chain.role import Role, role_of
from fireflyer.fs.schema.chunks import (
    Accepted,
    Answer,
    Change,
    Declined,
    InProgress,
    Operation,
    Page,
    Put,
    RefusalReason,
    Reminder,
    Request,
    StaleChainVersion,
    SyncCompletions,
    SyncDone,
    SyncList,
    SyncStart,
    UnknownRequest,
)
from fireflyer.fs.schema.ids import ChainId, ChunkId, ClientId, TargetId

__all__ = ["Limits", "Replica"]


class Replica(ChunkUpdates):
    """`handle(now_ns, event)` for all events of one target of one chain. Effects and engine: `effects`."""

    def __init__(self, chain: ChainId, target: TargetId, index: ChunkIndex, limits: Limits | None = None) -> None:
        super().__init__(chain, target, index, limits or Limits())
        self._heard_ns = 0
        """When the successor last said anything, or was last complained of."""
        self._answered_ns = 0
        """When it last answered, or was last given up."""
        self._ticked_ns = 0
        self._published: TableEntry | None = None
        self._failed = False
        self._rests_until_ns = 0

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """What to do about the event, in this order. `now_ns`: the node's monotonic clock."""
        self._now_ns = now_ns
        self._completions.clear()
        if not self._about_service(event):
            self._about_updates(event)
        self._drive_session()
        if self._acts:
            self._send(self._outbox.fresh(now_ns))
        for chunk in self._touched:
            if self._chunks[chunk].idle:
                del self._chunks[chunk]
        self._touched.clear()
        self._publish()
        effects, self._effects = self._effects, []
        return effects

    @property
    def busy_chunks(self) -> int:
        """Chunks that are being changed."""
        return len(self._chunks)

    @property
    def busy(self) -> bool:
        """The engine has not finished what it was asked for, or something waits."""
        return bool(self._chunks) or self._copy.adopting

    @property
    def session(self) -> SyncSource | None:
        """The resync session that this replica runs, for people who look."""
        return self._source

    def _about_service(self, event: Event) -> bool:
        match event:
            case Tick():
                self._tick()
            case FenceExtended(until_ns):
                self._fence_until_ns = max(self._fence_until_ns, until_ns)
                self._go_on()
            case ChainChanged(chain):
                if chain.id == self._chain_id and chain.version > self._role.chain_version:
                    self._change_role(role_of(chain, self._target))
            case PeerLost(peer):
                if peer == self._role.successor:
                    self._outbox.hurry(self._now_ns, self._limits.resend_ns)
                    self._restart_session()
            case CorruptionFound(chunk):
                self._damaged(chunk)
            case DiskFailed(message):
                self._failed = True
                self._leave(message)
            case GiveUp(version, reason):
                if version == self._role.chain_version and (self._role.serving or self._role.syncing):
                    self._leave(reason)
            case ClientEnded(client):
                self._client_ended(client)
            case _:
                return False
        return True

    def _about_updates(self, event: Event) -> None:
        match event:
            case ClientUpdate():
                self._wanted(event)
            case MessageFromPeer(source, Request() as request, handle):
                if not self._asked(source, request, handle):
                    self._release(handle)
            case MessageFromPeer(source, Answer() as answer):
                self._answered(source, answer)
            case MessageFromPeer(source, StaleChainVersion(chain_version=version)):
                if version > self._role.chain_version:
                    self._effects.append(AskRouting())
                elif source == self._role.successor:
                    self._outbox.hurry(self._now_ns + self._limits.retry_ns, self._limits.resend_ns)
            case _:
                self._about_engine(event)

    def _about_engine(self, event: Event) -> None:
        match event:
            case Staged(chunk, content, held):
                self._staged(chunk, content, held)
            case StageFailed(chunk, content, failure):
                self._stage_failed(chunk, content, failure)
            case Dropped(chunk, content):
                self._dropped(chunk, content)
            case RecordsInstalled():
                place = self._copy.adopted()
                if place is not None:
                    self._answer(place, Accepted())

    # --- role ---

    def _publish(self) -> None:
        shows_committed = self._role.last and self._session_open and not (self._source and self._source.granted)
        serving = self._role.serving and not self._gone
        version, tail = self._role.chain_version, self._role.tail
        entry = TableEntry(self._chain_id, version, serving, self._fence_until_ns, tail, shows_committed)
        if entry != self._published:
            self._published = entry
            self._effects.append(Publish(entry))

    def _change_role(self, role: Role) -> None:
        before, self._role = self._role, role
        if role.serving and not before.serving:
            self._changed_in = role.chain_version
        if self._gone and role.serving:
            self._report_gone("the target had stopped before")
        elif not self._failed:
            self._gone = False
        self._outbox.reset()
        self._inbox.reset()
        self._copy.leave()
        self._source, self._sessions, self._used = None, 0, 0
        self._publish()
        if before.serving and before.head and role.serving and not role.head:
            self._leave("another target became head of the chain")
        serves = role.serving and not self._gone
        for chunk, state in list(self._chunks.items()):
            self._clear(chunk, state, keep_work=serves)
        if serves:
            self._take_up_pending()
            self._go_on()

    def _clear(self, chunk: ChunkId, state: ChunkState, *, keep_work: bool) -> None:
        """Of a chain version that is over, or a role that is lost. What the engine is at has to be waited for."""
        self._touched[chunk] = None
        for item in state.queue:
            if isinstance(item, QueuedUpdate):
                self._refuse(item, RefusalReason.STALE, "the chain has changed; get the routing again")
            elif isinstance(item, QueuedPut):
                self._release(item.handle)
        state.queue.clear()
        work = state.work
        if work is None:
            return
        work.place, work.posted = None, False
        if work.phase is Phase.COPYING:
            state.work = None
        elif not keep_work:
            self._reply_refused(
                work, RefusalReason.STALE, "this target no longer serves the chain; get the routing again"
            )
            if work.phase is Phase.PENDING:
                self._release(work.handle)
                state.work = None

    def _take_up_pending(self) -> None:
        """What the engine has pending without a `ChunkUpdate`: this target was serving, and is again."""
        for chunk in self._index.pending():
            state, entry = self._chunk(chunk), self._index.find(chunk)
            if state.work is None and entry is not None and entry.pending is not None:
                held, base = entry.pending.held, entry.committed.id if entry.committed else None
                change = Change(Operation.REPLACE, 0, held.length, held.crc) if held else REMOVE
                state.work = ChunkUpdate(entry.pending.id, base, change, Phase.PENDING, held=held)
                state.leftover = None

    def _go_on(self) -> None:
        for chunk, state in list(self._chunks.items()):
            self._touched[chunk] = None
            self._advance(chunk, state)
            self._next(chunk, state)

    def _leave(self, reason: str) -> None:
        if self._gone and not self._failed:
            return
        self._gone = True
        self._publish()
        self._report_gone(reason)
        self._outbox.reset()
        self._copy.leave()
        self._source = None
        for chunk, state in list(self._chunks.items()):
            self._clear(chunk, state, keep_work=False)

    def _report_gone(self, reason: str) -> None:
        self._effects.append(ReportGone(self._role.chain_version, reason, self._failed, self._changed_in))

    def _client_ended(self, client: ClientId) -> None:
        """What waits of it must not find that it was forgotten; what is under way is done once, whatever is known."""
        for chunk, state in self._chunks.items():
            waiting = [one for one in state.queue if isinstance(one, QueuedUpdate) and one.update.client == client]
            for one in waiting:
                state.queue.remove(one)
                self._refuse(one, RefusalReason.ENDED, "the session of the client has ended; open another one")
                self._touched[chunk] = None
        self._effects.append(Forget(client))

    def _tick(self) -> None:
        if self._now_ns - self._ticked_ns > self._limits.stall_ns // 2:
            self._heard_ns = self._answered_ns = self._now_ns  # it was this process that stood still
        self._ticked_ns = self._now_ns
        if not self._acts:
            return
        if self._source is not None:
            self._source.tick()
        if not self._role.alone and any(one.work and self._hangs(one.work) for one in self._chunks.values()):
            self._leave("the disk does not answer")
            return
        self._remind(self._outbox.overdue(self._now_ns, self._limits.resend_ns))
        since_ns, stall_ns = self._outbox.oldest_ns(), self._limits.stall_ns
        if since_ns is None:
            return
        if self._now_ns - max(since_ns, self._heard_ns) >= stall_ns:
            self._heard_ns = self._now_ns
            self._effects.append(ReportUnreachable(self._role.successor))
        if self._now_ns - max(since_ns, self._answered_ns) >= stall_ns:
            self._answered_ns = self._now_ns
            self._restart_session()

    def _damaged(self, chunk: ChunkId) -> None:
        state = self._chunks.get(chunk)
        if state is not None:
            state.damaged = True
        if self._role.serving and not self._role.alone:
            self._leave(f"chunk {chunk} is damaged; other targets serve the chain")
        elif state is not None and state.work is not None and state.work.posted:
            self._restart_session()  # what is to be sent of it cannot be

    # --- the successor ---

    def _send(self, pending_requests: list[PendingRequest]) -> None:
        session = self._source.number if self._source is not None else 0
        for pending in pending_requests:
            request = Request(self._chain_id, self._role.chain_version, session, *pending.place, pending.body)
            self._effects.append(Send(self._role.successor, request, pending.handle, pending.content))
            work = self._chunks[pending.owner].work if pending.handle and pending.owner is not None else None
            if pending.owner is not None and work is not None:
                # A copy of it, if one is needed, is sent from the engine.
                self._give_back(work)
                pending.handle = 0
                pending.body, pending.content = self._put(pending.owner, work, whole=True)

    def _remind(self, pending_requests: list[PendingRequest]) -> None:
        session = self._source.number if self._source is not None else 0
        for pending in pending_requests:
            if pending.content is None or pending.owner is None:
                self._send([pending])
                continue
            reminder = Reminder(pending.owner)
            request = Request(self._chain_id, self._role.chain_version, session, *pending.place, reminder)
            self._effects.append(Send(self._role.successor, request))

    def _answered(self, source: TargetId, answer: Answer) -> None:
        session = self._source.number if self._source is not None else 0
        ours = (answer.chain, answer.chain_version, answer.session) == (
            self._chain_id,
            self._role.chain_version,
            session,
        )
        if not ours or source != self._role.successor or not self._acts:
            return
        if isinstance(answer.body, InProgress):
            self._heard_ns = self._now_ns
            return
        if isinstance(answer.body, UnknownRequest):
            unknown, self._heard_ns = self._outbox.find((answer.slot, answer.number)), self._now_ns
            if unknown is not None:
                unknown.sent_ns = self._now_ns
                self._send([unknown])
            return
        pending = self._outbox.close((answer.slot, answer.number))
        if pending is not None:
            self._heard_ns = self._answered_ns = self._now_ns
            self._closed(pending, answer.body)

    def _closed(self, pending: PendingRequest, body: AnswerBody) -> None:
        if pending.owner is None:
            if self._source is not None:
                self._source.answered(body)
            return
        state = self._chunk(pending.owner)
        work = state.work
        if work is None or not work.posted:
            return
        if work.phase is Phase.COPYING:
            work.posted = False
            if isinstance(body, Accepted) and self._source is not None:
                self._source.copied()
                state.work = None
                self._next(pending.owner, state)
            elif isinstance(body, Declined) and body.refusal is RefusalReason.NO_SPACE:
                self._rest()
            else:
                self._advance(pending.owner, state)
        elif isinstance(body, Accepted):
            self._finish(pending.owner, state)
        elif isinstance(body, Declined):
            if self._source is not None and body.refusal is RefusalReason.NO_SPACE:
                self._rest()
            else:
                self._drop(pending.owner, state, body.refusal, body.message)

    def _drive_session(self) -> None:
        """The last serving one syncs its successor."""
        if not self._acts or not self._role.last or not self._role.successor:
            return
        if self._source is None:
            if self._now_ns < self._rests_until_ns:
                return
            self._sessions += 1
            limits = self._limits
            self._source = SyncSource(
                self._sessions,
                self._index,
                page=limits.page,
                copies=limits.copies,
                tick_bytes=limits.copy_bytes_per_tick,
            )
        while (listed := self._source.next_copy()) is not None:
            state = self._chunk(listed.chunk)
            state.queue.append(QueuedCopy(listed))
            self._next(listed.chunk, state)
        body = self._source.next_request()
        if body is not None:
            self._publish()  # who may not be the tail any more must not look like it
            self._outbox.post(None, body)

    def _rest(self) -> None:
        """The copy has no space: whoever writes must not suffer from that."""
        self._rests_until_ns = self._now_ns + self._limits.rest_ns
        self._restart_session()

    def _restart_session(self) -> None:
        """Goes on alone, until the next session is open. Not after *done*: the successor may be serving."""
        if self._source is None or self._source.granted or not self._acts:
            return
        self._source = None
        self._outbox.reset()
        for chunk, state in list(self._chunks.items()):
            self._touched[chunk] = None
            state.queue = type(state.queue)(one for one in state.queue if not isinstance(one, QueuedCopy))
            if state.work is not None:
                state.work.posted = False
                if state.work.phase is Phase.COPYING:
                    state.work = None
        self._go_on()

    # --- the predecessor ---

    def _asked(self, source: TargetId, request: Request, handle: int) -> bool:
        """Whether the data that came with it are kept."""
        version = self._role.chain_version
        if request.chain != self._chain_id:
            return False
        if request.chain_version != version:
            if request.chain_version > version:
                self._effects.append(AskRouting())
            self._effects.append(Send(source, StaleChainVersion(self._chain_id, version)))
            return False
        if not self._acts or source != self._role.predecessor:
            return False
        if self._role.syncing and not self._take_part(request):
            return False
        if request.session != self._copy.number:
            return False
        place = (request.slot, request.number)
        answered = self._inbox.answered(place)
        if answered is not None:
            self._answer(place, answered)
            return False
        if isinstance(request.body, Put | Reminder):
            return self._asked_of_chunk(request.body, place, handle)
        if self._inbox.admit(place):
            self._asked_for_session(request.body, place)
        return False

    def _asked_of_chunk(self, body: Put | Reminder, place: SlotNumber, handle: int) -> bool:
        if self._inbox.is_last(place):
            if self._is_at_it(body.chunk):
                self._send_answer(place, InProgress())
        elif isinstance(body, Put):
            return self._asked_put(body, place, handle)
        elif self._inbox.is_new(place):
            self._send_answer(place, UnknownRequest())
        return False

    def _is_at_it(self, chunk: ChunkId) -> bool:
        """Whether the successor has it, or the engine, which may be slow: who asks again must not take this replica for
        the one that is cut off."""
        state = self._chunks.get(chunk)
        work = state.work if state is not None else None
        return work is not None and (work.posted if work.phase is Phase.PENDING else not self._hangs(work))

    def _hangs(self, work: ChunkUpdate) -> bool:
        return work.phase in (Phase.STAGING, Phase.DROPPING) and self._now_ns - work.since_ns >= self._limits.hang_ns

    def _take_part(self, request: Request) -> bool:
        """A new session begins when nothing of an earlier one is under way: its list would miss what that does."""
        if isinstance(request.body, SyncStart) and request.session > self._copy.number:
            if self._chunks:
                return False
            self._copy.join(request.session)
            self._inbox.reset()
        return request.session == self._copy.number > 0

    def _asked_put(self, put: Put, place: SlotNumber, handle: int) -> bool:
        if put.chunk not in self._chunks and len(self._chunks) >= self._limits.chunks:
            return False
        state = self._chunk(put.chunk)
        if len(state.queue) >= self._limits.queue or not self._inbox.admit(place):
            return False
        work = state.work
        if work is not None and work.id == put.id and work.phase is not Phase.COPYING:
            work.place = place
            return False
        state.queue.append(QueuedPut(place, put, handle))
        self._next(put.chunk, state)
        return True

    def _asked_for_session(self, body: SyncStart | SyncCompletions | SyncList | SyncDone, place: SlotNumber) -> None:
        match body:
            case SyncStart():
                self._copy.adopt(place)
                self._effects.append(InstallRecords((), reset=True))
            case SyncCompletions(completions):
                self._copy.adopt(place)
                self._effects.append(InstallRecords(completions, reset=False))
            case SyncList(after, limit):
                entries = self._index.chunks(after, limit)
                self._answer(place, Page(entries, len(entries) < limit))
            case SyncDone():
                self._copy.done = True
                self._effects.append(UpToDate(self._role.chain_version))
                self._answer(place, Accepted())
