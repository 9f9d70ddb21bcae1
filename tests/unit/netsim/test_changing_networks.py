"""Links that fail and are repaired while transfers run, and lanes with weights."""

from __future__ import annotations

import numpy as np
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.netsim import (
    BackPressure,
    LinkFailure,
    Links,
    Router,
    Routing,
    Settings,
    simulate,
    simulate_back_pressure,
)
from fireflyer.topology.fabrics import Fabric, NodeGroup, two_layer_tree
from fireflyer.topology.traffic import Transfer

SECOND_NS = 10**9


def tree(nodes: int = 8, radix: int = 4) -> Fabric:
    """Links of 10^9 bytes per second."""
    return two_layer_tree([NodeGroup(kind="gpu", count=nodes)], radix=radix, gbit_per_s=8)


def sent(*pairs: tuple[int, int], nbytes: int = 10**9, lane: int = 0) -> list[Transfer]:
    return [Transfer(id=number, source=a, target=b, nbytes=nbytes, lane=lane) for number, (a, b) in enumerate(pairs)]


def uplinks(links: Links, node: int) -> list[int]:
    """Links from the leaf switch of a node to spine switches."""
    leaf = links.hops[node][0].to
    return [hop.link for hop in links.hops[leaf] if hop.to >= links.fabric.nodes]


