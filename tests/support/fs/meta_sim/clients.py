"""Clients that speak to meta services directly, and send again what was not answered: under the same number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Self

from tests.support.patience import allowed_s

from fireflyer.base.errors import TransientError
from fireflyer.base.units import SECOND
from fireflyer.fs.control import META, ManagerClient
from fireflyer.fs.schema.meta import MAX_UNDER_WAY, Actor, Answer, Call, Calls, ErrorReply, Request
from fireflyer.fs.schema.sessions import KeepSession, OpenSession, Session
from fireflyer.fs.service.meta.requests import is_changing
from fireflyer.identity import Credential
from fireflyer.runtime.rpc import RpcClient

__all__ = ["RawClient"]

LIMIT_S = 100.0
ATTEMPT_NS = 5 * SECOND
KEEP_S = 5.0
PAUSE_S = 0.05


class RawClient:
    """`addresses`: of meta services; requests begin at each in turn, and go on to the next one when it does not
    answer."""

    def __init__(self, managers: Sequence[str], addresses: Sequence[str], credential: Credential) -> None:
        self.client = 0
        self.again = 0
        """Requests that were sent more than once."""
        self._addresses = list(addresses)
        self._credential = credential
        self._managers = ManagerClient(managers, credential)
        self._lines: dict[str, RpcClient] = {}
        self._locks = {address: asyncio.Lock() for address in self._addresses}
        self._number = 0
        self._open: dict[int, None] = {}
        self._moved = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        session = await self._managers.ask(OpenSession(f"nonce {time.monotonic_ns()}"), timeout_ns=60 * SECOND)
        assert isinstance(session, Session)
        self.client = session.client
        self._keeping = asyncio.get_running_loop().create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._keeping is not None
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        for line in self._lines.values():
            await line.close()
        await self._managers.close()

    async def ask(self, request: Request, *, actor: Actor | None = None, number: int | None = None) -> Answer:
        """Its answer, which is no transient error. `number`: not the next one, but this."""
        if number is not None or not is_changing(request):
            return await self._retry(Call(request, number or 0, actor))
        self._number += 1
        mine = self._number
        self._open[mine] = None
        while mine - next(iter(self._open)) >= MAX_UNDER_WAY:
            self._moved.clear()
            await self._moved.wait()
        try:
            return await self._retry(Call(request, mine, actor))
        finally:
            del self._open[mine]
            self._moved.set()

    async def _retry(self, call: Call) -> Answer:
        until_s = time.monotonic() + allowed_s(LIMIT_S)
        turn = call.number
        while True:
            reason: object
            try:
                answer = await self._once(self._addresses[turn % len(self._addresses)], call)
                if not isinstance(answer, ErrorReply) or answer.errno:
                    return answer
                reason = answer
            except TransientError as error:
                reason = error
            assert time.monotonic() < until_s, reason
            self.again += 1
            turn += 1
            await asyncio.sleep(PAUSE_S)

    async def _once(self, address: str, call: Call) -> Answer:
        async with self._locks[address]:
            line = self._lines.get(address)
            if line is None or line.lost is not None:
                if line is not None:
                    await line.close()
                line = self._lines[address] = await RpcClient.connect(address, self._credential, ATTEMPT_NS)
        done_below = min(next(iter(self._open), call.number), call.number) if call.number else 0
        answers = await line.call(META, Calls(self.client, done_below, (call,)), ATTEMPT_NS)
        return answers.answers[0]

    async def _keep(self) -> None:
        while True:
            try:
                await self._managers.ask(KeepSession(self.client))
            except TransientError:
                pass
            await asyncio.sleep(KEEP_S)
