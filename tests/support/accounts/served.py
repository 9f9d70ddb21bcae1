"""A service of this process whose users can be changed, as the manager of a file system serves them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from tests.support.patience import allowed_s

from fireflyer.accounts import AccountStore
from fireflyer.accounts.managing import serve_users
from fireflyer.accounts.serving import serve_accounts
from fireflyer.fs.service.finding_users import finding_users
from fireflyer.fs.service.rights import is_administrator
from fireflyer.identity import Accepts, NodeCredential, Secret
from fireflyer.kvstore import Engine, MemoryEngine
from fireflyer.runtime.rpc import RpcServer

__all__ = ["ServedUsers", "served_users", "serving_users"]

T = TypeVar("T")


@contextlib.asynccontextmanager
async def serving_users(
    secret: Secret, engine: Engine, administrators: tuple[str, ...] = ("admin",)
) -> AsyncIterator[str]:
    """Its address."""
    users = AccountStore(engine)
    async with finding_users(users, administrators, (), NodeCredential(secret, "manager 1")) as find_user:
        server = RpcServer(Accepts(secret, find_user), recheck_tokens=True)
        serve_accounts(server, find_user, secret)
        serve_users(server, users, secret, find_user, is_administrator)
        try:
            yield str(await server.start("127.0.0.1", 0))
        finally:
            await server.close()


class ServedUsers:
    """Of a service in another thread, for tests of commands."""

    def __init__(self, address: str, store: AccountStore, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self._store = store
        self._loop = loop

    def ask(self, work: Callable[[AccountStore], Awaitable[T]]) -> T:
        async def asking() -> T:
            return await work(self._store)

        return asyncio.run_coroutine_threadsafe(asking(), self._loop).result(allowed_s(30))


@contextlib.contextmanager
def served_users(secret: Secret, administrators: tuple[str, ...] = ("admin",)) -> Iterator[ServedUsers]:
    ready: list[ServedUsers] = []
    started = threading.Event()

    async def serve(end: asyncio.Event) -> None:
        async with MemoryEngine() as engine, serving_users(secret, engine, administrators) as address:
            ready.append(ServedUsers(address, AccountStore(engine), loop))
            started.set()
            await end.wait()

    loop = asyncio.new_event_loop()
    end = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(end)))
    thread.start()
    try:
        assert started.wait(allowed_s(30))
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(allowed_s(30))
        loop.close()
