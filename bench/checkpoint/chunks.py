"""What the chunk client alone does with as many bytes as a checkpoint has: no names, no checksums of tensors, no copy.

Chunks are as large as those of files, and as many bytes are under way as a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from fireflyer.fs.client import ChunkId, Ring

__all__ = ["Chunks"]

_CHUNK_BYTES: Final = 1 << 20
"""What files have by default."""
_IN_FLIGHT_BYTES: Final = 48 << 20
_FIRST_FILE: Final = 1 << 50
"""No inode has such a number yet."""


class Chunks:
    """The bytes of `image`, which is ready memory, as chunks of one file number."""

    def __init__(self, ring: Ring, chains: list[int], image: torch.Tensor) -> None:
        self._ring, self._file = ring, _FIRST_FILE
        data = image.numpy().data
        self._parts = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        self._chains = [chains[index % len(chains)] for index in range(len(self._parts))]

    def next_file(self) -> None:
        """The one before is removed: each write is of new chunks."""
        if self._file > _FIRST_FILE:
            self.remove()
        self._file += 1

    def write(self) -> None:
        self._each(lambda index, chain, chunk: self._ring.prepare_write(index, chain, chunk, self._parts[index]))

    def read(self) -> None:
        self._each(lambda index, chain, chunk: self._ring.prepare_read(index, chain, chunk, self._parts[index]))

    def remove(self) -> None:
        self._each(self._ring.prepare_remove)

    def _each(self, prepare: Callable[[int, int, ChunkId], Any]) -> None:
        for index, chain in enumerate(self._chains):
            while self._ring.under_way * _CHUNK_BYTES >= _IN_FLIGHT_BYTES:
                self._end(1)
            prepare(index, chain, ChunkId(self._file, index))
            self._ring.submit()
        while self._ring.under_way:
            self._end(self._ring.under_way)

    def _end(self, least: int) -> None:
        for error in self._ring.wait(least).errors.values():
            raise error
