"""A data connection of the chunk store in plain Python: the frames of `storage/wire/wire.hpp`, written again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from dataclasses import dataclass
from typing import Final, TypeVar

from fireflyer.base.errors import DataCorruption, Unreachable
from fireflyer.base.units import KIB, SECOND
from fireflyer.fs.schema import data
from fireflyer.identity.handshake import Credential
from fireflyer.native import crc32c
from fireflyer.runtime.raw_connections import connect_raw

__all__ = ["DataConnection", "ReadAnswer", "frame"]

READS, READ_REPLY, MESSAGE = 1, 2, 3
FOUND, MISSING, NOT_COMMITTED, STALE, DAMAGED, DENIED = range(1, 7)
_MAGIC: Final = 0x31434646
_PREFIX: Final = struct.Struct("<IIHHIII")
_READ: Final = struct.Struct("<QQIIIIII")
_REPLY: Final = struct.Struct("<QQQIIII")
_GRANULE: Final = 4 * KIB
_T = TypeVar("_T")


def frame(kind: int, body: bytes, payload: bytes = b"", *, payload_bytes: int | None = None) -> bytes:
    """`payload_bytes`: what the frame claims."""
    announced = len(payload) if payload_bytes is None else payload_bytes
    rest = struct.pack("<HHIII", kind, 0, len(body), announced, 0)
    return struct.pack("<II", _MAGIC, crc32c(body, crc32c(rest))) + rest + body + payload


@dataclass(frozen=True)
class ReadAnswer:
    status: int
    chain_version: int
    where: int
    data: bytes


class DataConnection:
    """One task reads; answers find who asked by their numbers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[data.DataReply]] = {}
        self._reading: dict[int, tuple[int, asyncio.Future[ReadAnswer]]] = {}
        self.others: asyncio.Queue[data.Message] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._receive())

    @classmethod
    async def connect(cls, address: str, credential: Credential) -> DataConnection:
        connection = await connect_raw(address, credential, purpose=data.PURPOSE, timeout_ns=2 * SECOND)
        return cls(*await asyncio.open_connection(sock=connection.socket))

    @property
    def lost(self) -> bool:
        return self._task.done()

    def send(self, sent: bytes) -> None:
        """Raises `Unreachable` when the connection has ended."""
        # A write that failed closes the transport before the reading task has run and knows of it.
        if self._writer.is_closing():
            raise Unreachable("the connection ended")
        self._writer.write(sent)

    async def ask(self, body: object, payload: bytes = b"", *, timeout_s: float = 5.0) -> object:
        """What is told about it. Raises `Unreachable` when the connection ends, `TimeoutError`."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(frame(MESSAGE, data.encode(data.DataRequest(number, body)), payload))  # type: ignore[arg-type]
            return (await self._answered(answer, timeout_s)).body
        finally:
            del self._asked[number]

    async def read(
        self, chain: int, chain_version: int, file: int, index: int, offset: int, length: int, *, timeout_s: float = 5.0
    ) -> ReadAnswer:
        number = next(self._numbers)
        answer: asyncio.Future[ReadAnswer] = asyncio.get_running_loop().create_future()
        self._reading[number] = (offset, answer)
        try:
            self.send(frame(READS, _READ.pack(number, file, index, chain, chain_version, offset, length, 0)))
            return await self._answered(answer, timeout_s)
        finally:
            del self._reading[number]

    async def _answered(self, answer: asyncio.Future[_T], timeout_s: float) -> _T:
        ended = self._task.add_done_callback
        ended(lambda _: None if answer.done() else answer.set_exception(Unreachable("the connection ended")))
        async with asyncio.timeout(timeout_s):
            return await answer

    async def closed(self) -> None:
        """Waits until the other end closes it."""
        await asyncio.wait([self._task])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _receive(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                prefix = await self._reader.readexactly(_PREFIX.size)
                magic, crc, kind, _, body_bytes, payload_bytes, _ = _PREFIX.unpack(prefix)
                body = await self._reader.readexactly(body_bytes)
                payload = await self._reader.readexactly(payload_bytes)
                if magic != _MAGIC or crc32c(body, crc32c(prefix[8:])) != crc:
                    raise DataCorruption("the node sent a frame with a wrong checksum")
                self._take(kind, body, payload)

    def _take(self, kind: int, body: bytes, payload: bytes) -> None:
        if kind == READ_REPLY:
            number, _, where, _, chain_version, status, _ = _REPLY.unpack_from(body)
            if number in self._reading:
                offset, answer = self._reading[number]
                sums = struct.unpack_from(f"<{(len(body) - _REPLY.size) // 4}I", body, _REPLY.size)
                if not answer.done():
                    answer.set_result(_verified(ReadAnswer(status, chain_version, where, payload), offset, sums))
            return
        message = data.decode(body)
        if isinstance(message, data.DataReply):
            asked = self._asked.get(message.number)
            if asked is not None and not asked.done():
                asked.set_result(message)
        else:
            self.others.put_nowait(message)


def _verified(answer: ReadAnswer, offset: int, sums: tuple[int, ...]) -> ReadAnswer:
    at = 0
    for crc in sums:
        end = min(len(answer.data), at + _GRANULE - (offset + at) % _GRANULE)
        if crc32c(answer.data[at:end]) != crc:
            raise DataCorruption("what was read does not match its checksum")
        at = end
    if at != len(answer.data):
        raise DataCorruption("some of what was read has no checksum")
    return answer
