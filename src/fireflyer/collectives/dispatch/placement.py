"""Which rank computes which expert, and which ranks share a node. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import UsageError

__all__ = ["MAX_EXPERTS", "ExpertPlacement"]

MAX_EXPERTS: Final = 1 << 20
Numbers = npt.NDArray[np.int64]


class ExpertPlacement:
    """Immutable. Each expert is on one rank; nodes have equally many ranks, in ascending order."""

    def __init__(self, rank_of_expert: Sequence[int], node_of_rank: Sequence[int]) -> None:
        """Raises `UsageError` for ranks that are not there, and nodes of unequal size."""
        ranks = len(node_of_rank)
        if not 1 <= len(rank_of_expert) <= MAX_EXPERTS:
            raise UsageError(f"{len(rank_of_expert)} experts; a placement has 1 to {MAX_EXPERTS}")
        wrong = [rank for rank in rank_of_expert if not 0 <= rank < ranks]
        if wrong:
            raise UsageError(f"an expert is placed on rank {wrong[0]}, but the group has ranks 0 to {ranks - 1}")
        self.rank_of_expert: Numbers = _frozen(rank_of_expert)
        self.node_of_rank: Numbers = _frozen(node_of_rank)
        self.ranks = ranks
        self.experts = len(rank_of_expert)
        names, sizes = np.unique(self.node_of_rank, return_counts=True)
        if names.tolist() != list(range(names.size)) or np.unique(sizes).size != 1:
            raise UsageError(
                f"nodes have {sizes.tolist()} ranks; dispatch in two hops needs equally many on nodes 0, 1, ..., so "
                "give the group whole nodes"
            )
        self.nodes = int(names.size)
        self.ranks_per_node = int(sizes[0])
        self.ranks_of_node: Numbers = _frozen(np.argsort(self.node_of_rank, kind="stable")).reshape(self.nodes, -1)
        """[node, number within the node]"""
        self.node_of_expert: Numbers = _frozen(self.node_of_rank[self.rank_of_expert])

    @classmethod
    def even(cls, experts: int, node_of_rank: Sequence[int]) -> ExpertPlacement:
        """Consecutive experts on ranks in ascending order. Raises `UsageError` where they do not divide."""
        if experts < 1 or experts % len(node_of_rank):
            raise UsageError(f"{experts} experts do not divide among {len(node_of_rank)} ranks; pass a placement")
        each = experts // len(node_of_rank)
        return cls([expert // each for expert in range(experts)], node_of_rank)

    def experts_of(self, rank: int) -> Numbers:
        """Ascending."""
        return np.flatnonzero(self.rank_of_expert == rank)

    def number_in_node(self, rank: int) -> int:
        """Position among the ranks of its node."""
        return int(np.flatnonzero(self.ranks_of_node[self.node_of_rank[rank]] == rank)[0])


def _frozen(values: Any) -> Numbers:
    array = np.array(values, np.int64)
    array.setflags(write=False)
    return array
