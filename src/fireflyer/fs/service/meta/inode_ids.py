"""Numbers of new inodes, taken from the store in batches. What a process has not used when it ends is never used."""

from __future__ import annotations

import asyncio
from typing import Final

from fireflyer.base.errors import Busy, DataCorruption
from fireflyer.fs.schema.inodes import ROOT, InodeId
from fireflyer.kvstore import Engine, Transaction

__all__ = ["BATCH", "KEY", "Ids", "skipped"]

BATCH: Final = 4096
PER_WORK: Final = 4
"""Ids that one request takes at most: a file, and the directories of a trash that is made for another."""
KEY: Final = b"FXid"
_FORMAT: Final = b"\x01"


class Ids:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = self._end = 0
        self._reserve: list[tuple[int, int]] = []
        self._lock = asyncio.Lock()

    @property
    def left(self) -> int:
        return self._end - self._next + sum(end - first for first, end in self._reserve)

    async def prepare(self, works: int) -> None:
        """So many requests may be carried out then, unless others take the ids first."""
        while self.left < (works + 1) * PER_WORK:
            async with self._lock:
                if self.left < (works + 1) * PER_WORK:
                    first = await self._engine.transact(_taken, idempotent=True)
                    self._reserve.append((first, first + BATCH))

    def take(self) -> InodeId:
        """Also for work that is dropped: then it is nobody's. Raises `Busy`: the request is to come again."""
        if self._next == self._end:
            if not self._reserve:
                # Lanes that run at the same time, and attempts after a conflict, take what others were promised.
                raise Busy("no inode number is available at the moment; try again")
            self._next, self._end = self._reserve.pop(0)
        self._next += 1
        return self._next - 1


async def _taken(transaction: Transaction) -> int:
    first = _decoded(await transaction.get(KEY))
    transaction.set(KEY, _encoded(first + BATCH))
    return first


def skipped(row: bytes | None, first: int) -> bytes:
    """The row in whose place ids go on at `first`, or where they are if that is further on."""
    return _encoded(max(_decoded(row), first))


def _decoded(row: bytes | None) -> int:
    if row is not None and (len(row) != 9 or row[:1] != _FORMAT):
        raise DataCorruption("the row of the last inode number is damaged; restore the store from a backup")
    return ROOT + 1 if row is None else int.from_bytes(row[1:], "big")


def _encoded(first: int) -> bytes:
    return _FORMAT + first.to_bytes(8, "big")