@pytest.mark.parametrize("routing", ["static", "ecmp"])
def test_a_transfer_goes_on_over_another_link_with_the_bytes_that_are_left(routing: Routing) -> None:
    fabric = tree()
    links = Links(fabric)
    used = Router(links, routing).flows(0, 0, 7)[0].links[1]
    failure = LinkFailure(link=used, at_ns=SECOND_NS // 4)
    run = simulate(fabric, sent((0, 7)), Settings(routing=routing), failures=[failure])
    assert run.finish_s == pytest.approx([1.0])
    assert run.link_bytes[used] == pytest.approx(0.25e9)
    assert run.link_bytes.sum() == pytest.approx(4e9)
    late = simulate(fabric, sent((0, 7)), Settings(routing=routing, reroute_ns=SECOND_NS // 2), failures=[failure])
    assert late.finish_s == pytest.approx([1.5])  # until routing reacts nothing moves


def test_adaptive_routing_loses_the_share_of_the_link_and_gets_it_back() -> None:
    """Two nodes fill both links of their leaf switch; with one of them they have half."""
    fabric = tree()
    failure = LinkFailure(link=uplinks(Links(fabric), 0)[0], at_ns=SECOND_NS // 2, repaired_ns=SECOND_NS * 3 // 2)
    pairs = [(0, 7), (1, 6)]
    assert simulate(fabric, sent(*pairs), Settings(routing="adaptive")).finish_s == pytest.approx([1.0, 1.0])
    run = simulate(fabric, sent(*pairs), Settings(routing="adaptive"), failures=[failure])
    assert run.finish_s == pytest.approx([1.5, 1.5])  # 0.5 s whole, 1 s half


def test_transfers_without_a_path_wait_for_a_repair_and_are_named_when_none_comes() -> None:
    fabric = tree()
    links = Links(fabric)
    only = links.hops[0][0].link
    transfers = [*sent((0, 7), (1, 6)), Transfer(id=9, source=6, target=7, nbytes=1, after=(0,))]
    repaired = LinkFailure(link=links.reverse(only), at_ns=SECOND_NS // 2, repaired_ns=2 * SECOND_NS)
    run = simulate(fabric, transfers, Settings(routing="adaptive"), failures=[repaired])
    assert run.finish_s == pytest.approx([2.5, 1.0, 2.5])
    assert run.cut_off == ()
    run = simulate(
        fabric, transfers, Settings(routing="adaptive"), failures=[LinkFailure(link=only, at_ns=SECOND_NS // 2)]
    )
    assert run.cut_off == (0,)
    assert run.finish_s.tolist() == [np.inf, pytest.approx(1.0), np.inf]
    assert run.start_s[2] == np.inf  # it waits for one that never ends


def test_transfers_that_begin_while_a_link_is_down_avoid_it() -> None:
    fabric = tree()
    links = Links(fabric)
    used = Router(links, "static").flows(0, 0, 7)[0].links[1]
    later = [Transfer(id=0, source=0, target=7, nbytes=10**9, delay_ns=SECOND_NS)]
    run = simulate(fabric, later, Settings(routing="static"), failures=[LinkFailure(link=used)])
    assert run.finish_s == pytest.approx([2.0])
    assert run.link_bytes[used] == 0


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (LinkFailure(link=1000), "there are 32 directed links"),
        (LinkFailure(link=0, at_ns=-1), "a repair comes later"),
        (LinkFailure(link=0, at_ns=5, repaired_ns=5), "a repair comes later"),
    ],
)
def test_failures_that_cannot_be_are_one_line(failure: LinkFailure, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate(tree(), sent((0, 7)), failures=[failure])
    with pytest.raises(UsageError, match="0 or more"):
        simulate(tree(), sent((0, 7)), Settings(reroute_ns=-1))
    with pytest.raises(UsageError, match="in one direction only"):
        Links(tree(), frozenset({3}))


def test_a_full_link_is_shared_by_the_weights_of_lanes() -> None:
    transfers = [*sent((0, 7)), Transfer(id=1, source=1, target=7, nbytes=10**9, lane=1)]
    run = simulate(tree(), transfers, Settings(routing="adaptive", lane_weights=(3.0, 1.0)))
    assert run.finish_s == pytest.approx([4 / 3, 2.0])  # 3/4 until the first has ended, then all


def test_service_levels_take_the_lanes_that_the_map_gives_them() -> None:
    transfers = [*sent((0, 7), lane=1), Transfer(id=1, source=1, target=7, nbytes=10**9, lane=2)]
    apart = Settings(routing="adaptive", lane_weights=(1.0, 3.0), level_lanes=(0, 1, 0))
    assert simulate(tree(), transfers, apart).finish_s == pytest.approx([4 / 3, 2.0])
    together = Settings(routing="adaptive", lane_weights=(1.0, 3.0), level_lanes=(0, 1, 1))
    assert simulate(tree(), transfers, together).finish_s == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("level_lanes", "words"),
    [
        ((0,), "of service level 1, and levels 0 to 0 have"),
        ((0, 1), "the lanes 0 to 0"),
        ((0, -1), "give up to"),
    ],
)
def test_a_wrong_map_of_service_levels_is_one_line(level_lanes: tuple[int, ...], words: str) -> None:
    for run in (
        lambda: simulate(tree(), sent((0, 7), lane=1), Settings(level_lanes=level_lanes)),
        lambda: simulate_back_pressure(tree(), sent((0, 7), lane=1), BackPressure(level_lanes=level_lanes)),
    ):
        with pytest.raises(UsageError, match=words):
            run()


def test_weights_count_where_a_flow_is_limited_and_nowhere_else() -> None:
    """Lane 0 is limited by its own link, so lane 1 gets the rest of the shared one, whatever its weight."""
    fabric = tree()
    links = Links(fabric)
    capacities = links.capacities
    capacities[links.hops[0][0].link] = 0.1e9
    transfers = [*sent((0, 7), nbytes=10**8), Transfer(id=1, source=1, target=7, nbytes=9 * 10**8, lane=1)]
    run = simulate(fabric, transfers, Settings(routing="adaptive", lane_weights=(10.0, 1.0)), capacities=capacities)
    assert run.finish_s == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("weights", [(), (0.0, 1.0), (float("inf"), 1.0), (1.0,)])
def test_wrong_lanes_are_one_line(weights: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="lane"):
        simulate(tree(), sent((0, 7), lane=1), Settings(lane_weights=weights))


def test_transfers_of_a_connection_take_the_same_way() -> None:
    fabric = tree(32, 8)
    transfers = [
        Transfer(id=number, source=0, target=31, nbytes=10**6, connection=5 if number < 20 else None)
        for number in range(40)
    ]
    links = Links(fabric)

    def spines(chosen: list[Transfer]) -> int:
        used = simulate(fabric, chosen).link_bytes
        return sum(used[link] > 0 for link in uplinks(links, 0))

    assert spines(transfers[:20]) == 1
    assert spines(transfers[20:]) == 4


def test_one_number_of_a_connection_between_many_pairs_spreads_over_the_switches() -> None:
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=128)], radix=16, gbit_per_s=8)
    pairs = [(node, (node + 64) % 128) for node in range(128)]
    links = Links(fabric)
    up = {link for node in range(128) for link in uplinks(links, node)}

    def used(connection: int | None) -> int:
        transfers = [
            Transfer(id=number, source=a, target=b, nbytes=1, connection=connection)
            for number, (a, b) in enumerate(pairs)
        ]
        run = simulate(fabric, transfers)
        return sum(run.link_bytes[link] > 0 for link in up)

    assert used(0) > 70, "as many as random choices use: 128 links, 128 flows"
    assert used(0) == pytest.approx(used(None), rel=0.15)


@pytest.mark.parametrize("routing", ["static", "ecmp", "adaptive"])
def test_equal_transfers_of_64_nodes_that_share_paths_end_as_those_that_do_not(routing: Routing) -> None:
    """The engine solves one path for all flows on it; the twin solves each flow."""
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=64)], radix=16, gbit_per_s=8)
    transfers = [
        Transfer(id=3 * node + copy, source=node, target=(node * 5 + 9) % 64, nbytes=10**8, connection=0)
        for node in range(64)
        for copy in range(3)
    ]
    native, twin = (simulate(fabric, transfers, Settings(routing=routing, engine=one)) for one in ("native", "numpy"))
    assert native.finish_s == pytest.approx(twin.finish_s, rel=1e-9)
