"""Links that are left out of a simulation are those that limit nothing: rates are the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.netsim import Incidence, Links, Router, Routing, max_min_rates
from fireflyer.netsim.limits import limiting_hops
from fireflyer.topology.fabrics import (
    Fabric,
    NodeGroup,
    dragonfly,
    multi_plane,
    three_layer_tree,
    two_layer_tree,
    zones,
)

Rows = list[tuple[tuple[int, ...], tuple[float, ...]]]


def gpus(count: int, ports: int = 1) -> list[NodeGroup]:
    return [NodeGroup(kind="gpu", count=count, ports=ports)]


FABRICS = (
    two_layer_tree(gpus(32), radix=8, gbit_per_s=8),
    two_layer_tree(gpus(30), radix=8, gbit_per_s=8, uplinks=3),
    three_layer_tree(gpus(32), radix=6, gbit_per_s=8),
    multi_plane(gpus(16, 2), planes=2, radix=8, gbit_per_s=8),
    dragonfly(nodes_per_switch=2, group_switches=3, global_links=1, groups=4, gbit_per_s=8),
    zones(gpus(16), radix=8, gbit_per_s=8, between=4, shared=[NodeGroup(kind="storage", count=4, ports=2)]),
)


def rows_of(fabric: Fabric, routing: Routing, pairs: list[tuple[int, int]]) -> Incidence:
    router = Router(Links(fabric), routing)
    flows = [flow for key, ends in enumerate(pairs) for flow in router.flows(key, *ends)]
    return Incidence.of([(flow.links, flow.weights) for flow in flows])


def only(rows: Incidence, kept: np.ndarray) -> Incidence:
    owners = np.repeat(np.arange(rows.flows), np.diff(rows.starts))[kept]
    starts = np.searchsorted(owners, np.arange(rows.flows + 1))
    return Incidence(starts, rows.links[kept], rows.weights[kept])


@given(
    st.integers(0, 1 << 32),
    st.sampled_from(FABRICS),
    st.sampled_from(("static", "ecmp", "adaptive")),
    st.booleans(),
)
def test_rates_are_those_with_all_links(seed: int, fabric: Fabric, routing: Routing, uneven: bool) -> None:
    rng = random.Random(seed)
    pairs = [tuple(rng.sample(range(fabric.nodes), 2)) for _ in range(rng.randrange(1, 60))]
    rows = rows_of(fabric, routing, pairs)  # type: ignore[arg-type]
    capacities = Links(fabric).capacities
    if uneven:
        capacities = capacities * np.array([rng.choice((1.0, 1.0, 0.5, 3.0)) for _ in capacities])
    priorities = np.array([rng.choice((1.0, 4.0)) for _ in range(rows.flows)])
    kept = limiting_hops(rows, capacities)
    found = only(rows, kept)
    assert (np.diff(found.starts) > 0).all(), "each path keeps a link"
    whole = max_min_rates(capacities, rows, priorities)
    assert max_min_rates(capacities, found, priorities) == pytest.approx(whole, rel=1e-9)


def test_of_links_that_are_used_alike_the_slowest_stands_for_all() -> None:
    rows = Incidence.of([((0, 1, 2, 3), (1.0, 0.5, 0.5, 1.0)), ((4, 1, 2, 3), (1.0, 0.5, 0.5, 1.0))])
    capacities = np.array([10.0, 2.0, 1.0, 10.0, 10.0])
    kept = limiting_hops(rows, capacities)
    assert rows.links[kept].tolist() == [0, 2, 3, 4, 2, 3], "link 1 carries what link 2 does"
    rates = max_min_rates(capacities, only(rows, kept))
    assert rates.tolist() == pytest.approx([1.0, 1.0])


def test_the_middle_of_a_tree_that_keeps_its_bandwidth_limits_nothing() -> None:
    fabric = two_layer_tree(gpus(128), radix=16, gbit_per_s=8)
    rng = random.Random(1)
    rows = rows_of(fabric, "adaptive", [tuple(rng.sample(range(128), 2)) for _ in range(200)])  # type: ignore[misc]
    assert np.bincount(np.repeat(np.arange(rows.flows), np.diff(rows.starts))).max() == 18
    kept = limiting_hops(rows, Links(fabric).capacities)
    assert kept.sum() <= 2 * rows.flows, "the links of its two nodes"
    assert limiting_hops(Incidence.of([]), np.ones(1)).tolist() == []
