"""Layers into stages: consecutive runs of unequal layers such that the costliest stage is as cheap as it can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["Balance", "balance"]


class Balance(msgspec.Struct, frozen=True):
    """`sizes[s]` consecutive layers form stage s, with the cost `costs[s]`."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Cost of the costliest stage."""
        return max(self.costs)

    @property
    def imbalance(self) -> float:
        """Cost of the costliest stage over the mean; 1 where all are equal."""
        return self.worst * len(self.costs) / math.fsum(self.costs)


def balance(costs: Sequence[float], stages: int) -> Balance:
    """Cuts layers of these costs (the embedding, the head and prediction modules count as layers) into `stages` runs of
    at least one layer, with the least possible cost of the costliest run.

    Of all such cuts, the one whose stages are filled from the end up to that cost: the first stages, which hold the
    activations of most micro-batches, get what is left. Raises `UsageError` for fewer layers than stages and for costs
    that are not finite or negative.
    """
    if not 1 <= stages <= len(costs):
        raise UsageError(f"{len(costs)} layers do not fill {stages} stages; give 1 to {len(costs)} stages")
    if not all(0 <= cost < math.inf for cost in costs):
        raise UsageError("the cost of a layer is a finite number, at least 0")
    prefix = [0.0, *itertools.accumulate(costs)]
    worst = _least_worst(prefix, stages)
    sizes: list[int] = []
    end = len(costs)
    for before in range(stages - 1, -1, -1):  # `before` stages are still to come, towards the first layer
        begin = end - 1
        while begin > before and prefix[end] - prefix[begin - 1] <= worst:
            begin -= 1
        begin = begin if before else 0
        sizes.append(end - begin)
        end = begin
    sizes.reverse()
    ends = list(itertools.accumulate(sizes))
    return Balance(
        tuple(sizes), tuple(math.fsum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True))
    )


def _least_worst(prefix: Sequence[float], stages: int) -> float:
    """By dynamic programming over (stages, layers). For one stage more, the best last cut moves only to the right as
    layers are added, so that each stage takes a time linear in the layers."""
    layers = len(prefix) - 1
    best = list(prefix)
    for count in range(2, stages + 1):
        longer = [math.inf] * (layers + 1)
        cut = count - 1
        for end in range(count, layers + 1):
            while cut + 1 < end and max(best[cut + 1], prefix[end] - prefix[cut + 1]) <= max(
                best[cut], prefix[end] - prefix[cut]
            ):
                cut += 1
            longer[end] = max(best[cut], prefix[end] - prefix[cut])
        best = longer
    return best[layers]
