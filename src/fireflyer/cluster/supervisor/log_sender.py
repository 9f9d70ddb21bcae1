"""Rank logs of a machine that does not share the run directory: sent to the launcher byte for byte.

It has the methods of `LogWriter`. What waits is bounded: above `HIGH_BYTES` the readers of the ranks' pipes stop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.wire import LOG, MAX_LOG_BYTES, LogBytes
from fireflyer.runtime.log_writer import HIGH_BYTES, LOW_BYTES
from fireflyer.runtime.rpc import RpcClient

__all__ = ["LogSender"]

_CALL_NS = 24 * 3600 * SECOND


class LogSender:
    def __init__(self, client: RpcClient, *, full: Callable[[], None], free: Callable[[], None]) -> None:
        self._client = client
        self._full, self._free = full, free
        self._queue: deque[LogBytes] = deque()
        self._waiting_bytes = 0
        self._is_full = False
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, path: str) -> str:
        """The name of the file in the launcher's directory of logs."""
        return path.lstrip("/")

    def write(self, file: str, data: bytes) -> None:
        for start in range(0, len(data), MAX_LOG_BYTES):
            self._queue.append(LogBytes(file, data[start : start + MAX_LOG_BYTES]))
        self._waiting_bytes += len(data)
        self._filled.set()
        self._empty.clear()
        if self._waiting_bytes > HIGH_BYTES and not self._is_full:
            self._is_full = True
            self._full()

    def close(self, _file: str) -> None:
        pass

    async def run(self) -> None:
        """Sends until cancelled; ends with the error of the connection."""
        while True:
            await self._filled.wait()
            while self._queue:
                piece = self._queue[0]
                await self._client.call(LOG, piece, _CALL_NS)
                self._queue.popleft()
                self._waiting_bytes -= len(piece.data)
                if self._is_full and self._waiting_bytes < LOW_BYTES:
                    self._is_full = False
                    self._free()
            self._filled.clear()
            self._empty.set()

    async def drained(self) -> None:
        """Waits until the launcher has all that was written before."""
        await self._empty.wait()

    def stop(self) -> None:
        pass
