"""The storage process: `StorageCore` decides, this performs.

    clients, peers ──> ChunkNode (native) ──events──> StorageCore ──effects──> engine, links, managers, clients
    managers <── heartbeats, answers ──> ControlClient

Native threads receive, read and write; they obey the table that is published here. All decisions are the machine's, in
one thread, event after event; each effect is handed on before the next. What the machine wants of the disk is done by
native threads, and comes back as an event.

*Publishing.* The table is replaced as a whole, so several changes in a row are published at once, and always before
any other effect is performed: who is told that a target is gone, or granted *done*, is told after readers see it.

*The end.* When the process is asked to end it lays down its roles, waits until the manager has heard it (`LEAVE_NS` at
most: silence would be understood as well, only later), and closes its targets, so that they need not be asked whether
they are clean. When a later process has taken its place it ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from fireflyer.base.errors import DataCorruption, FireflyerError, PermanentError
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.control import ControlClient
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain.node_membership import (
    End,
    ManagerReply,
    NodeMembership,
    ProcessIdentity,
    SendToManager,
    TakeRouting,
    TakeSessions,
    Tick,
)
from fireflyer.fs.core.chain.replica import Limits, Replica
from fireflyer.fs.core.chain.role import role_of
from fireflyer.fs.core.chain.served_notes import ServedNote, notes_due
from fireflyer.fs.core.chain.storage_node import (
    ClientRecordsFound,
    Effect,
    Event,
    Leave,
    Left,
    NodeLost,
    PeerMessageReceived,
    StorageCore,
    TargetScoped,
)
from fireflyer.fs.schema import data
from fireflyer.fs.schema.chunks import Put, Request
from fireflyer.fs.schema.ids import ChainId, ChunkId, ContentId, NodeId, TargetId
from fireflyer.fs.schema.routing import Routing
from fireflyer.fs.service.finding_users import asking_managers
from fireflyer.fs.service.storage.client_requests import ClientRequests
from fireflyer.fs.service.storage.config import StorageConfig
from fireflyer.fs.service.storage.connections import DataConnections
from fireflyer.fs.service.storage.node_lock import hold_node
from fireflyer.fs.service.storage.targets import (
    OpenTarget,
    boot_id,
    close_targets,
    maintain,
    note_failure,
    open_targets,
)
from fireflyer.identity.handshake import Accepts, FindUser, NodeCredential
from fireflyer.identity.secrets import Secret, load_secret
from fireflyer.native import ChunkNode
from fireflyer.runtime.address import Address
from fireflyer.runtime.clock import BootClock
from fireflyer.runtime.driver import Driver
from fireflyer.runtime.metrics import Series, serving_metrics
from fireflyer.runtime.raw_connections import RawListener

__all__ = ["run_storage"]

_log = logging.getLogger(__name__)
TICK_NS: Final = 40 * MS
SWEEP_S: Final = 60.0
LEAVE_NS: Final = 3 * SECOND
NOTE_S: Final = 2.0
"""For a disk to take the version of a chain; without an answer of the manager for longer the node fences itself."""
_EVENTS: Final = 256
"""Of the native node, taken at once."""
_PAGE: Final = 512
_LAST_CHANNEL: Final = (1 << 32) - 1
_THREADS: Final = 8
_THREADS_PER_TARGET: Final = 3
"""As many as wait for its disk when that hangs (who looks after it, notes that it failed, and closes it): the other
targets need theirs."""


async def run_storage(config: StorageConfig, *, on_ready: Callable[[str], None], limits: Limits | None = None) -> None:
    """Runs until it is cancelled: then it ends in order. `on_ready(address)` is called when its targets are open and it
    listens. Raises `FireflyerError`: no target can be opened, a later process has replaced this one."""
    secret = load_secret(config.secret_file)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with hold_node(secret, config.cluster, config.node):
        await _run(config, secret, on_ready, limits or Limits())


async def _run(config: StorageConfig, secret: Secret, on_ready: Callable[[str], None], limits: Limits) -> None:
    threads = _THREADS + _THREADS_PER_TARGET * len(config.targets)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads, "storage"))
    native = ChunkNode(
        io_threads=config.io_threads,
        job_threads=config.job_threads,
        buffer_bytes=config.buffer_bytes,
        cold_reads=config.cold_reads,
        unread_ns=config.unread_s * SECOND,
    )
    _log.info("node=%d cold_reads=%s", config.node, native.cold_reads)
    try:
        targets = await open_targets(native, config)
        credential = NodeCredential(secret, data.node_identity(config.node))
        async with asking_managers(config.managers, credential, config.tokens_file) as find_user:
            process = _Storage(config, secret, native, targets, limits, find_user)
            try:
                await process.run(on_ready)
            except asyncio.CancelledError:
                await close_targets(targets)
                raise
    finally:
        await asyncio.to_thread(native.close)


class _Storage:
    def __init__(
        self,
        config: StorageConfig,
        secret: Secret,
        native: ChunkNode,
        targets: dict[TargetId, OpenTarget],
        limits: Limits,
        find_user: FindUser | None,
    ) -> None:
        self._config, self._secret, self._native, self._targets = config, secret, native, targets
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._table: dict[TargetId, fx.TableEntry] = {}
        self._unpublished = False
        self._news = {target: asyncio.Event() for target in targets}
        """Set when it may have become known that the target has everything."""
        self._left = asyncio.Event()
        self._ended: FireflyerError | None = None
        self._links = DataConnections(
            native, config.node, secret, lambda node: self._post(NodeLost(node)), find_user=find_user
        )
        self._asks = ClientRequests(native, secret, post=self._post, find=self._find, verify_soon=self._verify_soon)
        credential = NodeCredential(secret, data.node_identity(config.node))
        self._control = ControlClient(credential, self._answered)
        self._listener = RawListener(
            Accepts(secret, find_user),
            identity=data.node_identity(config.node),
            purpose=data.PURPOSE,
            on_connection=self._links.accept,
            full=self._links.full,
        )
        self._core: StorageCore | None = None
        self._driver: Driver[Event, Effect] | None = None

    # --- life ---

    async def run(self, on_ready: Callable[[str], None]) -> None:
        bound = await self._listener.start(self._config.host, self._config.port)
        address = str(Address(self._config.advertise or self._config.host, bound.port))
        self._core = self._make_core(address)
        self._driver = driver = Driver(self._core, self._perform, clock=BootClock())
        running = self._loop.create_task(driver.run())
        self._loop.add_reader(self._native.event_fd, self._take_events)
        try:
            for work in (
                self._tick(),
                self._sweep(),
                self._links.tokens.run(),
                *(self._maintain(one) for one in self._targets.values()),
            ):
                driver.spawn(work)
            async with serving_metrics(self._config.metrics_listen, self._metrics):
                on_ready(address)
                await asyncio.wait([running])
        except asyncio.CancelledError:
            _log.info("stopping on request node=%d", self._config.node)
            self._post(Leave("the storage process is stopping"))
            await self._leave(running)
            raise
        finally:
            driver.stop()
            await self._stop(running)
        running.result()
        if self._ended is not None:
            raise self._ended

    async def _metrics(self) -> Sequence[Series]:
        """What the native parts count, by their names."""
        found = {target: one.engine.native.stats() for target, one in self._targets.items()}
        names = dict.fromkeys(name for stats in found.values() for name in stats)
        return [
            *(
                Series.one(f"fireflyer_storage_{name}", "gauge", f"Storage node: {name.replace('_', ' ')}", value)
                for name, value in self._native.stats().items()
            ),
            Series.one(
                "fireflyer_storage_refused_connections_total",
                "counter",
                "Storage node: connections that were too many",
                self._links.refused,
            ),
            Series.one(
                "fireflyer_storage_strangers_total",
                "counter",
                "Storage node: connections without a handshake",
                self._listener.refused,
            ),
            *(
                Series(
                    f"fireflyer_target_{name}",
                    "gauge",
                    f"Target: {name.replace('_', ' ')}",
                    [({"target": str(target)}, stats[name]) for target, stats in found.items()],
                )
                for name in names
            ),
        ]

    async def _leave(self, running: asyncio.Task[None]) -> None:
        left = self._loop.create_task(self._left.wait())
        await asyncio.wait([left, running], timeout=LEAVE_NS / SECOND, return_when=asyncio.FIRST_COMPLETED)
        if not left.done():
            left.cancel()
            _log.warning("node stops without an acknowledgement by a manager node=%d", self._config.node)
        for number, target in self._targets.items():
            # `maintain` may not have come to it: the only replica of a chain would never serve again.
            if self._core is not None and self._core.membership.clean(number):
                try:
                    await asyncio.to_thread(target.directory.mark_clean)
                except (FireflyerError, OSError) as error:
                    _log.warning("target cannot be marked clean target=%d reason=%s", number, error)

    async def _stop(self, running: asyncio.Task[None]) -> None:
        self._loop.remove_reader(self._native.event_fd)
        await self._listener.close()
        await self._links.close()
        await self._control.close()
        await asyncio.wait([running])
        self._native.publish([])

    def _make_core(self, address: str) -> StorageCore:
        with contextlib.suppress(OSError), open("/etc/machine-id", encoding="ascii") as file:
            machine = file.read().strip()
            # Machines that were copied may have one number; they have names of their own.
            name = f"{machine}/{socket.gethostname()}"[:128]
            return self._core_of(address, name)
        return self._core_of(address, socket.gethostname()[:128])

    def _core_of(self, address: str, machine: str) -> StorageCore:
        nonce = secrets.token_hex(16)
        identity = ProcessIdentity(self._config.node, nonce, address, machine, boot_id(), self._config.cluster)
        clean = {target: one.directory.clean for target, one in self._targets.items()}
        notes = ((target, one.directory.noted()) for target, one in self._targets.items())
        noted = {target: note for target, note in notes if note is not None}
        membership = NodeMembership(identity, clean, self._config.managers, noted)
        return StorageCore(membership, self._targets, self._make_replica)

    def _make_replica(self, chain: ChainId, target: TargetId) -> Replica:
        return Replica(chain, target, self._targets[target].engine, self._limits)

    # --- what happens ---

    def _post(self, event: Event) -> None:
        if self._driver is not None:
            self._driver.post(event)

    def _answered(self, reply: ManagerReply) -> None:
        """What it lets a target do is noted on its disk first."""
        due = notes_due(reply.answer, self._targets, self._core.membership.noted) if self._core is not None else {}
        if not due or self._driver is None:
            self._post(reply)
        else:
            self._driver.spawn(self._noted(reply, due))

    async def _noted(self, reply: ManagerReply, due: Mapping[TargetId, ServedNote]) -> None:
        await asyncio.gather(*(self._note(target, note) for target, note in due.items()))
        self._post(reply)

    async def _note(self, target: TargetId, note: ServedNote) -> None:
        """A target that cannot is not to serve; the others do not wait for a disk that hangs."""
        try:
            async with asyncio.timeout(NOTE_S):
                await asyncio.to_thread(self._targets[target].directory.note, note)
        except (FireflyerError, OSError, TimeoutError) as error:
            reason = str(error) or f"not within {NOTE_S:.0f} s"
            _log.error("noting the chain on the disk failed target=%d reason=%s", target, reason)
            self._post(TargetScoped(target, fx.DiskFailed(f"the version of its chain cannot be noted: {reason}")))

    def _take_events(self) -> None:
        for event in self._native.take(_EVENTS):
            try:
                self._take(event)
            except DataCorruption as error:
                self._links.refuse(event[1], error.message)

    def _take(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("message", int(link), bytes(body), int(handle)):
                self._message(link, body, handle)
            case ("lost", int(link), str(reason)):
                self._links.lost(link, reason)
            case ("staged", int(target), int(job), made_in, version, length, crc):
                self._post(
                    TargetScoped(target, self._targets[target].engine.staged(job, made_in, version, length, crc))
                )
            case ("stage_failed", int(target), int(job), str(kind), str(message)):
                self._post(TargetScoped(target, self._targets[target].engine.stage_failed(job, kind, message)))
            case ("dropped", int(target), int(job)):
                self._post(TargetScoped(target, self._targets[target].engine.dropped(job)))
            case ("adopted", int(target), _):
                self._post(TargetScoped(target, fx.RecordsInstalled()))
            case ("damage", int(target), int(file), int(index)):
                _log.error("chunk is damaged target=%d chunk=%d:%d", target, file, index)
                self._post(TargetScoped(target, fx.CorruptionFound(ChunkId(file, index))))
            case ("disk_failed", int(target), str(message)):
                _log.error("disk failed target=%d reason=%s", target, message)
                self._post(TargetScoped(target, fx.DiskFailed(message)))
                if self._driver is not None:
                    self._driver.spawn(asyncio.to_thread(note_failure, self._targets[target]))
            case ("verified", int(target), int(job), last, int(verified)):
                self._targets[target].scrub.verified(time.monotonic_ns(), job, last, verified)
            case _:
                _log.error("unknown event of the native node: %s", event[0])

    def _message(self, number: int, body: bytes, handle: int) -> None:
        link = self._links.find(number)
        kept = False
        try:
            message = data.decode(body)
            if link is None:
                return
            if isinstance(message, data.DataRequest):
                kept = True
                self._asks.asked(link, message, handle)
            elif isinstance(message, data.PeerEnvelope) and link.trusted:
                self._check_data(message, handle)
                self._links.heard(message.source, number)
                kept = True
                self._post(PeerMessageReceived(message.source, message.target, message.message, handle))
            else:
                raise DataCorruption(f"{link.peer} may not send {type(message).__name__}")
        finally:
            if handle and not kept:
                self._native.release(handle)

    def _check_data(self, message: data.PeerEnvelope, handle: int) -> None:
        """Of a peer: what came with it is what it speaks of."""
        request = message.message
        put = request.body if isinstance(request, Request) and isinstance(request.body, Put) else None
        wanted = put.change.length if put is not None and put.change.carries_data else 0
        given = self._native.length(handle) if handle else 0
        if given != wanted:
            raise DataCorruption(f"{given} bytes of data came with a message of {wanted} bytes")

    def _find(self, chain: ChainId) -> tuple[fx.TableEntry, fx.ChunkIndex] | None:
        target = self._core.target_of(chain) if self._core is not None else 0
        entry = self._table.get(target)
        return None if entry is None else (entry, self._targets[target].engine)

    def _verify_soon(self, chain: ChainId, chunk: ChunkId, peer: str) -> None:
        target = self._core.target_of(chain) if self._core is not None else 0
        if target:
            self._targets[target].scrub.verify_soon(chunk, peer)

    # --- what is wanted ---

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, TargetScoped) and isinstance(effect.what, fx.Publish):
            self._table[effect.target] = effect.what.entry
            if not self._unpublished:
                self._unpublished = True
                self._loop.call_soon(self._publish)
            return
        self._publish()
        match effect:
            case TargetScoped(target, what):
                # an `TargetScoped` that comes out holds an effect, one that goes in an event; the struct is one
                self._perform_of(target, what)  # type: ignore[arg-type]
            case SendToManager():
                self._control.ask(effect)
            case TakeRouting(routing):
                self._take_routing(routing)
            case TakeSessions():
                pass  # `StorageCore` admits by it
            case Left():
                self._left.set()
            case End(reason):
                self._ended = PermanentError(reason)
                if self._driver is not None:
                    self._driver.stop()

    def _perform_of(self, target: TargetId, effect: fx.Effect) -> None:
        match effect:
            case fx.Stage() | fx.Commit() | fx.Drop() | fx.InstallRecords() | fx.Forget():
                failed = self._targets[target].engine.perform(effect)
                if failed is not None:
                    self._post(TargetScoped(target, failed))
            case fx.Send(peer, message, handle, None):
                self._links.send(target, peer, self._node_of(peer), message, handle)
            case fx.Send(peer, Request(body=Put(chunk=chunk)) as message, _, ContentId() as content):
                self._links.send_content(target, peer, self._node_of(peer), message, chunk, content)
            case fx.Release(handle):
                self._native.release(handle)
            case fx.Reply(waiter, reply):
                self._asks.reply(waiter, reply)
            case fx.UpToDate():
                self._news[target].set()
            case fx.ReportGone(version, reason):
                _log.warning("target stops serving target=%d chain_version=%d reason=%s", target, version, reason)
            case fx.ReportUnreachable(peer):
                _log.warning("successor does not answer target=%d successor=%d", target, peer)
            case _:
                pass  # the node membership has handled it

    def _node_of(self, target: TargetId) -> NodeId:
        return self._core.node_of(target) if self._core is not None else 0

    def _publish(self) -> None:
        if self._unpublished:
            self._unpublished = False
            self._native.publish(
                [
                    (
                        target,
                        one.chain,
                        one.chain_version,
                        one.serving,
                        one.fence_until_ns,
                        one.tail,
                        one.answers_committed,
                    )
                    for target, one in self._table.items()
                    if self._core is not None and self._core.target_of(one.chain) == target
                ]
            )

    def _take_routing(self, routing: Routing) -> None:
        addresses = {node.id: node.address for node in routing.nodes}
        nodes = {member.target: member.node for chain in routing.chains for member in chain.members}
        wanted: dict[NodeId, str] = {}
        for chain in routing.chains:
            for member in chain.members:
                if member.target in self._targets and (successor := role_of(chain, member.target).successor):
                    wanted[nodes[successor]] = addresses.get(nodes[successor], "")
        for news in self._news.values():
            news.set()
        self._links.want({node: address for node, address in wanted.items() if address})

    # --- in the course of time ---

    async def _tick(self) -> None:
        while True:
            now_ns = time.monotonic_ns()
            self._post(Tick())
            for target in self._targets.values():
                target.scrub.tick(now_ns)
            if self._core is not None:
                keys = self._core.membership.key_ids
                if self._asks.use_keys(keys):
                    self._links.end_revoked(keys, time.time())
            await asyncio.sleep(TICK_NS / SECOND)

    async def _sweep(self) -> None:
        """Rows of clients that are over, which others of a chain have brought back. And a line for people."""
        while True:
            await asyncio.sleep(SWEEP_S)
            counts = " ".join(f"{name}={value}" for name, value in self._native.stats().items())
            _log.info("cold_reads=%s %s", self._native.cold_reads, counts)
            for number, target in self._targets.items():
                after: tuple[int, int] | None = None
                while page := target.engine.native.completions(after, _PAGE):
                    clients = tuple(dict.fromkeys(completion[0] for completion in page))
                    self._post(ClientRecordsFound(number, clients))
                    after = (clients[-1], _LAST_CHANNEL)
                    await asyncio.sleep(0)

    def _maintain(self, target: OpenTarget) -> Coroutine[Any, Any, None]:
        number = target.config.id
        return maintain(
            target,
            self._news[number],
            config=self._config,
            is_clean=lambda: self._core is not None and self._core.membership.clean(number),
            post=self._post,
        )
