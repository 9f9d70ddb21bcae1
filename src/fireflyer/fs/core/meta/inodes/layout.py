"""Where the bytes of a file are: which chain has chunk `i`, which chunks a range touches, how long a file may be.

Clients, the meta service and `fsck` all compute this, now and in every later release, so it is specified here:

- *SplitMix64* (Steele, Lea, Flood 2014) with the layout's seed as its first state gives 64-bit numbers.
- The *order* is a table's chains after the first `stripe` steps of a Fisher-Yates shuffle: step k (from 0) exchanges
  place k with place k + number mod (chains - k).
- Chunk i is on chain `order[i mod stripe]`.

Libraries' shuffles have changed between releases; this one has golden values in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.schema.ids import ChainId
from fireflyer.fs.schema.inodes import MAX_FILE_BYTES, MAX_STRIPE, Defaults, InodeId, Layout

__all__ = ["MAX_CHUNKS", "Piece", "SplitMix64", "chain_of", "end_at", "max_bytes"]
__all__ += ["new_layout", "order_of", "pieces"]

MAX_CHUNKS: Final = 1 << 32
"""Of one file: an index has 32 bits."""
_MASK: Final = (1 << 64) - 1


class SplitMix64:
    """The numbers that a seed gives."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next(self) -> int:
        """0 <= n < 2^64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)


class Piece(NamedTuple):
    """The part of a range that is in one chunk: bytes [offset, offset + size) of the chunk with index `chunk`."""

    chunk: int
    offset: int
    size: int


def new_layout(context: Context, defaults: Defaults, inode: InodeId) -> Layout:
    """Of a new file in a directory with these defaults. The seed is the inode's number: files are spread, and a layout
    can be found again."""
    cluster = context.cluster
    stripe = min(defaults.stripe or cluster.stripe, cluster.chains, MAX_STRIPE)
    return Layout(cluster.table, defaults.chunk_bytes or cluster.chunk_bytes, max(stripe, 1), inode)


def order_of(layout: Layout, chains: Sequence[ChainId]) -> tuple[ChainId, ...]:
    """The `stripe` chains of the file, of the table's `chains` in the table's order. Keep it while the file is open: it
    takes time in proportion to the stripe. Raises `DataCorruption` if the table has fewer."""
    count = len(chains)
    if layout.stripe > count:
        raise DataCorruption(f"stripe of {layout.stripe} chains, but chain table {layout.table} has {count}")
    numbers = SplitMix64(layout.seed)
    moved: dict[int, ChainId] = {}  # places that differ from the table
    order = []
    for place in range(layout.stripe):
        other = place + numbers.next() % (count - place)
        order.append(moved.get(other, chains[other]))
        moved[other] = moved.get(place, chains[place])
    return tuple(order)


def chain_of(order: Sequence[ChainId], index: int) -> ChainId:
    return order[index % len(order)]


def max_bytes(layout: Layout) -> int:
    """How long such a file can be."""
    return min(MAX_FILE_BYTES, layout.chunk_bytes * MAX_CHUNKS)


def end_at(layout: Layout, index: int, chunk_length: int) -> int:
    """Where the file ends if this is the last of its bytes."""
    return index * layout.chunk_bytes + chunk_length


def pieces(layout: Layout, offset: int, size: int) -> Iterator[Piece]:
    """Bytes [offset, offset + size) of the file, chunk by chunk."""
    end = offset + size
    while offset < end:
        index, within = divmod(offset, layout.chunk_bytes)
        count = min(layout.chunk_bytes - within, end - offset)
        yield Piece(index, within, count)
        offset += count
