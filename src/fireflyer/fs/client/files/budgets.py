"""Memory that all open files of a client share, with a limit in bytes for each kind.

`WriteBudget` counts what was written and is not at the storage nodes; a write that would exceed it waits.
`ReadAheadBudget` holds the blocks that were fetched ahead; a block that would exceed it is not fetched.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Final, Protocol

from fireflyer.base.errors import FireflyerError
from fireflyer.fs.client.futures import ClientFuture
from fireflyer.fs.core.files.readahead import MAX_BLOCK_BYTES, Block
from fireflyer.fs.core.files.write_behind import Extent, WriteBehindBuffer

__all__ = ["ReadAheadBudget", "WriteBudget", "Writer"]

MAX_EXTENTS: Final = 1024
"""Of one file that are not at the storage nodes."""
_OF_ONE: Final = 0.75
"""Of the limit, what one file may have."""


class Writer(Protocol):
    """What was written to one file: `client.files.open_inode.OpenInode`."""

    pending: WriteBehindBuffer
    in_flight: dict[Extent, ClientFuture[None]]
    """Extents that are on their way to the storage nodes."""

    def begin(self, *, everything: bool) -> None:
        """Sends what is ready, or all."""


class WriteBudget:
    """`writers`: a view of all that share the budget, in the order in which they came; it changes as they come and
    go."""

    def __init__(self, limit_bytes: int, writers: Iterable[Writer]) -> None:
        self.dirty_bytes = 0
        """Written here, and not at the storage nodes."""
        self._limit_bytes = limit_bytes
        self._writers = writers
        self._buffers: dict[int, list[bytearray]] = {}

    def buffers(self, unit: int) -> list[bytearray]:
        """Memory for units of this size, to be used again."""
        return self._buffers.setdefault(unit, [])

    async def room(self, size: int, writer: Writer) -> None:
        """Waits until so much may be written. One file leaves room for others: its chains may be away."""
        while (
            self.dirty_bytes + size > self._limit_bytes
            or writer.pending.waiting_bytes + size > max(size, int(self._limit_bytes * _OF_ONE))
            or len(writer.pending.extents) >= MAX_EXTENTS
        ):
            writer.begin(everything=True)
            in_flight = _oldest([writer]) or _oldest(self._writers)
            if in_flight is None:
                for other in list(self._writers):
                    other.begin(everything=True)
                in_flight = _oldest(self._writers)
                if in_flight is None:
                    return
            try:
                await in_flight
            except FireflyerError:
                pass  # the file that it belongs to says so

    def use_again(self, pending: WriteBehindBuffer, extent: Extent, view: memoryview) -> None:
        """The memory of what is at the storage nodes."""
        data, most = extent.data, self._limit_bytes // pending.unit
        if isinstance(data, memoryview) or len(data) != pending.unit or len(pending.buffers) >= most:
            return
        try:
            view.release()
        except BufferError:
            return  # an attempt that was given up is still on its way
        pending.buffers.append(data)


def _oldest(writers: Iterable[Writer]) -> ClientFuture[None] | None:
    return next((future for writer in writers for future in writer.in_flight.values()), None)


class ReadAheadBudget:
    """`limit_bytes` of blocks that were fetched ahead, for all files together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free: collections.deque[memoryview] = collections.deque()
        self._lent = 0

    def lend(self, block: Block) -> bool:
        """Memory for it; False: there is none now."""
        if (self._lent + 1) * MAX_BLOCK_BYTES > self._limit_bytes:
            return False
        self._lent += 1
        block.memory = self._free.pop() if self._free else memoryview(bytearray(MAX_BLOCK_BYTES))
        return True

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Blocks that nobody will look for any more."""
        for block in blocks:
            block.dropped = True
            if block.users or block.memory is None:
                continue
            if block.future is not None:
                block.future.give_up()
            self._free.append(block.memory)
            block.memory = None
            self._lent -= 1
