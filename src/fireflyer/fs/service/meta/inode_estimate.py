"""About how many inodes there are, out of a few looks at the store: for `df -i`, which is asked often."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from fireflyer.fs.core.meta.tables import INODES, number_key, prefix_end
from fireflyer.kvstore import Engine, Reader

__all__ = ["about_inodes"]

PLACES: Final = 64
"""Where it is looked how many of the numbers given out are in use."""
MAX_LOOKS: Final = 512
LOOKED_AT: Final = 32
"""Rows at each end of a place."""


async def about_inodes(engine: Engine) -> int:
    """How many there are: exact while few were ever made. Numbers were given one after the other, so their range is
    divided into places, and between the rows at both ends of each as many are taken to be in use as there; where the
    ends differ it is divided once more. Raises what the store raises."""
    last = await engine.read(lambda reader: reader.get_range(INODES, prefix_end(INODES), limit=1, reverse=True))
    if not last.items:
        return 0
    highest = _number(last.items[0][0])
    width = max(2 * LOOKED_AT, highest // PLACES + 1)
    places = deque((begin, begin + width) for begin in range(0, highest + 1, width))
    inodes = looks = 0
    while places:
        begin, end = places.popleft()
        first, last_ones = await _ends(engine, begin, end)
        looks += 1
        if not first or first[-1] >= last_ones[0]:
            inodes += len(dict.fromkeys(first + last_ones))
            continue
        densities = sorted(len(ones) / (ones[-1] - ones[0] + 1) for ones in (first, last_ones))
        if densities[1] > 2 * densities[0] and looks + len(places) < MAX_LOOKS:
            middle = (first[-1] + last_ones[0] + 1) // 2
            places += [(begin, middle), (middle, end)]
            continue
        between = last_ones[0] - first[-1] - 1
        inodes += len(first) + len(last_ones) + round(sum(densities) / 2 * between)
        await asyncio.sleep(0)
    return inodes


async def _ends(engine: Engine, begin: int, end: int) -> tuple[list[int], list[int]]:
    """The first and the last inodes of numbers [begin, end), ascending."""
    wanted = number_key(INODES, begin), number_key(INODES, end)

    async def look(reader: Reader) -> list[list[int]]:
        pages = [await reader.get_range(*wanted, limit=LOOKED_AT, reverse=back) for back in (False, True)]
        return [[_number(key) for key, _ in page.items] for page in pages]

    first, last = await engine.read(look)
    return first, last[::-1]


def _number(key: bytes) -> int:
    return int.from_bytes(key[2:], "big")
