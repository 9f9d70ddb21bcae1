"""Every parser of bytes that come from a peer or from a file that may be damaged, as far as it is Python.

The contract of each: it returns, or raises one of its `errors`. `right`: whatever else must hold of what came out. The
parsers in C++ are driven by `cpp/tests/**/fuzz_test.cpp`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from tests.golden.pinned.codecs import decode
from tests.golden.pinned.recorded import read_cases, read_record
from tests.golden.pinned.registry import FORMATS, Format
from tests.support.collectives.flight_dumps import World, dumps_of
from tests.support.fuzz.handlers import ManagerRequests, calls_of_launcher, calls_of_meta

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import Busy, DataCorruption, PermissionDenied, Unreachable, UsageError
from fireflyer.collectives.bootstrap import local_peers
from fireflyer.collectives.bootstrap.transports import exchange_worker_addresses
from fireflyer.collectives.flight import decode_dump, encode_dump
from fireflyer.collectives.flight.explain import explain
from fireflyer.collectives.flight.trace import encode_trace
from fireflyer.fs.core import capability
from fireflyer.fs.schema import data as fs_data
from fireflyer.identity.acceptor import Find, HandOver, HandshakeAcceptor
from fireflyer.identity.conversation import ClientConversation
from fireflyer.identity.handshake import MAX_MESSAGE_BYTES, Accepts, NodeCredential, UserKey, pack_message, token_key
from fireflyer.identity.secrets import Secret
from fireflyer.runtime import metrics
from fireflyer.runtime.framing import HEADER_BYTES, FrameOpener, frame_keys
from fireflyer.runtime.rpc.messages import Call, Notification, encode
from fireflyer.runtime.rpc.server import Caller, RpcServer, _Connection
from fireflyer.runtime.store import StoreService

__all__ = ["PARSERS", "Parser"]

_SECRET: Final = Secret(bytes(range(32)))
_TOKEN: Final = "fft1.id.secret"


@dataclass(frozen=True)
class Parser:
    name: str
    samples: Sequence[bytes]
    parse: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...]
    weight: int = 1
    """How many inputs it gets, beside the others."""
    most: int = 1 << 20
    """No more than so many of them: each costs a service that is made for it."""


def _cases(name: str) -> dict[str, bytes]:
    """The bytes that `tests/golden/cases.jsonl` has of a case, by part."""
    lines = [msgspec.json.decode(line) for line in read_cases()[name].splitlines()]
    return {line["part"]: base64.b64decode(line["bytes"]) for line in lines if "bytes" in line}


# --- handshakes ---


async def _nobody(_token_id: str) -> UserKey | None:
    """The test itself says whose token it is."""
    return None


@dataclass
class _Server:
    """A stranger's bytes at an acceptor whose nonces are known: what was recorded is admitted, and nothing else."""

    hello: bytes
    right: bytes
    """Hello and proof."""
    keys: tuple[bytes, ...]
    """Of the recorded sessions. A field that nobody looks at may differ; what was proven may not."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._acceptor = HandshakeAcceptor(
            Accepts(_SECRET, _nobody),
            identity="fs node 3",
            purpose="fs data",
            random_bytes=lambda count: b"s" * count,
        )
        assert self.parse(self.right), "the recorded bytes pass, else the fuzzing shows nothing"

    def parse(self, data: bytes) -> bool:
        number, read, admitted = next(self.numbers), 0, False
        self._acceptor.opened(0, number, "stranger")
        while wanted := self._acceptor.wanted(number):
            piece = data[read : read + wanted]
            read += len(piece)
            effects = self._acceptor.received(0, number, piece)
            for effect in effects:
                if isinstance(effect, Find):
                    self._acceptor.found(0, effect.number, UserKey("ada", token_key(_TOKEN)))
                if isinstance(effect, HandOver):
                    assert effect.session.key in self.keys, "admitted without the proof"
                    admitted = True
        assert len(self._acceptor) == 0
        return admitted


def _messages(server: _Server, data: bytes) -> bool:
    message = pack_message(data[:MAX_MESSAGE_BYTES])
    return server.parse(message) | server.parse(server.hello + message)


def _client(key: bytes, data: bytes) -> None:
    conversation = ClientConversation(NodeCredential(_SECRET, "fs node 4"), purpose="fs data", nonce=b"c" * 32)
    read = 0
    while conversation.session is None:
        piece = data[read : read + conversation.wanted]
        read += len(piece)
        conversation.receive(piece)
    assert conversation.session.key == key, "believed without the proof"


# --- frames and calls ---


def _frames(data: bytes) -> int:
    opener, count = FrameOpener(frame_keys(bytes(32))[0]), 0
    while len(data) >= HEADER_BYTES:
        header, data = data[:HEADER_BYTES], data[HEADER_BYTES:]
        length = opener.body_bytes(header)
        if len(data) < length:
            break  # the reader waits for more
        opener.open(header, data[:length])
        data, count = data[length:], count + 1
    return count


class _Silent:
    """A stream that takes answers and keeps none."""

    async def send(self, message: bytes) -> None:
        del message


class _Calls:
    """Messages of an authenticated node at a server with a rendezvous store. A handler that fails on an unexpected
    error is logged as an exception: the caller looks for that."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        server = RpcServer(Accepts(_SECRET))
        StoreService(server)
        caller = Caller("node", "rank 1", "127.0.0.1:1", 1)
        stream: Any = _Silent()
        self._connection = _Connection(stream, caller, server._entries, server._limits, server._shares, server._said)

    def parse(self, data: bytes) -> None:
        self._loop.run_until_complete(self._handled(data))

    async def _handled(self, data: bytes) -> None:
        try:
            await self._connection._handle(memoryview(data))
            await asyncio.sleep(0)  # its handler runs
        finally:
            for task in (*self._connection._calls.values(), *self._connection._notifications):
                task.cancel()
            await asyncio.sleep(0)


