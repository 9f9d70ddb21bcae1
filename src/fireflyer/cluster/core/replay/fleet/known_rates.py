"""The test that knows the rates: of lemons, of the others, and how many lemons there are. No detector can do better.

For two known Poisson rates the likelihood-ratio test is a threshold on the number of faults. It is given every fault
that checks can see over the whole time, also those of nodes that were out or replaced by then.
"""

from __future__ import annotations

import math
from typing import Final

from fireflyer.cluster.core.replay.fleet.faults import SEEN_SHARE, Plan
from fireflyer.cluster.core.replay.fleet.settings import FleetSettings

__all__ = ["found_by_known_rates"]

PRECISION: Final = 0.85
"""Its threshold is the lowest one with this expected share of lemons among the nodes above it."""
_MOST: Final = 100_000


def found_by_known_rates(settings: FleetSettings, plan: Plan) -> frozenset[int]:
    """The lemons among the nodes that it would name."""
    threshold = _threshold(settings)
    counts = {node: sum(bool(fault.ends_runs and fault.kind.check) for fault in plan.faults[node]) for node in
              sorted(plan.lemons)}  # fmt: skip
    return frozenset(node for node, count in counts.items() if count >= threshold)


def _threshold(settings: FleetSettings) -> int:
    sound = settings.sound_per_day * SEEN_SHARE * settings.days
    share = settings.lemons / settings.nodes
    for count in range(1, _MOST):
        lemons = share * _at_least(count, sound * settings.lemon_factor)
        others = (1 - share) * _at_least(count, sound)
        if lemons >= PRECISION * (lemons + others):
            return count
    return _MOST


def _at_least(count: int, mean: float) -> float:
    """P(N ≥ count) of a Poisson variable, from terms that fall off beyond its mean."""
    last = max(count, round(mean)) + 200 + round(20 * math.sqrt(mean))
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count, last))
