"""What a client performs over real sockets, whose other ends the test plays."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.fs.clusters.data_connection import MESSAGE, READ_REPLY, frame

from fireflyer.base.errors import (
    FireflyerError,
    NotFound,
    PermissionDenied,
    StaleVersion,
    Timeout,
    Unreachable,
    UsageError,
)
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.client import PerProcess, connect, connect_to, open_ring, open_ring_to
from fireflyer.fs.client.control.capabilities import Renewals, Right
from fireflyer.fs.client.control.session import ManagerSession
from fireflyer.fs.client.dispatch import Dispatch
from fireflyer.fs.core.requests.effects import DataArrived, Failed, Limits, QuerySpec
from fireflyer.fs.schema import data
from fireflyer.fs.schema.chunks import Change, Done, Operation, QueryKind, RefusalReason, Refused, Update
from fireflyer.fs.schema.ids import ChunkId, ContentId
from fireflyer.fs.schema.routing import Chain, Member, Node, Routing, TargetState
from fireflyer.fs.schema.sessions import CapabilityAnswer
from fireflyer.identity import Accepts, NodeCredential, new_secret
from fireflyer.identity.secrets import save_secret
from fireflyer.native import crc32c
from fireflyer.runtime.processes.run_lock import RunLock
from fireflyer.runtime.raw_connections import RawConnection, RawListener

CHUNK = ChunkId(1, 0)
TRUNCATE = Change(Operation.TRUNCATE, 0, 5)
RIGHT, OTHER = Right(1, 9, 3), Right(11, 19, 3)
READ = QuerySpec(QueryKind.READ, 0, 5)
DONE = Done(ContentId(1, 1), None)
_PREFIX_BYTES = 24


class Bench:
    """A client, and a node for each connection that it asked for and was given."""

    def __init__(self, *serving: int) -> None:
        self.wanted: list[Node] = []
        self.rights: list[Right] = []
        self.exchanges: list[int] = []
        self.results: list[Any] = []
        self.ends: dict[int, socket.socket] = {}
        self.dispatch = Dispatch(
            7,
            limits=Limits(attempt_ns=200 * MS, pause_ns=MS, unknown=1),
            seed=1,
            connect=self.wanted.append,
            ask_routing=lambda: None,
            ask_right=self.rights.append,
            exchange=self.exchanges.append,
        )
        self.route(*serving)

    def route(self, *serving: int, incarnation: int = 1) -> None:
        version = self.dispatch.routing.version + 1
        nodes = tuple(Node(one, f"node:{one}", incarnation) for one in serving)
        members = tuple(Member(one, one, TargetState.SERVING) for one in serving)
        self.dispatch.learned(Routing(version, nodes, (Chain(1, version, members),)))

    def begin(self, what: Change | QuerySpec, memory: bytearray | None = None) -> None:
        view = None if memory is None else memoryview(memory)
        self.dispatch.begin(1, CHUNK, what, view, SECOND, self.results.append)
        self.dispatch.flush()

    def connect(self) -> None:
        """All that are wanted."""
        while self.wanted:
            node = self.wanted.pop(0)
            ours, self.ends[node.id] = socket.socketpair()
            self.ends[node.id].settimeout(30)
            self.dispatch.connected(node, ours.detach())

    def heard(self, node: int) -> data.DataRequest:
        """The next message that the node gets."""
        end = self.ends[node]
        prefix = end.recv(_PREFIX_BYTES, socket.MSG_WAITALL)
        kind, body_bytes, payload_bytes = struct.unpack("<8xHxxII4x", prefix)
        body = end.recv(body_bytes, socket.MSG_WAITALL)
        end.recv(payload_bytes, socket.MSG_WAITALL)
        assert kind == MESSAGE
        message = data.decode(body)
        assert isinstance(message, data.DataRequest)
        return message

    def say(self, node: int, message: data.DataReply) -> None:
        self.ends[node].sendall(frame(MESSAGE, data.encode(message)))

    def take(self) -> None:
        self.dispatch.take(self.dispatch.ring.wait(1, SECOND))
        self.dispatch.flush()

    def close(self) -> None:
        self.dispatch.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture
def bench() -> Any:
    made = Bench(1)
    yield made
    made.close()


def test_what_is_asked_before_there_is_a_connection_waits_for_it(bench: Bench) -> None:
    bench.begin(TRUNCATE)
    assert [node.id for node in bench.wanted] == [1]
    bench.connect()
    asked = bench.heard(1)
    assert isinstance(asked.body, Update)
    bench.say(1, data.DataReply(asked.number, DONE))
    bench.take()
    assert bench.results == [DONE]


def test_an_answer_before_the_loss_of_its_connection_counts_and_what_follows_goes_elsewhere(bench: Bench) -> None:
    """Both come in one turn: what the answer lets begin cannot be sent there any more."""
    bench.begin(TRUNCATE)
    bench.begin(TRUNCATE)
    bench.connect()
    bench.say(1, data.DataReply(bench.heard(1).number, DONE))
    bench.ends[1].close()
    while not bench.wanted:
        bench.take()
        bench.dispatch.tick()
    assert bench.results == [DONE]
    bench.connect()
    bench.say(1, data.DataReply(bench.heard(1).number, DONE))
    bench.take()
    assert bench.results == [DONE, DONE]


def test_capabilities_are_granted_before_anything_is_asked(bench: Bench) -> None:
    presented: list[FireflyerError | None] = []
    bench.dispatch.present(RIGHT, b"first", presented.append)
    assert presented == [None]
    bench.begin(TRUNCATE)
    bench.connect()
    shown = bench.heard(1)
    assert shown.body == data.Present(b"first")
    bench.ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        bench.ends[1].recv(1)
    bench.ends[1].settimeout(30)
    bench.say(1, data.DataReply(shown.number, data.Granted(60 * SECOND)))
    bench.take()
    assert isinstance(bench.heard(1).body, Update)


def refuse(bench: Bench, shown: data.DataRequest) -> None:
    bench.say(1, data.DataReply(shown.number, Refused(RefusalReason.DENIED, "another key")))
    bench.take()


def silent(bench: Bench) -> bool:
    bench.ends[1].setblocking(False)
    try:
        with pytest.raises(BlockingIOError):
            bench.ends[1].recv(1)
    finally:
        bench.ends[1].settimeout(30)
    return True


def test_what_a_node_refused_is_asked_for_anew_and_nothing_else_is_said_there_meanwhile(bench: Bench) -> None:
    bench.dispatch.present(RIGHT, b"first")
    bench.begin(TRUNCATE)
    bench.connect()
    refuse(bench, bench.heard(1))
    assert bench.rights == [RIGHT]
    assert bench.dispatch.servers() == {}
    assert silent(bench)
    bench.dispatch.present(RIGHT, b"second")
    shown = bench.heard(1)
    assert shown.body == data.Present(b"second")
    assert silent(bench)
    bench.say(1, data.DataReply(shown.number, data.Granted(60 * SECOND)))
    bench.take()
    assert isinstance(bench.heard(1).body, Update)
    assert bench.rights == [RIGHT]


def test_a_connection_that_has_the_right_still_goes_on_when_the_next_capability_is_refused(bench: Bench) -> None:
    bench.dispatch.present(RIGHT, b"first")
    bench.begin(TRUNCATE)
    bench.connect()
    bench.say(1, data.DataReply(bench.heard(1).number, data.Granted(60 * SECOND)))
    bench.take()
    assert isinstance(bench.heard(1).body, Update)
    bench.dispatch.present(RIGHT, b"second")
    refuse(bench, bench.heard(1))
    assert bench.rights == [RIGHT]
    assert list(bench.dispatch.servers()) == [1]


@pytest.mark.parametrize("denied", [False, True])
def test_nothing_is_said_with_a_right_whose_life_has_passed_until_it_is_renewed(bench: Bench, denied: bool) -> None:
    """As after a long suspend: no clock of the process has moved, and those of the nodes have."""
    bench.dispatch.present(RIGHT, b"first")
    bench.dispatch.present(OTHER, b"other")
    bench.dispatch.warm()
    bench.connect()
    for left_ns in (1, 60 * SECOND):
        bench.say(1, data.DataReply(bench.heard(1).number, data.Granted(left_ns)))
        bench.take()
    for chunk in (CHUNK, ChunkId(2, 0)):
        bench.dispatch.begin(1, chunk, TRUNCATE, None, SECOND, bench.results.append)
    bench.dispatch.flush()
    assert silent(bench)
    assert bench.rights == [RIGHT]
    assert bench.dispatch.servers() == {}
    if denied:
        bench.dispatch.forget(RIGHT)
    else:
        bench.dispatch.present(RIGHT, b"second")
        shown = bench.heard(1)
        assert shown.body == data.Present(b"second")
        assert silent(bench)
        bench.say(1, data.DataReply(shown.number, data.Granted(60 * SECOND)))
        bench.take()
    assert [type(bench.heard(1).body) for _ in range(2)] == [Update, Update]
    assert bench.rights == [RIGHT]


def test_who_has_lost_a_right_is_told_so_by_the_nodes(bench: Bench) -> None:
    bench.dispatch.present(RIGHT, b"first")
    bench.begin(TRUNCATE)
    bench.connect()
    refuse(bench, bench.heard(1))
    bench.dispatch.forget(RIGHT)
    asked = bench.heard(1)
    assert isinstance(asked.body, Update)
    refuse(bench, asked)
    (failed,) = bench.results
    assert isinstance(failed, Failed)
    assert failed.code == "permission_denied"


def test_who_acquires_a_right_is_told_of_a_refusal_and_nobody_is_kept_waiting(bench: Bench) -> None:
    bench.begin(TRUNCATE)
    bench.connect()
    bench.heard(1)
    presented: list[FireflyerError | None] = []
    bench.dispatch.present(RIGHT, b"first", presented.append)
    refuse(bench, bench.heard(1))
    assert isinstance(presented[0], PermissionDenied)
    assert bench.rights == []
    assert list(bench.dispatch.servers()) == [1]


def test_another_session_is_used_where_its_rights_are_granted() -> None:
    bench = Bench(1)
    bench.dispatch.present(RIGHT, b"first")
    bench.dispatch.present(OTHER, b"other")
    bench.begin(TRUNCATE)
    bench.connect()
    for _ in range(2):
        bench.say(1, data.DataReply(bench.heard(1).number, data.Granted(60 * SECOND)))
        bench.take()
    asked = bench.heard(1).body
    assert isinstance(asked, Update)
    assert asked.client == 7
    bench.dispatch.begin(1, ChunkId(1, 1), TRUNCATE, None, 0, bench.results.append)  # so one of two is unknown
    bench.dispatch.give_up(1)
    assert bench.exchanges == [7]
    bench.begin(TRUNCATE)
    bench.dispatch.exchanged(8, {RIGHT: b"second"})
    shown = bench.heard(1)
    assert shown.body == data.Present(b"second")
    assert silent(bench)
    bench.say(1, data.DataReply(shown.number, data.Granted(60 * SECOND)))
    bench.take()
    asked = bench.heard(1).body
    assert isinstance(asked, Update)
    assert asked.client == 8
    bench.close()


def test_rights_are_renewed_in_time_and_when_they_are_refused_until_the_manager_denies_them() -> None:
    async def main() -> None:
        answers: list[int | FireflyerError] = [3600, Unreachable("for now"), 3600, PermissionDenied("not any more")]
        said: asyncio.Queue[str] = asyncio.Queue()
        tasks = []

        async def ask(right: Right) -> CapabilityAnswer:
            assert right == RIGHT
            answer = answers.pop(0)
            if isinstance(answer, FireflyerError):
                raise answer
            return CapabilityAnswer(f"{len(answers)}".encode(), int(time.time()) + answer)

        renewals = Renewals(
            ask,
            spawn=lambda work: tasks.append(asyncio.create_task(work)),
            renewed=lambda _, capability: said.put_nowait(capability.decode()),
            denied=lambda _: said.put_nowait("denied"),
        )
        assert (await renewals.ask(RIGHT)).capability == b"3"
        renewals.refused(RIGHT)  # by a node that was connected before it was kept
        renewals.keep(RIGHT, int(time.time()) + 3600)
        renewals.keep(RIGHT, 0)
        assert await said.get() == "1"
        renewals.refused(RIGHT)
        assert await said.get() == "denied"
        (task,) = tasks
        await task

    asyncio.run(main())


def test_rights_are_not_asked_for_without_end_for_a_session_that_is_over() -> None:
    async def main() -> None:
        answers: list[FireflyerError] = [Unreachable("for now"), StaleVersion("session 8 is over")]

        async def ask(right: Right) -> CapabilityAnswer:
            if answers:
                raise answers.pop(0)
            return CapabilityAnswer(b"new", int(time.time()) + 3600)

        renewals = Renewals(
            ask, spawn=lambda work: work.close(), renewed=lambda *_: None, denied=lambda *_: None,
        )  # fmt: skip
        renewals.keep(RIGHT, int(time.time()) + 3600)
        with pytest.raises(StaleVersion, match="session 8 is over"):
            await renewals.anew(ask)
        assert await renewals.anew(ask) == {RIGHT: b"new"}

    asyncio.run(main())


def test_who_is_not_the_node_that_was_looked_for_is_left_again() -> None:
    async def main() -> None:
        secret, heard = new_secret(), asyncio.Queue[tuple[Node, FireflyerError | None]]()
        accepted: list[RawConnection] = []

        class Hears(ManagerSession):
            def connected(self, node: Node, fd: int) -> None:
                os.close(fd)
                heard.put_nowait((node, None))

            def not_connected(self, node: Node, error: FireflyerError) -> None:
                heard.put_nowait((node, error))

            def learned(self, routing: Routing) -> None: ...
            def confirmed(self, asked_ns: int) -> None: ...
            def renewed(self, right: Right, capability: bytes) -> None: ...
            def denied(self, right: Right) -> None: ...
            def over(self, client: int) -> None: ...
            def exchanged(self, client: int, capabilities: Mapping[Right, bytes]) -> None: ...
            def end(self, reason: str) -> None: ...

        listener = RawListener(
            Accepts(secret), identity=data.node_identity(2), purpose=data.PURPOSE, on_connection=accepted.append
        )
        address = str(await listener.start("127.0.0.1", 0))
        control = Hears(["127.0.0.1:1"], NodeCredential(secret, "client"))
        control.start(control)
        control.connect(Node(1, address, 1))
        node, error = await heard.get()
        assert node.id == 1
        assert isinstance(error, PermissionDenied)
        assert "not node 1" in str(error)
        control.connect(Node(2, address, 1))
        assert await heard.get() == (Node(2, address, 1), None)
        await control.close()
        await listener.close()
        for one in accepted:
            one.socket.close()

    asyncio.run(main())


def test_a_connection_that_never_was_leaves_no_doubt(bench: Bench) -> None:
    bench.begin(TRUNCATE)
    while not bench.results:
        for node in bench.wanted:
            bench.dispatch.not_connected(node, Unreachable("nobody listens"))
        bench.wanted.clear()
        bench.take()
        bench.dispatch.tick()
    (failed,) = bench.results
    assert isinstance(failed, Failed)
    assert failed.code == "unreachable"
    assert "nobody listens" in failed.message


def test_a_node_that_was_started_again_is_connected_anew(bench: Bench) -> None:
    bench.begin(TRUNCATE)
    bench.connect()
    bench.heard(1)
    old = bench.ends[1]
    bench.route(1, incarnation=2)
    while not bench.wanted:
        bench.take()
        bench.dispatch.tick()
    assert old.recv(1) == b""
    old.close()
    bench.connect()
    bench.say(1, data.DataReply(bench.heard(1).number, DONE))
    bench.take()
    assert bench.results == [DONE]


def test_what_is_no_answer_ends_the_connection(bench: Bench) -> None:
    bench.begin(TRUNCATE)
    bench.connect()
    bench.heard(1)
    bench.ends[1].sendall(frame(MESSAGE, b"\xc1 nonsense"))
    while not bench.wanted:
        bench.take()
        bench.dispatch.tick()
    assert bench.dispatch.servers() == {}


def test_memory_is_not_touched_by_what_comes_after_the_caller_gave_up(bench: Bench) -> None:
    memory = bytearray(5)
    bench.begin(READ, memory)
    bench.connect()
    request = bench.ends[1].recv(_PREFIX_BYTES + 40, socket.MSG_WAITALL)
    (tag,) = struct.unpack_from("<Q", request, _PREFIX_BYTES)
    bench.dispatch.give_up(1)
    reply = struct.pack("<QQQIIIII", tag, 1, 0, 1, 1, 1, 5, crc32c(b"hello"))
    bench.ends[1].sendall(frame(READ_REPLY, reply, b"hello"))
    bench.begin(READ, other := bytearray(5))
    (tag,) = struct.unpack_from("<Q", bench.ends[1].recv(_PREFIX_BYTES + 40, socket.MSG_WAITALL), _PREFIX_BYTES)
    reply = struct.pack("<QQQIIIII", tag, 1, 0, 1, 1, 1, 5, crc32c(b"there"))
    bench.ends[1].sendall(frame(READ_REPLY, reply, b"there"))
    bench.take()
    assert bench.results == [DataArrived(5, ContentId(1, 1), 5, crc32c(b"there"))]
    assert memory == bytearray(5)
    assert other == b"there"


def test_who_finds_no_manager_leaves_nothing_behind(tmp_path: Path) -> None:
    credential = NodeCredential(new_secret(), "test")

    def fail() -> tuple[int, int]:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{nobody.getsockname()[1]}"
            with pytest.raises(Timeout, match="no manager answered"):
                open_ring([address], credential, timeout_ns=50 * MS)
            with pytest.raises(Timeout, match="no manager answered"):
                asyncio.run(connect([address], credential, timeout_ns=50 * MS))
        with pytest.raises(UsageError, match="no manager address is given"):
            open_ring([], credential)
        with pytest.raises(NotFound, match="ff fs up"):
            open_ring_to(str(tmp_path))
        with pytest.raises(NotFound, match="ff fs up"):
            asyncio.run(connect_to(str(tmp_path)))
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    first = fail()  # the loop library keeps a pipe of its own
    assert fail() == first


def test_a_cluster_that_was_ended_is_said_to_be_so_at_once(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        save_secret(new_secret(), str(tmp_path / "node-secret"))
        (tmp_path / "cluster.json").write_text(f'{{"managers": ["127.0.0.1:{nobody.getsockname()[1]}"]}}')
        (tmp_path / "cluster.json").chmod(0o600)
        with pytest.raises(NotFound, match="is not running; start it: ff fs up --dir /"):
            asyncio.run(connect_to(str(tmp_path), timeout_ns=50 * MS))
        with pytest.raises(NotFound, match="is not running"):
            open_ring_to(str(tmp_path), timeout_ns=50 * MS)
        with RunLock(str(tmp_path / "up.lock")), pytest.raises(Timeout, match="no manager answered"):
            open_ring_to(str(tmp_path), timeout_ns=50 * MS)


class Opened:
    def __init__(self, name: str) -> None:
        self.name = name

    def close(self) -> None: ...


def test_what_each_process_opens_is_opened_when_it_is_wanted_also_where_it_was_pickled_to() -> None:
    here = PerProcess(Opened, "fs")
    there = pickle.loads(pickle.dumps(here))
    assert here.get() is here.get()
    assert there.get().name == "fs"
    assert there.get() is not here.get()
