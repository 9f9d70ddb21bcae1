"""What is fetched before it is asked for, where a file is read from front to back.

    due(offset, size, length) ──> Blocks to fetch now ──came──> find(offset) ──> who reads copies from them

A reader is sequential when a read begins where the last one has ended. From the second such read on (a large one at the
beginning of the file counts at once) blocks behind it are fetched: twice as much as it has read in a row, up to `limit`
bytes. A read elsewhere ends that, and blocks that the reader has passed are dropped. `forget` is for ranges that were
written or cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["MAX_BLOCK_BYTES", "Block", "ReadAhead", "block_of"]

MAX_BLOCK_BYTES: Final = 1 << 20
LARGE_BYTES: Final = 128 << 10
"""Who begins with such a read will go on."""


def block_of(chunk_bytes: int) -> int:
    return min(chunk_bytes, MAX_BLOCK_BYTES)


@dataclass(slots=True, eq=False)
class Block:
    """Bytes [begin, end). The shell keeps in `memory` where they come to, and in `future` that they do."""

    begin: int
    end: int
    memory: Any = None
    future: Any = None
    users: int = 0
    """Who are about to copy from it."""
    dropped: bool = False


@dataclass(slots=True)
class ReadAhead:
    """Of one open file. A block ends at a multiple of `block`, or where the file ends."""

    block: int
    limit: int
    blocks: dict[int, Block] = field(default_factory=dict)
    """By the number of the multiple in which they are."""
    _next: int = 0
    """Where a sequential reader goes on."""
    _row: int = 0
    """Bytes that were read in a row."""

    def due(self, offset: int, size: int, length: int) -> tuple[list[Block], list[Block]]:
        """Of a read of [offset, offset + size) of a file with `length` bytes: what is to be fetched now, and what is of
        no more use once this read is done."""
        sequential = offset == self._next
        first = not sequential or not self._row
        self._row = self._row + size if sequential else 0
        self._next = offset + size
        if not sequential:
            return [], self._drop([one for one in self.blocks.values() if not one.begin <= self._next < one.end])
        passed = self._drop([one for one in self.blocks.values() if one.end <= self._next])
        if first and size < LARGE_BYTES:
            return [], passed
        reach = min(length, self._next + min(self.limit, 2 * self._row))
        fetch, begin = [], self._next
        while begin < reach:
            number = begin // self.block
            end = min((number + 1) * self.block, length)
            if number not in self.blocks:
                self.blocks[number] = Block(begin, end)
                fetch.append(self.blocks[number])
            begin = end
        return fetch, passed

    def find(self, offset: int, passed: list[Block]) -> Block | None:
        """The block that has the byte at `offset`, also among those that `due` has just given up."""
        one = self.blocks.get(offset // self.block)
        if one is not None and one.begin <= offset < one.end:
            return one
        return next((each for each in passed if each.begin <= offset < each.end), None)

    def forget(self, begin: int, end: int) -> list[Block]:
        """Blocks with bytes of this range, which are others now."""
        return self._drop([one for one in self.blocks.values() if one.begin < end and begin < one.end])

    def _drop(self, some: list[Block]) -> list[Block]:
        for one in some:
            del self.blocks[one.begin // self.block]
        return some
