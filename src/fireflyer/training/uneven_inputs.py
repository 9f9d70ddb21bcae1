"""Ranks that have run out of inputs: torch's `Join` protocol for our data parallelism.

A rank that has left the loop takes part in what the others start: in each of their forward passes (who are we, does
somebody average, the buffers) and in each of their averages, with gradients of zero. `Join` repeats that until all
ranks have left; then the last one's parameters are copied to all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.algorithms.join import JoinHook

from fireflyer.training.communication import Communicator

__all__ = ["JoinedRank", "agreed_root", "any_rank"]


class JoinedRank(JoinHook):
    """What `Join` calls on a rank without inputs: `take_part` for each step of the others, `end(is_last)` once."""

    def __init__(self, take_part: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._take_part = take_part
        self._end = end

    def main_hook(self) -> None:
        self._take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._end(is_last_joiner)


def any_rank(comm: Communicator, here: bool) -> bool:
    """Whether it is so on some rank. Collective."""
    count = torch.tensor([int(here)], dtype=torch.int64)
    comm.allreduce(count, async_op=True).wait()
    return bool(count.item())


def agreed_root(comm: Communicator, candidate: bool) -> int:
    """The highest rank that is a candidate; there is one. Collective."""
    candidates = torch.zeros(comm.world_size, dtype=torch.int64)
    candidates[comm.rank] = int(candidate)
    comm.allreduce(candidates, async_op=True).wait()
    return int(candidates.nonzero().max())
