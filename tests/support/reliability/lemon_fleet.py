"""Fleets with lemon nodes, drawn at random, and the test that knows their rates: the best that any detector can do.

A fleet fails at 6.5 per 1000 node-days, its lemons included. A failure ends a job, of one node or of many; with some
probability it shows an Xid, takes the node out and opens a ticket: all of these say nothing beyond the failure itself.
Nodes are also excluded by users and see Xids of programs, whatever they are: noise that a detector must not count.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

__all__ = ["FAILURES_PER_NODE_DAY", "Fleet", "Incident", "draw_fleet", "known_rates_threshold", "normal_rate"]

FAILURES_PER_NODE_DAY: Final = 6.5e-3
LEMON_SHARE: Final = 0.012
_XIDS: Final = (48, 64, 74, 79, 95, 119)
_MULTI_NODE: Final = 0.6
_WITH_XID: Final = 0.3
_TAKEN_OUT: Final = 0.6
_WITH_TICKET: Final = 0.2
_EXCLUSIONS_PER_NODE_DAY: Final = 0.02
_PROGRAM_XIDS_PER_NODE_DAY: Final = 0.01


class Incident(NamedTuple):
    """A failure of a node that ended a job."""

    node: int
    at_day: float
    multi_node: bool
    xid: int
    """0: none."""
    taken_out: bool
    ticket: bool


class Fleet(NamedTuple):
    nodes: int
    days: float
    lemons: frozenset[int]
    incidents: tuple[Incident, ...]
    """In the order of time."""
    exclusions: tuple[tuple[int, float], ...]
    """Node and day: a user's job excluded it."""
    program_xids: tuple[tuple[int, float], ...]
    """Node and day: Xid 31 of a user's program."""


def normal_rate(ratio: float) -> float:
    """Failures per day of a node that is none, where lemons fail `ratio` times as often."""
    return FAILURES_PER_NODE_DAY / (1 - LEMON_SHARE + LEMON_SHARE * ratio)


def draw_fleet(seed: int, ratio: float, *, nodes: int = 2000, days: float = 90.0) -> Fleet:
    generator = np.random.default_rng([seed, round(ratio * 1000), nodes])
    lemons = frozenset(generator.choice(nodes, round(nodes * LEMON_SHARE), replace=False).tolist())
    rates = np.full(nodes, normal_rate(ratio))
    rates[sorted(lemons)] *= ratio
    failed = np.repeat(np.arange(nodes), generator.poisson(rates * days))
    at = generator.uniform(0, days, failed.size)
    order = np.argsort(at, kind="stable")
    flags = generator.random((failed.size, 4))
    xids = generator.choice(_XIDS, failed.size)
    incidents = tuple(
        Incident(
            int(failed[one]),
            float(at[one]),
            bool(flags[one, 0] < _MULTI_NODE),
            int(xids[one]) if flags[one, 1] < _WITH_XID else 0,
            bool(flags[one, 2] < _TAKEN_OUT),
            bool(flags[one, 3] < _WITH_TICKET),
        )
        for one in order
    )
    return Fleet(
        nodes,
        days,
        lemons,
        incidents,
        _noise(generator, nodes, days, _EXCLUSIONS_PER_NODE_DAY),
        _noise(generator, nodes, days, _PROGRAM_XIDS_PER_NODE_DAY),
    )


def _noise(
    generator: np.random.Generator, nodes: int, days: float, per_node_day: float
) -> tuple[tuple[int, float], ...]:
    count = generator.poisson(per_node_day * nodes * days)
    where, when = generator.integers(0, nodes, count), generator.uniform(0, days, count)
    return tuple(zip(where.tolist(), when.tolist(), strict=True))


def known_rates_threshold(ratio: float, days: float, precision: float) -> int:
    """The likelihood-ratio test between the two Poisson rates, both known, is a threshold on the number of failures:
    the smallest one at which the expected share of lemons among the flagged nodes is `precision` or more."""
    normal = normal_rate(ratio) * days
    for count in range(1, 1000):
        lemons = LEMON_SHARE * _at_least(count, normal * ratio)
        others = (1 - LEMON_SHARE) * _at_least(count, normal)
        if lemons >= precision * (lemons + others):
            return count
    raise AssertionError("no count gives this precision")


def _at_least(count: int, mean: float) -> float:
    """P(N ≥ count) of a Poisson variable, summed from the small end so that tails keep their digits."""
    terms = range(count, count + 200)
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in terms)
