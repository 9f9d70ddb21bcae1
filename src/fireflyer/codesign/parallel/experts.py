"""Where the tokens of an expert-parallel layer go: expected nodes and GPUs that one token is sent to.

A token is sent once to each node that has one of its experts, and forwarded there (DeepSeek-V3 paper, 4.3), so the
network carries M copies and not one for each expert. `fireflyer.collectives.dispatch` does so.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import comb, lcm
from typing import NamedTuple

from fireflyer.codesign.model import Experts
from fireflyer.codesign.parallel.plan import ParallelPlan

__all__ = ["TokenCopies", "copies_per_token", "expected_places", "nodes_per_token"]


class TokenCopies(NamedTuple):
    """Rows that are sent for one token in a dispatch, and come back in the combine: the mean over tokens."""

    remote: float
    """To other nodes, each by way of the rank there that has the sender's number in its node; one sum of each comes
    back."""
    inside: float
    """From that rank, of any node, to others of its node."""
    outputs: float
    """Results that come back to it: one for each expert on another rank of its node."""


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


@lru_cache(maxsize=256)
def _remote_of_split_nodes(experts: Experts, expert: int, gpus: int) -> float:
    """Nodes beside its own that a token is sent to, the mean of the node with most, where expert groups of `expert`
    neighbouring ranks begin and end inside nodes."""
    worst = 0.0
    for first in range(0, lcm(expert, gpus), gpus):
        total = 0.0
        for rank in range(first, first + gpus):
            begin = rank // expert * expert
            held = Counter(other // gpus for other in range(begin, begin + expert))
            reached = {
                node: 1
                - comb(experts.routed - ranks * experts.routed // expert, experts.per_token)
                / comb(experts.routed, experts.per_token)
                for node, ranks in held.items()
            }
            bound = experts.groups_per_token * max(1.0, len(held) / experts.groups)
            free = sum(reached.values())
            total += (free - reached[rank // gpus]) * min(1.0, bound / free)
        worst = max(worst, total / gpus)
    return worst


def copies_per_token(plan: ParallelPlan, experts: Experts, gpus: int) -> TokenCopies:
    """Of a plan on nodes of `gpus` GPUs."""
    if plan.expert == 1:
        return TokenCopies(0.0, 0.0, 0.0)
    if plan.expert % gpus and gpus % plan.expert:
        remote = _remote_of_split_nodes(experts, plan.expert, gpus)
    else:
        nodes = max(1, plan.expert // gpus)
        remote = nodes_per_token(experts, nodes) * (nodes - 1) / nodes
    ranks = min(expected_places(experts.routed, experts.per_token, plan.expert), float(experts.per_token))
    others = 1 - 1 / min(gpus, plan.expert)  # of the ranks of a node, those that a forwarder sends to
    return TokenCopies(remote, ranks * others, experts.per_token * others)
