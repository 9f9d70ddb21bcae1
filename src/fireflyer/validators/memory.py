"""Writes patterns to memory and reads them back, as much as can be done in a given time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.units import MIB
from fireflyer.validators.core.evidence import MemoryTest

__all__ = ["BLOCK_BYTES", "Block", "write_and_read_memory"]

BLOCK_BYTES: Final = 32 * MIB
"""Beyond what most caches hold."""
Block = NDArray[np.uint64]
_CONSTANTS: Final = (0, 0xFFFFFFFFFFFFFFFF, 0x5555555555555555, 0xAAAAAAAAAAAAAAAA)
_WORDS_OF_A_PAGE: Final = 512
_STEP: Final = 16
"""Across pages every 16th word is written: all of them would take most of the time."""
_MIX: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


def write_and_read_memory(
    share_bytes: int, limit_s: float, *, block_bytes: int = BLOCK_BYTES, disturb: Callable[[Block], None] | None = None
) -> MemoryTest:
    """Holds up to `share_bytes` until the end. `disturb` is called between each write and its read: for tests."""
    ends_s = time.monotonic() + limit_s
    words = block_bytes // 8 // _WORDS_OF_A_PAGE * _WORDS_OF_A_PAGE
    blocks: list[Block] = []
    comparison = _Comparison()
    between = disturb if disturb is not None else _nothing
    while (len(blocks) + 1) * words * 8 <= share_bytes and (not blocks or time.monotonic() < ends_s):
        blocks.append(np.empty(words, np.uint64))
        _write_and_read(blocks[-1], len(blocks), comparison, between)
    for number, block in enumerate(blocks, 1):  # once more when all are written, so that no cache has them
        comparison.compare(block, _addresses(words, number), "addresses, later")
    return MemoryTest(tested_bytes=len(blocks) * words * 8, wrong_words=comparison.wrong, first=comparison.first)


def _write_and_read(block: Block, number: int, comparison: _Comparison, between: Callable[[Block], None]) -> None:
    for constant in _CONSTANTS:
        block[...] = np.uint64(constant)
        between(block)
        comparison.compare(block, np.uint64(constant), f"{constant:016x}")
    pages = block.reshape(-1, _WORDS_OF_A_PAGE)
    columns = range(0, _WORDS_OF_A_PAGE, _STEP)
    for column in columns:  # the same word of all pages, then the next one
        pages[:, column] = np.uint64(column * _MIX & _WORD)
    between(block)
    for column in columns:
        comparison.compare(pages[:, column], np.uint64(column * _MIX & _WORD), "words across pages")
    expected = _addresses(len(block), number)
    block[...] = expected
    between(block)
    comparison.compare(block[::-1], expected[::-1], "addresses, backwards")


class _Comparison:
    def __init__(self) -> None:
        self.wrong = 0
        self.first = ""

    def compare(self, found: Block, expected: Block | np.uint64, pattern: str) -> None:
        different = found != expected
        count = int(np.count_nonzero(different))
        if count and not self.first:
            at = int(np.argmax(different))
            bits = int(found[at]) ^ int(np.broadcast_to(expected, found.shape)[at])
            self.first = f"with pattern {pattern}, in bits {bits:016x}"
        self.wrong += count


def _addresses(words: int, number: int) -> Block:
    """Another value in each word, so that a write to a wrong address is seen."""
    return np.arange(number * words, (number + 1) * words, dtype=np.uint64) * np.uint64(_MIX)


def _nothing(_block: Block) -> None:
    pass