_METHODS: Final = {
    "set": ("set", "set_if_missing"),
    "key": ("get",),
    "add": ("add",),
    "wait": ("wait",),
    "prefix": ("keys", "delete_prefix"),
}
"""Of the store, by the format of their requests."""


def _call_samples() -> list[bytes]:
    found = []
    for form in FORMATS:
        if form.name.startswith("rpc.store.") and form.name.endswith(".request"):
            what = form.name.split(".")[2]
            for sample in read_record(form, form.revision).samples:
                for method in _METHODS[what]:
                    body = msgspec.Raw(sample)
                    found.append(encode(Call(1, f"store.{method}", 10**9, body)))
                    found.append(encode(Notification(f"store.{method}", 10**9, body)))
    return found


# --- what ranks tell each other before native code takes over ---


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def _with_length(parse: Callable[[bytes], object], data: bytes) -> object:
    return parse(_framed(data))


def _memory(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs, ExitStack() as stack:
        socket.send_fds(theirs, [data[:4] or b"\0"], [theirs.fileno()])
        theirs.sendall(data[4:])
        theirs.shutdown(socket.SHUT_WR)
        return local_peers.receive(ours, "rank 1", stack)


class _NoFabric:
    def address(self) -> bytes:
        return b"address"

    def meet(self, *_: object) -> str:
        return ""


def _worker_address(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        fabric: Any = _NoFabric()
        exchange_worker_addresses(fabric, {1: ("rank 1", ours)})


# --- files that ff reads, and others ---


def _dump(data: bytes) -> object:
    dump = decode_dump(data, name="it")
    return explain([dump]), encode_trace(dump)


class _Metrics:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._handler = metrics._MetricsHandler(self._nothing)

    async def _nothing(self) -> Sequence[metrics.Series]:
        return ()

    def parse(self, data: bytes) -> object:
        reader = asyncio.StreamReader(metrics.MAX_HEAD_BYTES, self._loop)
        reader.feed_data(data)
        reader.feed_eof()
        return self._loop.run_until_complete(self._handler._reply(reader))


def _format(form: Format, data: bytes) -> object:
    return decode(form.codec, data, form.kind)


def _parsers() -> Iterator[Parser]:
    node, user, frames = _cases("handshake.node"), _cases("handshake.user"), _cases("rpc.frames")
    hellos = [node["hello"] + node["proof"], user["hello"] + user["proof"], node["hello"], user["challenge"]]
    server = _Server(node["hello"], hellos[0], (node["session key"], user["session key"]))
    yield Parser("handshake, accepting", hellos, server.parse, (), weight=8)
    answers = [node["challenge"] + node["verdict"], user["challenge"] + user["verdict"], node["challenge"]]
    messages = [node["hello"][2:], user["hello"][2:], node["proof"][2:], node["challenge"][2:]]
    yield Parser("handshake, messages of the right length", messages, partial(_messages, server), (), weight=4)
    yield Parser(
        "handshake, connecting",
        answers,
        partial(_client, node["session key"]),
        (PermissionDenied, Busy, Unreachable),
        weight=4,
    )
    sealed = [frames["first frame"] + frames["second frame"], frames["first frame"]]
    yield Parser("frames", sealed, _frames, (DataCorruption,), weight=4)
    yield Parser("calls of the rendezvous store", _call_samples(), _Calls().parse, (UsageError,), weight=4)
    for name, (samples, parse), weight in (
        ("calls of the launcher", calls_of_launcher(), 3),
        ("calls of the meta service", calls_of_meta(), 1),
    ):
        yield Parser(name, samples, parse, (UsageError,), weight=weight, most=1000)
    asking = ManagerRequests()
    yield Parser("requests to the cluster manager", asking.samples, asking.parse, DECODE_ERRORS, weight=6, most=2000)
    messages = [sample for form in FORMATS if form.name == "fs.data" for sample in read_record(form, 1).samples]
    yield Parser("messages of chunk data", messages, fs_data.decode, (DataCorruption,), weight=4)
    key = capability.derive_key(_SECRET.reveal(), 7)
    tokens = [capability.sign(capability.Capability(7, "ada", 5, 11, 12, 3, 1_000_000), key)]
    yield Parser(
        "capabilities", tokens, lambda data: capability.verify(data, {7: key}, "ada", 0.0), (PermissionDenied,)
    )
    probes = [b'[{"pid":7,"address":4096,"number":9}]', b'[{"pid":0,"address":0,"number":0,"cpus":"0-3"}]']
    addresses = [b'{"address":"YWRkcmVzcw==","key":"%s"}' % (b"00" * 16)]
    for name, samples, parse in (
        ("descriptions of memory", probes, _memory),
        ("addresses of UCX workers", addresses, _worker_address),
    ):
        yield Parser(name, [_framed(one) for one in samples], parse, (Unreachable,))
        yield Parser(f"{name}, of the right length", samples, partial(_with_length, parse), (Unreachable,))
    world = World([0, 0, 1], [("allreduce", "f32", "sum", 1000, -1)] * 3, "stalled", rank=1, at=2, raised=True)
    dumps = [encode_dump(dump) for dump in dumps_of(world)]
    yield Parser("dumps of the flight recorder", dumps, _dump, (DataCorruption, UsageError), weight=4)
    asked = [b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"]
    yield Parser(
        "requests for metrics", asked, _Metrics().parse, (asyncio.IncompleteReadError, asyncio.LimitOverrunError)
    )
    for form in FORMATS:
        yield Parser(
            f"format {form.name}", read_record(form, form.revision).samples, partial(_format, form), DECODE_ERRORS
        )


PARSERS: Final = {parser.name: parser for parser in _parsers()}
