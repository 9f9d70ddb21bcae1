"""Connections to managers, opened when they are wanted and given up when they break."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar, cast

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.fs.schema.manager import Answer, Request
from fireflyer.fs.schema.meta import Answers, Calls
from fireflyer.runtime.rpc import Credential, Method, RpcClient

__all__ = ["ASK", "MAX_LINES", "META", "ConnectionPool"]

ASK: Final[Method[Request, Answer]] = Method("fs.ask", cast("Any", Request), cast("Any", Answer))
"""Every request to a manager."""
META: Final[Method[Calls, Answers]] = Method("fs.meta", Calls, Answers)
"""Every request to the meta service, at a manager's address or at one of its own (`GetMetaServices`)."""
Req = TypeVar("Req")
Resp = TypeVar("Resp")
MAX_LINES: Final = 64
"""Managers of one cluster, old addresses included."""
CONNECT_NS: Final = 3 * SECOND


class _Connection:
    """To one address. Who comes while somebody else connects waits for that connection."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.client: RpcClient | None = None


class ConnectionPool:
    """Lives in the loop in which it is used first; `close` it."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential
        self._lines: dict[str, _Connection] = {}
        self._closed = False

    async def call(self, address: str, request: Request, timeout_ns: int) -> Answer:
        """The answer of the manager at `address`. Raises what `RpcClient` raises: nothing is tried again here."""
        return await self.call_method(address, ASK, request, timeout_ns)

    async def call_method(self, address: str, method: Method[Req, Resp], request: Req, timeout_ns: int) -> Resp:
        """Like `call`, of another method that is served there."""
        line = self._line(address)
        async with line.lock:
            if line.client is None or line.client.lost is not None:
                await self._drop(line)
                line.client = await RpcClient.connect(address, self._credential, min(timeout_ns, CONNECT_NS))
            client = line.client
        return await client.call(method, request, timeout_ns)

    def _line(self, address: str) -> _Connection:
        if self._closed:
            raise UsageError("these connections to managers are closed")
        if address not in self._lines and len(self._lines) >= MAX_LINES:
            raise UsageError(f"more than {MAX_LINES} manager addresses; give the managers of one cluster")
        return self._lines.setdefault(address, _Connection())

    async def _drop(self, line: _Connection) -> None:
        client, line.client = line.client, None
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """Calls in flight raise `Aborted`. Idempotent."""
        self._closed = True
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            try:
                await self._drop(line)
            except FireflyerError:
                pass
