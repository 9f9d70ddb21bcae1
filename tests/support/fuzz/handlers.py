"""Handlers of calls, driven by messages of peers that have proven who they are and then say anything at all.

Each message meets a fresh service, so that a failure is that of the message. What a handler must not do, whatever the
message: raise what is no declared error (the server logs that, and the test looks for it), or end the machine behind.
"""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import msgspec
from tests.golden.pinned.recorded import read_record
from tests.golden.pinned.registry import FORMATS
from tests.support.fs.clusters.meta_service import MetaRig, user

from fireflyer.base.errors import PermissionDenied
from fireflyer.base.events import Logged, encode_log_line
from fireflyer.cli.jobs.progress import JobProgress
from fireflyer.cli.jobs.view import PlainPrinter
from fireflyer.cluster.core.gang import Gang
from fireflyer.cluster.core.messages import Begin, Effect, Event, Log, StartSupervisor, Tick
from fireflyer.cluster.launcher.collected import CollectedFiles, CollectedLogs
from fireflyer.cluster.launcher.control import ControlService
from fireflyer.cluster.launcher.joined import JoinedHosts
from fireflyer.cluster.schema import join, wire
from fireflyer.cluster.schema.hosts import HostFacts, HostQuestion
from fireflyer.cluster.schema.job import JobSpec, RankLine
from fireflyer.fs.control.connections import META
from fireflyer.fs.core.manager.state_machine import Manager, Reply, RequestReceived, Settings
from fireflyer.fs.core.manager.state_machine import Tick as ManagerTick
from fireflyer.fs.core.rows import LEASE_KEY
from fireflyer.fs.schema.manager import GetFilesStatus, GetMetaServices, Request
from fireflyer.fs.schema.sessions import GetCapability
from fireflyer.fs.service.manager.process import check_role
from fireflyer.identity import Account
from fireflyer.identity.handshake import Accepts
from fireflyer.identity.secrets import Secret
from fireflyer.kvstore import MemoryEngine
from fireflyer.kvstore.core.fenced import Transact
from fireflyer.kvstore.fenced_driver import transact_on
from fireflyer.runtime.driver import InlineDriver
from fireflyer.runtime.reporter import REPORT
from fireflyer.runtime.rpc import Method
from fireflyer.runtime.rpc.messages import Call, encode
from fireflyer.runtime.rpc.server import Caller, RpcServer, _Connection

__all__ = ["ManagerRequests", "calls_of_launcher", "calls_of_meta"]

_ADA: Final = Account("ada", 1001, 1001, (50,))
_NODE: Final = Caller("node", "supervisor 0.1", "127.0.0.1:1", 1)
_LARGEST: Final = 1 << 40
"""Of the numbers that a launcher is told."""
_TURNS: Final = 40
"""Of the loop, in which a handler that waits for nobody has ended."""
_THREADS_S: Final = 0.02
"""What is left then waits for a thread, or for a command that never comes."""

Serve = Callable[[RpcServer], AbstractAsyncContextManager[None]]


def _recorded(name: str) -> list[bytes]:
    return [sample for form in FORMATS if form.name == name for sample in read_record(form, form.revision).samples]


def _samples(
    methods: dict[str, list[Method[Any, Any]]], more: Callable[[list[bytes]], list[bytes]] = list
) -> list[bytes]:
    """Calls of the methods, by the format of what they ask."""
    return [
        encode(Call(1, method.name, 10**9, msgspec.Raw(sample)))
        for name, of_format in methods.items()
        for sample in more(_recorded(name))
        for method in of_format
    ]


def _with_large_numbers(sample: bytes) -> Iterator[bytes]:
    """With one of its numbers as large as is allowed, which chance seldom finds."""
    tree = msgspec.msgpack.decode(sample)
    for holder, key in list(_numbers(tree)):
        was = holder[key]
        holder[key] = _LARGEST
        yield msgspec.msgpack.encode(tree)
        holder[key] = was


def _and_with_large_numbers(samples: list[bytes]) -> list[bytes]:
    return [*samples, *(one for sample in samples for one in _with_large_numbers(sample))]


