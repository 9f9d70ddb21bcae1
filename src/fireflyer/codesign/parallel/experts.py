"""Where the tokens of an expert-parallel layer go: expected nodes and GPUs that one token is sent to.

A token is sent once to each node that has one of its experts, and forwarded there (DeepSeek-V3 paper, 4.3), so the
network carries M copies and not one for each expert.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from fireflyer.codesign.model import Experts
from fireflyer.codesign.parallel.plan import ParallelPlan

__all__ = ["copies_per_token", "expected_places", "nodes_per_token"]


@lru_cache(maxsize=256)
def expected_places(experts: int, per_token: int, places: int) -> float:
    """Expected number of `places`, each with the same share of `experts`, that hold one of `per_token` distinct experts
    taken uniformly.

    >>> round(expected_places(256, 8, 8), 3)
    5.295
    """
    missing = comb(experts - experts // places, per_token) / comb(experts, per_token)
    return places * (1 - missing)


def nodes_per_token(experts: Experts, nodes: int) -> float:
    """Expected nodes that a token is sent to, its own included, for experts over `nodes` nodes. Routing limited to some
    groups bounds it (V3: 4 of 8 nodes)."""
    free = expected_places(experts.routed, experts.per_token, nodes)
    bound = experts.groups_per_token * max(1.0, nodes / experts.groups)
    return min(free, bound, float(nodes))


def copies_per_token(plan: ParallelPlan, experts: Experts, gpus: int) -> tuple[float, float]:
    """Copies of a token that leave its node through the network, and those that go to another GPU inside a node."""
    if plan.expert == 1:
        return 0.0, 0.0
    nodes = max(1, plan.expert // gpus)
    remote = nodes_per_token(experts, nodes) * (nodes - 1) / nodes
    ranks = min(expected_places(experts.routed, experts.per_token, plan.expert), float(experts.per_token))
    return remote, ranks * (plan.expert - 1) / plan.expert
