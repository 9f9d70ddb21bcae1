"""A small RPC service whose handlers do what tests need: answer, hang, fail, echo."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from fireflyer.base.errors import DataCorruption, NotFound
from fireflyer.base.units import SECOND
from fireflyer.identity.secrets import Secret, new_secret
from fireflyer.runtime.metrics import Series
from fireflyer.runtime.rpc import Accepts, Address, Caller, Method, NodeCredential, RpcClient, RpcServer, ServerLimits

__all__ = ["ADD", "ECHO", "FAIL", "HANG", "SLOW", "WHO", "Add", "Blob", "Name", "Number", "Service", "serving"]


class Add(msgspec.Struct, frozen=True):
    left: int
    right: int


class Number(msgspec.Struct, frozen=True):
    value: int


class Name(msgspec.Struct, frozen=True):
    name: str


class Blob(msgspec.Struct, frozen=True):
    data: bytes
    reply_bytes: int = 0


ADD = Method("test.add", Add, Number)
HANG = Method("test.hang", Name, Number)
FAIL = Method("test.fail", Name, Number)
ECHO = Method("test.echo", Blob, Blob)
SLOW = Method("test.slow", Name, Name)
WHO = Method("test.who", Name, Name)


@dataclass
class Service:
    """`hanging` and `ended` hold the names of `HANG` calls, `left` the callers that disconnected."""

    secret: Secret = field(default_factory=new_secret)
    address: Address = field(default_factory=lambda: Address("", 0))
    hanging: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    left: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: Callable[[], list[Series]] = list
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, request: Add, caller: Caller) -> Number:
        return Number(request.left + request.right)

    async def hang(self, request: Name, caller: Caller) -> Number:
        self.hanging.add(request.name)
        await self.notify()
        try:
            await self.release.wait()
            return Number(len(request.name))
        finally:
            self.hanging.discard(request.name)
            self.ended.append(request.name)
            await self.notify()

    async def fail(self, request: Name, caller: Caller) -> Number:
        if request.name == "bug":
            raise ValueError("secret detail of the bug")
        if request.name == "timeout":
            raise TimeoutError("of the handler's own")
        if request.name == "long":
            raise NotFound("x" * 10_000)
        raise {"not_found": NotFound, "data_corruption": DataCorruption}[request.name](f"no {request.name} here")

    async def slow(self, request: Name, caller: Caller) -> Name:
        for _ in range(20):
            await asyncio.sleep(0)
        self.ended.append(request.name)
        await self.notify()
        return request

    async def echo(self, request: Blob, caller: Caller) -> Blob:
        return Blob(bytes(request.reply_bytes) or request.data)

    async def who(self, request: Name, caller: Caller) -> Name:
        return Name(f"{caller.role} {caller.identity} {caller.connection}")

    def on_disconnect(self, caller: Caller) -> None:
        self.left.put_nowait(caller.identity)

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until_hanging(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.hanging) == count)

    async def until_ended(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.ended) == count)

    async def client(self, identity: str = "rank 0") -> RpcClient:
        return await RpcClient.connect(self.address, NodeCredential(self.secret, identity), 10 * SECOND)

    def register(self, server: RpcServer) -> None:
        server.register(ADD, self.add)
        server.register(HANG, self.hang)
        server.register(FAIL, self.fail)
        server.register(ECHO, self.echo)
        server.register(SLOW, self.slow)
        server.register(WHO, self.who)


@contextlib.asynccontextmanager
async def serving(
    limits: ServerLimits | None = None, accepts: Accepts | None = None, *, recheck_tokens: bool = False
) -> AsyncIterator[Service]:
    service = Service()
    server = RpcServer(
        accepts or Accepts(service.secret),
        identity="hub",
        limits=limits,
        on_disconnect=service.on_disconnect,
        recheck_tokens=recheck_tokens,
    )
    service.register(server)
    service.metrics = server.metrics
    service.address = await server.start("127.0.0.1", 0)
    try:
        yield service
    finally:
        await server.close()