def _numbers(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Where there is a number, not a truth value."""
    places: Any = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, value in places:
        if isinstance(value, int) and not isinstance(value, bool):
            yield tree, key
        yield from _numbers(value)


class _Silent:
    """A stream that takes answers and keeps none."""

    async def send(self, message: bytes) -> None:
        del message


class _Calls:
    """Messages on an authenticated connection, to what `serve` registers."""

    def __init__(self, serve: Serve, caller: Caller) -> None:
        self._serve, self._caller = serve, caller
        self._loop = asyncio.new_event_loop()

    def parse(self, data: bytes) -> None:
        self._loop.run_until_complete(self._handled(data))

    async def _handled(self, data: bytes) -> None:
        server = RpcServer(Accepts(Secret(bytes(range(32)))))
        async with self._serve(server):
            stream: Any = _Silent()
            connection = _Connection(
                stream, self._caller, server._entries, server._limits, server._shares, server._said
            )
            await connection._handle(memoryview(data))
            tasks = [*connection._calls.values(), *connection._notifications]
            for _ in range(_TURNS):
                if all(task.done() for task in tasks):
                    break
                await asyncio.sleep(0)
            for task in (await asyncio.wait(tasks, timeout=_THREADS_S))[1] if tasks else ():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)


# --- the launcher ---

_OF_LAUNCHER: Final[dict[str, list[Method[Any, Any]]]] = {
    "rpc.cluster.agent_hello.request": [wire.HELLO],
    "rpc.cluster.agent_next.request": [wire.NEXT, join.HOST_NEXT],
    "rpc.cluster.empty": [wire.HEARTBEAT, wire.RENEW, wire.FETCH_FILES, join.ASK],
    "rpc.cluster.rank_started.request": [wire.STARTED],
    "rpc.cluster.rank_exited.request": [wire.EXITED],
    "rpc.cluster.ranks_gone.request": [wire.GONE],
    "rpc.cluster.node_checked.request": [wire.CHECKED],
    "rpc.cluster.trouble.request": [wire.LOG_ERROR],
    "rpc.cluster.output.request": [wire.OUTPUT],
    "rpc.cluster.port_found.request": [wire.PORT],
    "rpc.cluster.rank_log.request": [wire.LOG],
    "rpc.cluster.run_file": [wire.KEEP_FILE],
    "rpc.cluster.report.request": [REPORT],
    "rpc.cluster.host_join.request": [join.JOIN],
    "rpc.cluster.host_guard_ended.request": [join.HOST_NEWS],
}
_QUESTION: Final = HostQuestion(workdir="/work", script="train.py", kind="script", run_dir="/run", mark="x")
_FACTS: Final = HostFacts(
    version="1.0", python="3.11.2", hostname="b", boot_id="x", namespace="net:[1]", uid=0, cores=2, gpus=0,
    has_workdir=True, script_sha256="ab", has_script=True, shares_run_dir=False, client="", server="", time_ns=1000,
)  # fmt: skip


@asynccontextmanager
async def _launcher(server: RpcServer) -> AsyncIterator[None]:
    """A job of two nodes whose ranks run; the caller is the supervisor of node 0, and host 1."""
    spec = JobSpec(script="train.py", run_dir="/run", nodes=2, ranks_per_node=2, hosts=("a", "b"), max_restarts=1)
    progress, printer = JobProgress(), PlainPrinter(io.StringIO())
    shown: list[RankLine | str] = []

    def perform(effect: Effect) -> None:
        match effect:
            case StartSupervisor(node, incarnation):
                control.expect(node, incarnation)
            case Log(event):
                entry = Logged(0, event)
                encode_log_line(entry)
                shown.extend(progress.feed(entry))

    driver: InlineDriver[Event, Effect] = InlineDriver(Gang(spec), perform)
    with tempfile.TemporaryDirectory() as directory:
        logs = CollectedLogs(lambda name: os.path.join(directory, "logs", name), on_error=lambda _: None)
        control = ControlService(
            feed=driver.feed, on_line=shown.append, on_port=lambda _: None, on_asks=lambda: None,
            local_rank=lambda attempt, rank: rank,
            logs=logs,
            files=CollectedFiles(directory),
        )  # fmt: skip
        hosts = JoinedHosts(spec, question=_QUESTION)
        control.serve(server)
        hosts.serve(server)
        driver.feed(Begin(0.0))
        await control._hello(wire.SupervisorHello(0, 1, 100), _NODE)
        await hosts._join(join.JoinRequest(1, 2, _FACTS), _NODE)
        driver.feed(Tick())
        yield
        driver.feed(Tick())
        printer.lines(shown)
        await logs.close()


def calls_of_launcher() -> tuple[list[bytes], Callable[[bytes], object]]:
    return _samples(_OF_LAUNCHER, _and_with_large_numbers), _Calls(_launcher, _NODE).parse


# --- the meta service ---


@asynccontextmanager
async def _meta(server: RpcServer) -> AsyncIterator[None]:
    async with MetaRig(MemoryEngine(), accounts=(_ADA,)) as rig:
        await rig.open_session(7, "ada")
        server.register(META, rig.service.serve)
        yield


def calls_of_meta() -> tuple[list[bytes], Callable[[bytes], object]]:
    return _samples({"rpc.fs.meta.request": [META]}), _Calls(_meta, Caller("user", "ada", "127.0.0.1:2", 2, _ADA)).parse


# --- the cluster manager ---


class ManagerRequests:
    """A request of a service or of a user, at a primary over a fresh store. The machine must answer it."""

    samples: Final = _recorded("rpc.fs.ask.request")

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._decoder = msgspec.msgpack.Decoder(Request)

    def parse(self, data: bytes) -> None:
        request = self._decoder.decode(data)
        if isinstance(request, GetCapability | GetMetaServices | GetFilesStatus):
            return  # which its process answers without the machine
        self._loop.run_until_complete(self._asked(request))

    async def _asked(self, request: Any) -> None:
        manager, engine, now_ns = Manager(Settings("a", "a:1")), MemoryEngine(), 0

        async def handle(event: Any) -> int:
            """How many answers were given."""
            events, answers = [event], 0
            while events:
                for effect in manager.handle(now_ns, events.pop(0)):
                    answers += isinstance(effect, Reply)
                    if isinstance(effect, Transact):
                        events.append(await transact_on(engine, effect, lease_key=LEASE_KEY, timeout_ns=10**9))
            return answers

        while not manager.routing_version:
            await handle(ManagerTick())
            now_ns += 10**8
        for caller in (_NODE, user("ada")):
            try:
                trusted = check_role(request, caller)
            except PermissionDenied:
                continue
            answered = await handle(RequestReceived(1, request, "" if trusted else "ada", trusted))
            answered += await handle(ManagerTick())
            assert answered == 1, f"{answered} answers"
