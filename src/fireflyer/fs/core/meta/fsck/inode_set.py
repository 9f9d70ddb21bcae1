"""Which of very many inode numbers there are: two bytes for each, and less where they are dense.

Numbers of files that live are given out one after the other, in batches; a Python set takes 60 to 90 bytes for each.
Here numbers that agree in all but their last 16 bits share a block: a sorted array of those bits, which becomes a
bitmap of 8 KiB when that is smaller.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

from fireflyer.fs.schema.inodes import InodeId

__all__ = ["InodeSet"]

_BITS: Final = 16
_BITMAP_BYTES: Final = (1 << _BITS) // 8
_MOST_SORTED: Final = _BITMAP_BYTES // 2
"""With more of them a bitmap is smaller."""


class InodeSet:
    """A set that only grows."""

    def __init__(self) -> None:
        self._blocks: dict[int, array[int] | bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: InodeId) -> bool:
        block, low = self._blocks.get(number >> _BITS), number & ((1 << _BITS) - 1)
        if block is None:
            return False
        if isinstance(block, bytearray):
            return bool(block[low >> 3] & (1 << (low & 7)))
        at = bisect_left(block, low)
        return at < len(block) and block[at] == low

    def add(self, number: InodeId) -> bool:
        """Whether it was not there."""
        if number in self:
            return False
        self._count += 1
        low = number & ((1 << _BITS) - 1)
        block = self._blocks.setdefault(number >> _BITS, array("H"))
        if isinstance(block, bytearray):
            block[low >> 3] |= 1 << (low & 7)
        elif len(block) < _MOST_SORTED:
            block.insert(bisect_left(block, low), low)
        else:
            self._blocks[number >> _BITS] = bitmap = bytearray(_BITMAP_BYTES)
            for one in (*block, low):
                bitmap[one >> 3] |= 1 << (one & 7)
        return True
