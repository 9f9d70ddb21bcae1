"""Patterns of traffic, all transfers at once, and the rates that they get. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.netsim.fair import Incidence, max_min_rates
from fireflyer.netsim.links import Links
from fireflyer.netsim.routing import Router, flow_key, hashed
from fireflyer.netsim.simulate import Settings
from fireflyer.topology.fabrics import Fabric
from fireflyer.topology.traffic import Transfer, check_transfers

__all__ = ["Pattern", "first_rates", "pattern_transfers"]

Pattern = Literal["ring", "shuffled-ring", "permutation", "incast"]


def pattern_transfers(pattern: Pattern, nodes: Sequence[int], nbytes: int, *, seed: int = 0) -> list[Transfer]:
    """Make transfers between these nodes. `ring`: each to the next; `shuffled-ring`: so in a random order, as ranks
    placed at random are; `permutation`: each to another one, each receives from one; `incast`: all others to the first.
    Raises `UsageError`."""
    if len(nodes) < 2 or pattern not in get_args(Pattern):
        raise UsageError(
            f"no pattern {pattern!r} of {len(nodes)} nodes; use {', '.join(get_args(Pattern))}, 2 nodes or more"
        )
    order = list(nodes)
    if pattern in ("shuffled-ring", "permutation"):
        order.sort(key=lambda node: hashed(seed, node))
    if pattern == "incast":
        pairs = [(node, order[0]) for node in order[1:]]
    elif pattern == "permutation":
        others = order[1:] + order[:1]
        target = dict(zip(order, others, strict=True))
        pairs = [(node, target[node]) for node in nodes]
    else:
        pairs = list(zip(order, order[1:] + order[:1], strict=True))
    return [
        Transfer(id=number, source=source, target=target_, nbytes=nbytes)
        for number, (source, target_) in enumerate(pairs)
    ]


def first_rates(fabric: Fabric, transfers: Sequence[Transfer], settings: Settings) -> NDArray[np.float64]:
    """Bytes per second of each transfer while all of them send. Raises `UsageError`."""
    check_transfers(transfers, fabric.nodes)
    links = Links(fabric)
    router = Router(links, settings.routing, queue_pairs=settings.queue_pairs, seed=settings.seed)
    rows, owners = [], []
    for place, one in enumerate(transfers):
        for flow in router.flows(flow_key(one), one.source, one.target):
            rows.append((flow.links, flow.weights))
            owners.append(place)
    rates = max_min_rates(links.capacities, Incidence.of(rows))
    found: NDArray[np.float64] = np.zeros(len(transfers))
    np.add.at(found, owners, rates)
    return found
