"""Whose token it is, asked of other services: any of them may answer. What they say is remembered for a moment
(`remembered`), and who asks for the same token at the same time waits for the same answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Self

from fireflyer.accounts.calls import FIND_TOKEN, FindToken, unsealed
from fireflyer.accounts.remembered import RememberedUsers
from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.identity.handshake import MAX_IDENTITY_BYTES, NodeCredential, UserKey
from fireflyer.runtime.rpc.client import RpcClient

__all__ = ["RemoteAccounts"]

ANSWER_NS: Final = 2 * SECOND
"""For one service to be reached and to answer, before the next is asked."""
MAX_ASKED: Final = 256
"""Tokens that are asked for at the same time: strangers can cause a question each."""


class RemoteAccounts:
    """Lives in one loop; use it with `async with`."""

    def __init__(self, servers: Sequence[str], credential: NodeCredential) -> None:
        """`servers`: HOST:PORT of each. Raises `UsageError` where there is none."""
        if not servers:
            raise UsageError("nobody is named who knows users; give at least one HOST:PORT")
        self._servers = list(servers)
        self._credential = credential
        self._remembered = RememberedUsers()
        self._asked: dict[str, asyncio.Task[UserKey | None]] = {}
        self._client: RpcClient | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._drop(self._client)

    async def find(self, token_id: str) -> UserKey | None:
        """None where it counts for nothing. Raises `FireflyerError` where nobody can say."""
        if len(token_id.encode()) > MAX_IDENTITY_BYTES:
            return None
        known = self._remembered.find(time.monotonic_ns(), token_id)
        if known is not None:
            return known
        task = self._asked.get(token_id)
        if task is None:
            if len(self._asked) >= MAX_ASKED:
                raise Busy(f"{MAX_ASKED} tokens are asked for already; try again later")
            task = self._asked[token_id] = asyncio.get_running_loop().create_task(self._find(token_id))
            task.add_done_callback(lambda done: self._answered(token_id, done))
        return await asyncio.shield(task)  # others may wait for it too

    def _answered(self, token_id: str, done: asyncio.Task[UserKey | None]) -> None:
        del self._asked[token_id]
        if not done.cancelled():
            done.exception()  # seen, also where who asked has gone

    async def _find(self, token_id: str) -> UserKey | None:
        """The first server is the one that answered last."""
        reason: FireflyerError = Busy("nobody was asked")
        for server in list(self._servers):
            asked_ns = time.monotonic_ns()
            try:
                async with asyncio.timeout(ANSWER_NS / SECOND):
                    client = await self._connected(server)
                    answer = await client.call(FIND_TOKEN, FindToken(token_id), ANSWER_NS)
            except FireflyerError as error:
                reason = error
            except TimeoutError:
                reason = Busy(f"{server} does not say whose token it is")
            else:
                user = None if answer.user is None else unsealed(answer.user, self._credential.secret)
                self._remembered.keep(asked_ns, token_id, user)
                return user
            if self._servers[0] == server:
                self._servers.append(self._servers.pop(0))
        raise reason

    async def _connected(self, server: str) -> RpcClient:
        async with self._connecting:
            client = self._client
            if client is None or client.lost is not None or str(client.address) != server:
                self._client = None
                await self._drop(client)
                client = self._client = await RpcClient.connect(server, self._credential, ANSWER_NS)
            return client

    async def _drop(self, client: RpcClient | None) -> None:
        if client is not None:
            await client.close()
