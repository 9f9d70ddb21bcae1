"""Transfers over fabrics: routing, dependencies, latencies, and what flows into links comes out of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.netsim import (
    Incidence,
    Links,
    Pattern,
    Router,
    Routing,
    Settings,
    first_rates,
    max_min_rates,
    pattern_transfers,
    simulate,
)
from fireflyer.topology.fabrics import Fabric, NodeGroup, dragonfly, multi_plane, slim_fly, two_layer_tree, zones
from fireflyer.topology.traffic import Transfer


def tree(nodes: int, radix: int, gbit_per_s: float = 8.0) -> Fabric:
    """By default 10^9 bytes per second."""
    return two_layer_tree([NodeGroup(kind="gpu", count=nodes)], radix=radix, gbit_per_s=gbit_per_s)


def sent(*pairs: tuple[int, int], nbytes: int = 10**9) -> list[Transfer]:
    return [Transfer(id=number, source=a, target=b, nbytes=nbytes) for number, (a, b) in enumerate(pairs)]


@pytest.mark.parametrize("routing", ["static", "ecmp", "adaptive"])
def test_a_single_transfer_takes_its_bytes_over_the_rate(routing: Routing) -> None:
    run = simulate(tree(8, 4), sent((0, 7)), Settings(routing=routing))
    assert run.finish_s == pytest.approx([1.0])
    assert run.link_bytes.sum() == pytest.approx(4e9)  # node, leaf, spine, leaf, node
    assert simulate(tree(8, 4), sent((0, 1)), Settings(routing=routing)).link_bytes.sum() == pytest.approx(2e9)


def test_senders_to_one_node_share_its_link() -> None:
    run = simulate(tree(8, 4), sent((0, 7), (1, 7), (6, 7)))
    assert run.finish_s == pytest.approx([3.0] * 3)


def test_what_is_after_others_begins_when_the_last_has_arrived_and_its_delay_is_over() -> None:
    transfers = [
        Transfer(id=7, source=0, target=1, nbytes=10**9),
        Transfer(id=3, source=2, target=3, nbytes=2 * 10**9),
        Transfer(id=5, source=1, target=3, nbytes=10**9, after=(7, 3), delay_ns=500_000_000),
        Transfer(id=6, source=3, target=3, nbytes=10**9, after=(5,)),
        Transfer(id=9, source=3, target=0, nbytes=0, after=(6,)),
    ]
    run = simulate(tree(8, 4), transfers)
    assert run.start_s == pytest.approx([0, 0, 2.5, 3.5, 3.5])
    assert run.finish_s == pytest.approx([1, 2, 3.5, 3.5, 3.5])
    assert run.makespan_s == pytest.approx(3.5)


def test_latency_is_that_of_a_message_and_of_each_switch() -> None:
    given_ = Settings(message_latency_ns=2350, switch_latency_ns=450)
    run = simulate(tree(8, 4), sent((0, 1), (2, 7)), given_)
    assert run.finish_s == pytest.approx([1 + 2.8e-6, 1 + 3.7e-6], abs=1e-12)


def test_a_transfer_over_several_queue_pairs_ends_with_the_last() -> None:
    fabric = tree(32, 8)
    flows = Router(Links(fabric), "ecmp", queue_pairs=4, seed=1).flows(0, 0, 31)
    assert [flow.share for flow in flows] == [0.25] * 4
    run = simulate(fabric, sent((0, 31)), Settings(queue_pairs=4, seed=1))
    assert run.finish_s == pytest.approx([1.0])


@pytest.mark.parametrize(
    "fabric",
    [
        tree(32, 8),
        multi_plane([NodeGroup(kind="gpu", count=16, ports=2)], planes=2, radix=8, gbit_per_s=8),
        slim_fly(5, gbit_per_s=8),
        dragonfly(nodes_per_switch=2, group_switches=4, global_links=2, groups=9, gbit_per_s=8),
        zones(
            [NodeGroup(kind="gpu", count=16)],
            radix=8,
            gbit_per_s=8,
            between=4,
            shared=[NodeGroup(kind="storage", count=4, ports=2)],
        ),
    ],
    ids=lambda fabric: fabric.name,
)
@pytest.mark.parametrize("routing", ["static", "ecmp", "adaptive"])
def test_paths_lead_from_source_to_target_and_pass_no_other_node(fabric: Fabric, routing: Routing) -> None:
    links = Links(fabric)
    router = Router(links, routing, seed=2)
    for target in range(1, fabric.nodes, 3):
        for flow in router.flows(target, 0, target):
            balance: dict[int, float] = {}
            for link, weight in zip(flow.links, flow.weights, strict=True):
                low, high = links.ends[link]
                balance[low] = balance.get(low, 0.0) - weight
                balance[high] = balance.get(high, 0.0) + weight
            uneven = {vertex: share for vertex, share in balance.items() if abs(share) > 1e-12}
            assert uneven == pytest.approx({0: -1.0, target: 1.0})
            assert {vertex for vertex in balance if vertex < fabric.nodes} == {0, target}


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 40), st.sampled_from(["static", "ecmp", "adaptive"]))
def test_bytes_are_conserved_and_no_link_is_faster_than_it_can(seed: int, count: int, routing: Routing) -> None:
    rng = random.Random(seed)
    fabric = tree(32, 8)
    transfers = [
        Transfer(
            id=number,
            source=rng.randrange(32),
            target=rng.randrange(32),
            nbytes=rng.randrange(1, 10**9),
            after=tuple(rng.sample(range(number), min(number, rng.randrange(3)))),
            delay_ns=rng.randrange(10**8),
        )
        for number in range(count)
    ]
    run = simulate(fabric, transfers, Settings(routing=routing, seed=seed))
    links = Links(fabric)
    into = np.zeros(fabric.nodes)
    for (_, to), nbytes in zip(links.ends, run.link_bytes, strict=True):
        if to < fabric.nodes:
            into[to] += nbytes
    wanted = np.zeros(fabric.nodes)
    for one in transfers:
        if one.source != one.target:
            wanted[one.target] += one.nbytes
    assert into == pytest.approx(wanted, rel=1e-9, abs=1e-3)
    assert (run.link_bytes <= run.makespan_s * links.capacities * (1 + 1e-9) + 1e-3).all()
    assert (run.finish_s >= run.start_s).all()
    for one in transfers:
        for other in one.after:
            assert run.start_s[one.id] >= run.finish_s[other] + one.delay_ns / 1e9 - 1e-12


def test_a_faster_link_may_make_the_last_transfer_end_later() -> None:
    """One allocation never gets worse by it; a sequence of them can."""

    def ends(first: float) -> float:
        capacities = np.array([first, 10.0, 9.0])
        rows = {"B": ((0, 1), (1.0, 1.0)), "C": ((1, 2), (1.0, 1.0))}
        left = {"B": 10.0, "C": 180.0}
        now = 0.0
        while left:
            rates = dict(zip(left, max_min_rates(capacities, Incidence.of([rows[one] for one in left])), strict=True))
            step = min(left[one] / rates[one] for one in left)
            now += step
            left = {one: rest for one in left if (rest := left[one] - rates[one] * step) > 1e-9}
        return now

    assert ends(1.0) == pytest.approx(20.0)
    assert ends(10.0) == pytest.approx(20.9, abs=0.05)


@pytest.mark.parametrize(
    ("routing", "pairs", "mean", "slowest"),
    [("ecmp", 1, 0.52, 0.18), ("ecmp", 2, 0.67, 0.25), ("static", 1, 0.66, 0.19)],
)
def test_a_permutation_of_2048_nodes_has_the_rates_of_an_independent_program(
    routing: Routing, pairs: int, mean: float, slowest: float
) -> None:
    """Full two-layer tree of 64-port switches; mean and slowest rate over that of a link, averages of other seeds."""
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=2048)], radix=64, gbit_per_s=400)
    transfers = pattern_transfers("permutation", range(2048), 1, seed=5)
    shares = first_rates(fabric, transfers, Settings(routing=routing, queue_pairs=pairs, seed=1)) / 50e9
    assert shares.mean() == pytest.approx(mean, abs=0.02)
    assert shares.min() == pytest.approx(slowest, abs=0.06)


def test_patterns() -> None:
    def pairs(pattern: Pattern) -> list[tuple[int, int]]:
        return [(one.source, one.target) for one in pattern_transfers(pattern, (4, 5, 6, 9), 1, seed=3)]

    assert pairs("ring") == [(4, 5), (5, 6), (6, 9), (9, 4)]
    assert pairs("incast") == [(5, 4), (6, 4), (9, 4)]
    for pattern in ("shuffled-ring", "permutation"):
        drawn = pairs(pattern)
        assert sorted(source for source, _ in drawn) == sorted(target for _, target in drawn) == [4, 5, 6, 9]
        assert all(source != target for source, target in drawn)
    with pytest.raises(UsageError, match="2 nodes or more"):
        pattern_transfers("ring", (4,), 1)


def test_an_even_division_gives_each_transfer_of_a_permutation_a_whole_link() -> None:
    fabric = tree(128, 16)
    order = random.Random(5).sample(range(128), 128)
    run = simulate(fabric, sent(*enumerate(order)), Settings(routing="adaptive"))
    assert run.finish_s == pytest.approx([0.0 if node == target else 1.0 for node, target in enumerate(order)])


def test_a_degraded_link_slows_what_goes_over_it() -> None:
    fabric = tree(8, 4)
    links = Links(fabric)
    capacities = links.capacities
    capacities[links.hops[0][0].link] /= 4
    run = simulate(fabric, sent((0, 7), (1, 6)), Settings(routing="adaptive"), capacities=capacities)
    assert run.finish_s == pytest.approx([4.0, 1.0])
    for wrong in (capacities[1:], capacities * 0.0, capacities * np.inf):
        with pytest.raises(UsageError, match="one rate above 0 for each"):
            simulate(fabric, sent((0, 7)), capacities=wrong)


@pytest.mark.parametrize(
    ("transfers", "words"),
    [
        ([Transfer(id=1, source=0, target=1, nbytes=1), Transfer(id=1, source=0, target=1, nbytes=1)], "same number"),
        ([Transfer(id=1, source=0, target=8, nbytes=1)], "there are 8 nodes"),
        ([Transfer(id=1, source=0, target=1, nbytes=-1)], "has -1 bytes"),
        ([Transfer(id=1, source=0, target=1, nbytes=1, after=(2,))], "transfer 2, which does not exist"),
        (
            [
                Transfer(id=1, source=0, target=1, nbytes=1, after=(2,)),
                Transfer(id=2, source=0, target=1, nbytes=1, after=(1,)),
            ],
            "waits for itself",
        ),
        ([Transfer(id=1, source=0, target=1, nbytes=1, lane=1)], "lanes"),
    ],
)
def test_wrong_transfers_are_one_line(transfers: list[Transfer], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate(tree(8, 4), transfers)


def test_too_many_queue_pairs_and_nodes_that_are_cut_off() -> None:
    with pytest.raises(UsageError, match="use 1 to 256"):
        Router(Links(tree(8, 4)), "ecmp", queue_pairs=0)
    alone = zones([NodeGroup(kind="gpu", count=4)], radix=4, gbit_per_s=8, between=0)
    with pytest.raises(UsageError, match="node 0 cannot reach node 1"):
        simulate(alone, sent((0, 1)))
