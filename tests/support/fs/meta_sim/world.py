"""Meta services over one store in the seeded world, with sessions that end and services that die between any two steps.

A service is what `fs.service.meta.service` is, without commit queues: each request a task, its answer stored in the
same transaction; what cannot be done at once goes on as a procedure; `BackgroundTasks` does the service's own work.
Requests come twice, late, and to another service. Lazy closes wait for nobody here, but by chance, so that all there
is may overtake them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from tests.support.fs.meta_sim.chunks import CHAINS, CHUNK_BYTES, ChunkClient, ChunkStore
from tests.support.fs.meta_sim.oracle import Files, LockBook
from tests.support.fs.meta_sim.steps import drive, sleep
from tests.support.kvstore.engines import at_once

from fireflyer.base.errors import TransientError
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.meta import dispatch, procedures
from fireflyer.fs.core.meta.background_tasks import BackgroundTasks
from fireflyer.fs.core.meta.context import SYSTEM, ClusterDefaults, Context, Requester, Rows
from fireflyer.fs.core.meta.open_files import holds
from fireflyer.fs.core.meta.open_rows import CUT_ROWS, CUTS
from fireflyer.fs.core.meta.ports import Answered, NotAtOnce
from fireflyer.fs.core.meta.replies import SESSION_OVER, SessionEnded, admit, check_session, store_answer
from fireflyer.fs.core.rows import SESSIONS, SessionRow
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.meta import Answer, Answers, Call, Calls, Close, ErrorReply, Open, Request
from fireflyer.kvstore import MemoryEngine, MemoryStore, SteppedTiming, Transaction
from fireflyer.kvstore.core.conflicts import Conflicts
from fireflyer.kvstore.core.keys import EVERYTHING
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.core.rows import encode_row
from fireflyer.kvstore.memory import CommitFault
from fireflyer.sim import SimCrash, SimNet, SimNode, World

__all__ = ["SETTLE_NS", "Asked", "MetaService", "MetaWorld", "Told"]

T = TypeVar("T")
SETTLE_NS: Final = 2 * SECOND
START_NS: Final = 1_700_000_000 * SECOND
"""Unix time of the beginning."""
KEEPING_NS: Final = 300 * MS
LAZY_NS: Final = 50 * MS
"""A lazy close waits for less."""


class Asked(msgspec.Struct, frozen=True, array_like=True):
    number: int
    calls: Calls


class Told(msgspec.Struct, frozen=True, array_like=True):
    number: int
    answers: Answers


ENCODE: Final = msgspec.msgpack.Encoder().encode
ASKED: Final = msgspec.msgpack.Decoder(Asked).decode
TOLD: Final = msgspec.msgpack.Decoder(Told).decode


class _Store(MemoryStore):
    """Tells when a cut is ended: from then on its request may have no effect any more."""

    def __init__(self, files: Files) -> None:
        super().__init__()
        self._files = files

    def commit(self, read_version: int, reads: Conflicts, mutations: Mutations) -> int:
        ended = [key for key, value in mutations.writes if value is None and key[:2] == CUTS]
        rows = [CUT_ROWS.decode(key, value) for key in ended if (value := self.get(self.version, key)) is not None]
        version = super().commit(read_version, reads, mutations)
        for row in rows:
            self._files.cut_ended(row.client, row.number)
        return version


class MetaWorld:
    """`services` of them over one store. `begin` prepares the store."""

    def __init__(self, seed: int, *, services: int = 2) -> None:
        self.sim = World(seed)
        self.rng = self.sim.fork_random("faults")
        self.lost_sessions = self.sim.fork_random("lost sessions")
        self.laziness = self.sim.fork_random("laziness")
        self.net = SimNet(self.sim)
        self.chunks = ChunkStore(self.sim)
        self.files = Files(self.sim)
        self.store = _Store(self.files)
        self.locks = LockBook()
        self.commit_faults = 0.0
        self.next_faults: list[CommitFault] = []
        """Of the next commits, whatever `commit_faults` says."""
        self.before_step: Callable[[MetaService, Calls, Call], None] = lambda *_: None
        """Called before each transaction and each use of chunks for a request."""
        self.crashes = 0.0
        """The chance of a service to die before a step of a procedure."""
        self.pauses = 0.0
        """The chance of a service to stand still before a transaction."""
        self._last_id = 100
        self.lock_inode = 0
        self.with_tokens = False
        """Clients are users with tokens: what they say of their files is looked at again."""
        self.plan = ""
        self.paths: tuple[bytes, ...] = ()
        """Of the files that clients use."""
        self.done: dict[str, int] = {}
        """Requests by kind that were done, in the end."""
        self.limited: dict[int, bool] = {}
        """Files that were in a quota tree when they were opened."""
        self._last_session = 0
        self._random = self.sim.fork_random("store")
        self.waits = SteppedTiming(lambda: self.sim.now_ns, self._random.randrange)
        self.engine = MemoryEngine(self.store, waits=self.waits, faults=self._commit_fault)
        self.cluster = ClusterDefaults(1, len(CHAINS), CHUNK_BYTES, 3)
        self.services: list[MetaService] = []
        self._count = services

    def begin(self, *requests: Request) -> list[Answer]:
        """Makes the root and carries these out, with nobody else there; then the services start."""
        answers: list[Answer] = []

        async def body(rows: Transaction) -> None:
            await dispatch.make_root(rows, now_ns=START_NS, mode=0o777)
            answers[:] = [await dispatch.carry_out(one, self.context(rows, SYSTEM)) for one in requests]

        at_once(lambda: self.engine.transact(body))
        self.services += [MetaService(self, f"m{at}") for at in range(self._count)]
        return answers

    def context(self, rows: Rows, requester: Requester, number: int = 0, owner: ClientId = 0) -> Context:
        return Context(
            rows=rows, requester=requester, now_ns=START_NS + self.sim.now_ns, new_id=self._new_id,
            cluster=self.cluster, number=number, owner=owner,
        )  # fmt: skip

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # --- the store ---

    def items(self) -> list[tuple[bytes, bytes]]:
        page = self.store.scan(self.store.version, EVERYTHING)
        assert not page.more
        return page.items

    def _commit_fault(self) -> CommitFault:
        if self.next_faults:
            return self.next_faults.pop(0)
        if self._random.random() >= self.commit_faults:
            return CommitFault.NONE
        kinds = [CommitFault.UNKNOWN_DONE, CommitFault.UNKNOWN_LOST, CommitFault.CONFLICT, CommitFault.DISCONNECTED]
        return self._random.choice(kinds)

    # --- sessions, as the manager has them ---

    def open_session(self, name: str) -> ClientId:
        self._last_session += 1
        client = self._last_session
        self._write(SESSIONS.key(client), encode_row(SessionRow(client, "u", name)))
        return client

    def end_session(self, client: ClientId) -> None:
        """The storage nodes hear of it before `SETTLE_NS` have passed."""
        if self.lives(client):
            self._write(SESSIONS.key(client), None)
            self.locks.ended(client)
            self.sim.record("session over", client)
            self.sim.call_after(self.rng.randrange(SETTLE_NS), lambda: self.chunks.over.update({client: None}))

    def lives(self, client: ClientId) -> bool:
        return self.store.get(self.store.version, SESSIONS.key(client)) is not None

    def _write(self, key: bytes, value: bytes | None) -> None:
        self.store.commit(self.store.version, Conflicts(), Mutations(writes=((key, value),)))


class MetaService:
    """Starts again after each crash, with another session."""

    def __init__(self, world: MetaWorld, name: str) -> None:
        self.world, self.name = world, name
        self.session: ClientId = 0
        self.exchanging = False
        """It has heard that its session is over, and has no other yet."""
        self.claimed: dict[int, None] = {}
        self.in_doubt: dict[int, dict[Any, Any]] = {}
        self.enrolled: dict[ClientId, None] = {}
        self.node = world.sim.node(name, self._boot)

    def crash(self) -> None:
        if self.node.alive:
            session = self.session
            self.node.crash()
            rng = self.world.rng
            self.world.sim.call_after(rng.randrange(3 * SECOND), lambda: self.world.end_session(session))
            self.world.sim.call_after(rng.randrange(SECOND), self.start)

    def start(self) -> None:
        if not self.node.alive:
            self.node.restart()

    def lose_session(self) -> None:
        """Silent for too long, it is taken for dead; later it hears of that, and later still it has another session."""
        lost = self.session
        if not self.node.alive or not self.world.lives(lost):
            return
        rng = self.world.lost_sessions
        self.world.end_session(lost)

        def hears() -> None:
            self.exchanging = True
            self.node.after(rng.randrange(6 * SECOND), has_another)

        def has_another() -> None:
            self.session, self.exchanging = self.world.open_session(self.name), False
            self.world.sim.record("session exchanged", self.name, self.session)

        self.node.after(rng.randrange(SECOND), hears)

    def maybe_crash(self, asked: tuple[Calls, Call] | None) -> None:
        """Before a step."""
        if asked is not None:
            self.world.before_step(self, *asked)
        if self.world.rng.random() < self.world.crashes:
            self.crash()
            raise SimCrash

    def _boot(self, node: SimNode) -> None:
        self.session, self.exchanging = self.world.open_session(self.name), False
        self.claimed, self.in_doubt, self.enrolled = {}, {}, {}
        self.chunks = ChunkClient(
            self.world.chunks, lambda: 0 if self.exchanging else self.session, exchanges=True
        )  # fmt: skip
        node.on_message(self._hear)
        background_tasks = BackgroundTasks(f"{self.name}/{node.incarnation}")
        drive(node, lambda: self._keep(background_tasks))

    def _hear(self, source: str, payload: bytes) -> None:
        asked = ASKED(payload)

        async def serve() -> None:
            if any(isinstance(call.request, Close) and call.request.lazy for call in asked.calls.calls):
                await sleep(self.world.laziness.randrange(LAZY_NS))
            try:
                await self._enrol(asked.calls)
            except TransientError as error:
                answers: list[Answer] = [ErrorReply(0, error.message, error.code) for _ in asked.calls.calls]
            else:
                answers = [await self._answer(asked.calls, call) for call in asked.calls.calls]
            self.world.net.send(self.name, source, ENCODE(Told(asked.number, Answers(tuple(answers)))))

        drive(self.node, serve)

    async def _enrol(self, calls: Calls) -> None:
        """As `service.meta.service` does it: before the requests, by itself, so that all that they leave is reaped."""
        if calls.client in self.enrolled or not any(one.number or type(one.request) is Open for one in calls.calls):
            return

        async def enrol(context: Context) -> bool:
            if await context.rows.get(SESSIONS.key(calls.client)) is None:
                return False
            await holds.enrol(context)
            return True

        if await RequestPorts(self, calls).transact(enrol):
            self.enrolled[calls.client] = None

    async def _answer(self, calls: Calls, call: Call) -> Answer:
        ports = RequestPorts(self, calls, call)
        try:
            return await ports.answer()
        except SessionEnded as error:
            return ErrorReply(error.errno or 0, error.message, SESSION_OVER)
        except FileError as error:
            return ErrorReply(error.errno or 0, error.message)
        except TransientError as error:
            return ErrorReply(0, error.message, error.code)

    async def _keep(self, background_tasks: BackgroundTasks) -> None:
        ports = RequestPorts(self)
        while True:
            try:
                more = await background_tasks.step(ports)
            except TransientError:
                more = False
            await sleep(MS if more else KEEPING_NS)


class RequestPorts:
    """`core.meta.ports.Ports`; without `calls` those of the service itself."""

    def __init__(self, service: MetaService, calls: Calls | None = None, call: Call | None = None) -> None:
        self._service, self._world = service, service.world
        self._calls, self._call = calls, call
        self._asked = (calls, call) if calls is not None and call is not None else None
        self.settle_ns = SETTLE_NS
        self.number = call.number if call is not None else 0
        self.requester = SYSTEM
        if calls is not None:
            actor = call.actor if call is not None else None
            uid, gid = (actor.uid, actor.gid) if actor is not None else (0, 0)
            by_path = self._world.with_tokens
            self.requester = Requester(calls.client, uid, gid, (), unrestricted=uid == 0, by_path=by_path)

    async def answer(self) -> Answer:
        """Of the request: at once, or by a procedure."""
        assert self._call is not None
        request = self._call.request
        try:
            return await self._at_once(request)
        except Answered as known:
            return known.answer
        except NotAtOnce:
            self._world.sim.record("long", self._service.name, type(request).__name__)
        return await procedures.carry_out_long(request, self)

    async def _at_once(self, request: Request) -> Answer:
        async def body(context: Context) -> Answer:
            context.owner = 0
            answer = await dispatch.carry_out(request, context)
            await self._store(context, answer)
            return answer

        return await self.transact(body)

    async def _store(self, context: Context, answer: Answer) -> None:
        if self.number and self._calls is not None:
            await store_answer(context.rows, self.requester.client, self.number, self._calls.done_below, answer)

    @property
    def session(self) -> ClientId:
        return self._service.session

    @property
    def chunks(self) -> ChunkClient:
        self._service.maybe_crash(self._asked)
        return self._service.chunks

    async def transact(self, body: Callable[[Context], Awaitable[T]]) -> T:
        try:
            return await self._transact(body)
        except SessionEnded:
            raise
        except FileError as error:
            if not self.number:
                raise
            refused = ErrorReply(error.errno or 0, error.message)
        await self._transact(lambda context: self._store(context, refused))
        raise Answered(refused)

    async def _transact(self, body: Callable[[Context], Awaitable[T]]) -> T:
        async def attempt(rows: Transaction) -> T:
            context = self._world.context(rows, self.requester, self.number, self._service.session)
            if self.number:
                stored = await admit(context.rows, self.requester.client, "", self.number)
                if stored is not None:
                    raise Answered(stored)
            elif self._call is not None and isinstance(self._call.request, Open):
                await check_session(context.rows, self.requester.client, "")
            return await body(context)

        self._service.maybe_crash(self._asked)
        if self._world.rng.random() < self._world.pauses:
            await sleep(self._world.rng.randrange(SECOND))
        return await self._world.engine.transact(attempt, timeout_ns=20 * SECOND, idempotent=True)

    async def together(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        for one in work:
            await one()

    async def pause(self, delay_ns: int, inode: int) -> None:
        await sleep(delay_ns)

    def now_ns(self) -> int:
        return self._service.node.clock.now_ns()

    def claim(self, inode: int) -> bool:
        if inode in self._service.claimed:
            return False
        self._service.claimed[inode] = None
        return True

    def release(self, inode: int) -> None:
        self._service.claimed.pop(inode, None)
        if not self._service.in_doubt.get(inode):
            self._service.in_doubt.pop(inode, None)

    def inodes_in_doubt(self) -> Sequence[int]:
        return list(self._service.in_doubt)

    def in_doubt(self, inode: int) -> dict[Any, Any]:
        return self._service.in_doubt.setdefault(inode, {})
