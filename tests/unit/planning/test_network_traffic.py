"""Traffic of a network as a library: names of vertices, rates, ends of transfers, and what does not go together."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.planning import (
    LaneTimes,
    LinksFailure,
    NetworkTraffic,
    PlaneFailure,
    simulate_traffic,
    traffic_rates,
)
from fireflyer.topology.fabrics import NodeGroup, multi_plane, two_layer_tree, vertex_name, vertex_named

TREE = two_layer_tree([NodeGroup(kind="gpu", count=8)], radix=4, gbit_per_s=200, name="tree")
MIXED = two_layer_tree(
    [NodeGroup(kind="gpu", count=6), NodeGroup(kind="storage", count=2)], radix=4, gbit_per_s=200, name="mixed"
)
PLANES = multi_plane([NodeGroup(kind="a100", count=8, ports=2)], planes=2, radix=4, gbit_per_s=200, name="planes")


def test_each_vertex_has_a_name_and_is_found_by_it() -> None:
    for fabric in (TREE, MIXED, PLANES):
        vertices = range(fabric.nodes + fabric.switches)
        names = [vertex_name(fabric, vertex) for vertex in vertices]
        assert len(set(names)) == len(names)
        assert [vertex_named(fabric, name) for name in names] == list(vertices)
    assert vertex_named(PLANES, "a1007") == 7, "a kind may end with a digit"
    with pytest.raises(IndexError):
        vertex_name(TREE, TREE.nodes + TREE.switches)
    with pytest.raises(IndexError):
        vertex_name(TREE, -1)


@pytest.mark.parametrize("name", ["gpu8", "gpu", "gpu-1", "gpu1.0", "leaf٣", "spine0000000000", ""])
def test_what_is_no_name_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(UsageError, match=r"there is no .*; there are gpu0 to gpu7, leaf0 to leaf3, spine0 to spine1"):
        vertex_named(TREE, name)


def test_rates_are_shares_of_a_link() -> None:
    even, hashed = (traffic_rates(TREE, "permutation", routing=routing) for routing in ("adaptive", "ecmp"))
    assert (even.transfers, even.mean_share, even.slowest_share) == (8, 1, 1)
    assert 0 < hashed.slowest_share <= hashed.mean_share < 1
    assert traffic_rates(TREE, "incast").slowest_share == pytest.approx(1 / 7)


def test_a_link_that_fails_for_a_time_delays_what_needs_it() -> None:
    def times(*failures: LinksFailure) -> tuple[LaneTimes, tuple[tuple[str, str], ...]]:
        traffic = NetworkTraffic(pattern="ring", nbytes=25_000_000, routing="adaptive", failures=failures)
        found = simulate_traffic(TREE, traffic)
        assert found.alone_s == pytest.approx(0.001)
        assert found.storage_bytes_per_s is None
        return found.lanes[0], found.cut_off

    assert times()[0].last_s == pytest.approx(0.001)
    repaired, cut = times(LinksFailure(between=("gpu3", "leaf1"), at_ns=500_000, repaired_ns=700_000))
    assert repaired.last_s == pytest.approx(0.0012)
    assert not cut
    ever, cut = times(LinksFailure(between=("leaf1", "gpu3"), at_ns=500_000))
    assert ever.transfers == 8
    assert ever.last_s == pytest.approx(0.001)
    assert cut == (("gpu2", "gpu3"), ("gpu3", "gpu4"))


def test_all_planes_that_fail_leave_nothing_that_ends() -> None:
    lost = tuple(PlaneFailure(plane=plane) for plane in range(2))
    found = simulate_traffic(PLANES, NetworkTraffic(pattern="ring", failures=lost))
    assert found.lanes == (LaneTimes(transfers=8, mean_s=None, last_s=None),)
    assert len(found.cut_off) == 8


def test_storage_has_a_rate_and_reads_beside_training_a_lane() -> None:
    written = simulate_traffic(MIXED, NetworkTraffic(pattern="storage-writes", nbytes=8 << 20, replicas=1))
    assert len(written.lanes) == 1
    assert written.storage_bytes_per_s is not None
    assert 25e9 < written.storage_bytes_per_s <= 50e9
    beside = simulate_traffic(MIXED, NetworkTraffic(pattern="ring", nbytes=1 << 20, lane_weights=(9, 1)))
    assert [lane.transfers for lane in beside.lanes] == [6, 6]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nbytes": 0}, "transfers of 0 bytes leave nothing to send"),
        ({"level_lanes": (0, 0)}, "level lanes need the weights of both lanes"),
        ({"window": 1}, "a window needs back-pressure"),
        ({"back_pressure": True, "failures": (PlaneFailure(plane=0),)}, "do not go together"),
        ({"failures": (PlaneFailure(plane=0),) * 1025}, "1025 failures of links; use at most 1024"),
        ({"pattern": "storage-reads", "lane_weights": (1, 1)}, "lanes add reads to traffic between nodes"),
        ({"failures": (PlaneFailure(plane=1),)}, "there is no plane 1; tree has 1"),
        ({"failures": (PlaneFailure(plane=-1),)}, "there is no plane -1; tree has 1"),
        ({"failures": (LinksFailure(between=("leaf0", "leaf1")),)}, "no link joins leaf0 and leaf1"),
        ({"failures": (LinksFailure(between=("leaf0", "gpu9")),)}, "there is no gpu9"),
        ({"lane_weights": (1, 1)}, 'need nodes of kind "storage"; tree has none'),
        ({"nvlink_bytes_per_s": 1e9}, "tree has no nodes with several ports"),
        ({"nvlink_bytes_per_s": 1e9, "latency": "roce"}, "leave out NVLink"),
        ({"pattern": "star"}, "no pattern 'star'; use ring, .*, storage-writes"),
        ({"latency": "x"}, "no latency 'x'; use infiniband, roce, None"),
        ({"routing": "x"}, "no routing 'x'; use static, ecmp, adaptive"),
        ({"proxy_ns": -5}, "a proxy adds -5 ns to a message; give 0 or more"),
    ],
)
def test_what_does_not_go_together_is_one_line(values: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate_traffic(TREE, NetworkTraffic(**({"pattern": "ring"} | values)))  # type: ignore[arg-type]
