"""Where files are served: a row of each service, which it changes while it lives.

    FXms + name      `ServiceRow`: address, and a number that goes on with each heartbeat

Clocks of two machines cannot be compared, so nobody writes down a time: who is asked remembers when each row was last
seen to change, by its own clock. One that has not changed for `SILENT_NS` is dead as far as clients are concerned; when
it has not for `REMOVE_NS` its row is removed, by whoever notices.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import DataCorruption, FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.kvstore import Engine, Reader, Transaction, prefix_range

__all__ = ["HEARTBEAT_S", "LiveServices", "Registration", "ServiceRow"]

_log = logging.getLogger(__name__)
PREFIX: Final = b"FXms"
HEARTBEAT_S: Final = 1.0
SILENT_NS: Final = 4 * SECOND
REMOVE_NS: Final = 60 * SECOND
MAX_SERVICES: Final = 1024
_FORMAT: Final = b"\x01"


class ServiceRow(msgspec.Struct, frozen=True, array_like=True):
    address: str
    heartbeat: int
    manager: bool
    """It is a manager's process: managers are asked there too."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(ServiceRow)


class Registration:
    """Of one process."""

    def __init__(self, engine: Engine, name: str, address: str, *, manager: bool) -> None:
        self._engine = engine
        self._key = PREFIX + f"{name}/{secrets.token_hex(8)}".encode()
        self._address = address
        self._manager = manager
        self._heartbeat = 0

    async def heartbeat(self) -> None:
        """Raises what the store raises."""
        self._heartbeat += 1
        await self._write(_FORMAT + _encoder.encode(ServiceRow(self._address, self._heartbeat, self._manager)))

    async def keep(self) -> None:
        """Until it is cancelled; then the row is removed, if the store can be reached."""
        try:
            while True:
                try:
                    await self.heartbeat()
                except FireflyerError as error:
                    _log.warning("writing the heartbeat of this meta service failed reason=%s", error)
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._write(None)
            except (FireflyerError, TimeoutError):
                pass

    async def _write(self, row: bytes | None) -> None:
        async def body(transaction: Transaction) -> None:
            if row is None:
                transaction.clear(self._key)
            else:
                transaction.set(self._key, row)

        await self._engine.transact(body, timeout_ns=SILENT_NS, idempotent=True)


class LiveServices:
    """What one process has seen of the rows."""

    def __init__(self, engine: Engine, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._engine = engine
        self._now_ns = now_ns
        self._seen: dict[bytes, tuple[ServiceRow, int]] = {}
        """The row, and when it was seen for the first time."""

    async def services(self) -> list[ServiceRow]:
        """Those that live, by address. Rows that nobody has seen yet count as new. Raises what the store raises."""
        found = await self._engine.read(_rows)
        now_ns = self._now_ns()
        for key in [key for key in self._seen if key not in found]:
            del self._seen[key]
        for key, row in found.items():
            if key not in self._seen or self._seen[key][0] != row:
                self._seen[key] = row, now_ns
        for key, (row, seen_ns) in list(self._seen.items()):
            if now_ns - seen_ns > REMOVE_NS:
                await self._remove(key, row)
        alive = {row.address: row for row, seen_ns in self._seen.values() if now_ns - seen_ns <= SILENT_NS}
        return [alive[address] for address in sorted(alive)]

    async def _remove(self, key: bytes, row: ServiceRow) -> None:
        async def body(transaction: Transaction) -> None:
            if await transaction.get(key) == _FORMAT + _encoder.encode(row):
                transaction.clear(key)

        await self._engine.transact(body, idempotent=True)


async def _rows(reader: Reader) -> dict[bytes, ServiceRow]:
    page = await reader.get_range(*prefix_range(PREFIX), limit=MAX_SERVICES)
    return {key: _decoded(key, value) for key, value in page.items}


def _decoded(key: bytes, value: bytes) -> ServiceRow:
    try:
        if value[:1] == _FORMAT:
            return _decoder.decode(value[1:])
    except DECODE_ERRORS:
        pass
    raise DataCorruption(f"row {key.hex()} of the meta services is damaged; restore the store from a backup")
