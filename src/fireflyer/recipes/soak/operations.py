"""What each writer does, one operation after the other, by seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from fireflyer.base.units import KIB
from fireflyer.recipes.soak.acknowledged import Noted, Remove, Replace, Write

__all__ = ["DIRECTORY", "WRITERS", "operations"]

DIRECTORY: Final = "/soak"
RECORDS: Final = 48
"""Of each file to which is appended."""
LOGS: Final = 6
"""Files to which was appended, that are kept; the oldest is removed."""
BLOCK: Final = 96 * KIB
BLOCKS: Final = 4
"""Of each file that is overwritten in place: it spans chunks, and blocks begin inside of them."""
FILES: Final = 6
NAMES: Final = 10


def operations(writer: str, seed: int) -> Iterator[Noted]:
    """Without end. `writer`: of `WRITERS`."""
    return WRITERS[writer](random.Random(f"{seed} {writer}"), f"{DIRECTORY}/{writer}")


def _append(rng: random.Random, directory: str) -> Iterator[Noted]:
    """Records of different lengths at the end of files, one file after the other."""
    number = 0
    for log in range(1 << 30):
        offset = 0
        for record in range(RECORDS):
            size = rng.randrange(1, 64 * KIB)
            yield Write(number, f"{directory}/{log:06d}", offset, size, new=record == 0)
            number, offset = number + 1, offset + size
        if log >= LOGS:
            yield Remove(number, f"{directory}/{log - LOGS:06d}")
            number += 1


def _overwrite(rng: random.Random, directory: str) -> Iterator[Noted]:
    """Blocks in place: every replica must give the last one."""
    number = 0
    for file in range(FILES):
        for block in range(BLOCKS):
            yield Write(number, f"{directory}/{file}", block * BLOCK, BLOCK, new=block == 0)
            number += 1
    while True:
        yield Write(number, f"{directory}/{rng.randrange(FILES)}", rng.randrange(BLOCKS) * BLOCK, BLOCK)
        number += 1


def _replace(rng: random.Random, directory: str) -> Iterator[Noted]:
    """Whole files by rename, as checkpoints and configurations are replaced; some are removed."""
    number = 0
    there: set[str] = set()
    while True:
        path = f"{directory}/{rng.randrange(NAMES)}"
        if path in there and rng.random() < 0.2:
            there.remove(path)
            yield Remove(number, path)
        else:
            there.add(path)
            yield Replace(number, path, rng.randrange(1, 192 * KIB))
        number += 1


WRITERS: Final[Mapping[str, Callable[[random.Random, str], Iterator[Noted]]]] = {
    "append": _append,
    "overwrite": _overwrite,
    "replace": _replace,
}
