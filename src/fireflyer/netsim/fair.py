"""Max-min fair rates: no flow can get more without taking from one that has no more. Pure.

By progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): all rates grow together until a link is full,
which fixes the flows on it, then the others grow on. With weights a flow of rate r takes r times the weight of each of
its links: what routing divides. Flows may have priorities, too: then rates grow in proportion to them.

The solution of the whole network, and the twin of `native.FairRates`, which solves what a change reaches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Incidence", "max_min_rates"]


class Incidence(NamedTuple):
    """Links that flows use: flow f uses `links[starts[f]:starts[f + 1]]`, each with a weight above 0."""

    starts: NDArray[np.int64]
    links: NDArray[np.int64]
    weights: NDArray[np.float64]

    @property
    def flows(self) -> int:
        return len(self.starts) - 1

    def loads(self, amounts: NDArray[np.float64], links: int) -> NDArray[np.float64]:
        """Add up the load on each of `links`, for an amount of each flow."""
        each = np.repeat(amounts, np.diff(self.starts)) * self.weights
        return np.bincount(self.links, each, minlength=links).astype(np.float64, copy=False)

    @classmethod
    def of(cls, rows: list[tuple[tuple[int, ...], tuple[float, ...]]]) -> Incidence:
        """Make it of links and weights of each flow."""
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(links) for links, _ in rows], out=starts[1:])
        return cls(
            starts,
            np.fromiter((link for links, _ in rows for link in links), np.int64, starts[-1]),
            np.fromiter((weight for _, weights in rows for weight in weights), np.float64, starts[-1]),
        )


def max_min_rates(
    capacities: NDArray[np.float64], incidence: Incidence, priorities: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Rate of each flow, in the unit of `capacities`; infinite for a flow without links. `priorities`: of each flow,
    above 0, by default 1: what rates over them is max-min fair."""
    starts, links, weights = incidence
    flow_of = np.repeat(np.arange(incidence.flows), np.diff(starts))
    rates = np.full(incidence.flows, np.inf)
    growing = np.diff(starts) > 0
    scale = np.ones(incidence.flows) if priorities is None else priorities
    scaled = weights * scale[flow_of]
    left = capacities.astype(np.float64, copy=True)
    level = 0.0
    while growing.any():
        active = growing[flow_of]
        demand = np.bincount(links[active], scaled[active], minlength=len(left))
        used = demand > 0
        room = np.full(len(left), np.inf)
        np.divide(left, demand, out=room, where=used)
        step = room.min()
        level += step
        left[used] -= step * demand[used]
        full = used & (room <= step * (1 + 1e-12))
        left[full] = 0.0
        fixed = np.zeros(incidence.flows, bool)
        fixed[flow_of[active & full[links]]] = True
        rates[fixed] = level * scale[fixed]
        growing &= ~fixed
    return rates
