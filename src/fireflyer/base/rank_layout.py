"""Which ranks are on which node. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, groupby

__all__ = ["RankLayout", "counts_text"]


class RankLayout:
    """The ranks of an attempt: those of node 0 first, then those of node 1, and so on; never empty.

    >>> layout = RankLayout([3, 1])
    >>> layout.world_size, layout.node_of(2), layout.node_of(3), list(layout.ranks(1)), str(layout)
    (4, 0, 1, [3], '3,1')
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self.counts = tuple(counts)
        """Ranks of each node."""
        self._firsts = (0, *accumulate(self.counts))

    @property
    def nodes(self) -> int:
        return len(self.counts)

    @property
    def world_size(self) -> int:
        return self._firsts[-1]

    @property
    def even(self) -> bool:
        """All nodes have as many."""
        return len(set(self.counts)) == 1

    def ranks(self, node: int) -> range:
        return range(self._firsts[node], self._firsts[node + 1])

    def node_of(self, rank: int) -> int:
        """`rank` is from 0 to `world_size` - 1."""
        return bisect_right(self._firsts, rank) - 1

    def local_rank(self, rank: int) -> int:
        return rank - self._firsts[self.node_of(rank)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankLayout) and self.counts == other.counts

    def __hash__(self) -> int:
        return hash(self.counts)

    def __str__(self) -> str:
        return counts_text(self.counts)


def counts_text(counts: Iterable[int]) -> str:
    """
    >>> counts_text([8, 8, 8, 4])
    '8(x3),4'
    """
    runs = ((count, len(list(same))) for count, same in groupby(counts))
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
