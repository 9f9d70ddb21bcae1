"""Which managers the platform has, as each says it of itself in the store.

    PU + name of a manager    where people and programs of tasks reach it, and when it said so

A run that outlives its manager asks the others, so it is told of all of them. What was not said again for `FORGET_S` is
forgotten: that manager is gone for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Final

import msgspec

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.schema.sync import MAX_MANAGER_URLS
from fireflyer.kvstore import Engine, Transaction, prefix_range
from fireflyer.kvstore.core.rows import decode_row, encode_row

__all__ = ["KnownManagers", "ManagerRow"]

_log = logging.getLogger(__name__)
PREFIX: Final = b"PU"
LOOK_S: Final = 5.0
SAY_S: Final = 3600
FORGET_S: Final = 7 * 24 * 3600


class ManagerRow(msgspec.Struct, frozen=True, kw_only=True):
    url: Annotated[str, msgspec.Meta(max_length=1024)]
    """`URL`, or `URL#FINGERPRINT` of its certificate."""
    said_s: int


class KnownManagers:
    """Lives in the loop of its engine."""

    def __init__(self, engine: Engine, name: str, url: str, configured: tuple[str, ...]) -> None:
        """`configured`: what is told instead, where it is not empty."""
        self._engine = engine
        self._name = name
        self._url = url
        self._configured = configured
        self._others: tuple[str, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """This one first; as `LaunchOrder` has them."""
        return self._configured or (self._url, *self._others)[:MAX_MANAGER_URLS]

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.refresh(int(time.time()))
            except FireflyerError as error:
                _log.warning("the other managers cannot be read reason=%s", error)
            await asyncio.sleep(LOOK_S)

    async def refresh(self, now_s: int) -> None:
        """Says where this one is if need be, and reads where the others are. Raises what the store raises, and
        `DataCorruption`."""
        mine = PREFIX + self._name.encode()

        async def body(rows: Transaction) -> list[str]:
            page = await rows.get_range(*prefix_range(PREFIX))
            found = {key: decode_row(key, value, ManagerRow) for key, value in page.items}
            for key, row in found.items():
                if row.said_s < now_s - FORGET_S and key != mine:
                    rows.clear(key)
            own = found.pop(mine, None)
            if own is None or own.url != self._url or own.said_s < now_s - SAY_S:
                rows.set(mine, encode_row(ManagerRow(url=self._url, said_s=now_s)))
            return [row.url for row in found.values() if row.said_s >= now_s - FORGET_S and row.url != self._url]

        self._others = tuple(dict.fromkeys(await self._engine.transact(body)))
