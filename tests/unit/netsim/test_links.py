"""Ways through a fabric are the shortest ones, and are searched for once for all targets that are reached alike."""

from __future__ import annotations

import random

import networkx
import pytest

from fireflyer.netsim import Links
from fireflyer.netsim.distances import Adjacency
from fireflyer.topology.fabrics import (
    Fabric,
    NodeGroup,
    dragonfly,
    multi_plane,
    open_nodes,
    rail_optimised,
    three_layer_tree,
    zones,
)


def gpus(count: int, ports: int = 1) -> tuple[NodeGroup, ...]:
    return (NodeGroup(kind="gpu", count=count, ports=ports),)


def opened(fabric: Fabric) -> Fabric:
    return open_nodes(fabric, ["gpu"], nvlink_bytes_per_s=1e11)


PLANES = opened(multi_plane(gpus(16, 4), planes=4, radix=8, gbit_per_s=400))
STORAGE = NodeGroup(kind="storage", count=4, ports=2)
FABRICS = [
    PLANES,
    opened(multi_plane([*gpus(8, 2), STORAGE], planes=2, radix=8, gbit_per_s=400)),
    opened(rail_optimised(gpus(8, 4), rails=4, radix=8, gbit_per_s=400)),
    three_layer_tree(gpus(20), radix=6, gbit_per_s=400),
    zones(gpus(10), radix=8, gbit_per_s=400, between=6, shared=[STORAGE]),
    dragonfly(nodes_per_switch=2, group_switches=4, global_links=2, groups=9, gbit_per_s=400),
]


def expected_hops(links: Links, at: int, target: int) -> list[int]:
    """Links from `at`, by distances in the graph of all switches."""
    nodes = links.fabric.nodes
    graph = networkx.Graph()
    graph.add_nodes_from(range(nodes, nodes + links.fabric.switches))
    for vertex in graph:
        graph.add_edges_from((vertex, hop.to) for hop in links.hops[vertex] if hop.to >= nodes)
    near = networkx.multi_source_dijkstra_path_length(graph, set(links.switches_of(target)))
    if at >= nodes and near.get(at) == 0:
        return [hop.link for hop in links.hops[at] if hop.to == target]
    onwards = [hop for hop in links.hops[at] if hop.to >= nodes]
    least = min(near.get(hop.to, 1 << 30) for hop in onwards)
    return [hop.link for hop in onwards if near.get(hop.to, 1 << 30) == least]


@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: f"{fabric.name} {fabric.nodes}")
@pytest.mark.parametrize("failing", [0.0, 0.15])
def test_ways_are_those_of_the_shortest_paths(fabric: Fabric, failing: float) -> None:
    rng = random.Random(1)
    whole = Links(fabric)
    down = [link for link in range(len(whole.ends)) if rng.random() < failing / 2]
    links = Links(fabric, frozenset(down) | {whole.reverse(link) for link in down})
    for _ in range(25):
        source, target = rng.sample(range(fabric.nodes), 2)
        if links.hop_count(source, target) is None:
            continue
        at, passed = source, 0
        while at != target:
            hops = links.next_hops(at, target)
            assert [hop.link for hop in hops] == expected_hops(links, at, target), (at, target)
            at, passed = rng.choice(hops).to, passed + 1
        assert passed == links.hop_count(source, target)


def test_gpus_that_are_entered_alike_share_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GPUs: 4 planes of 4 leaf switches, each with 4 nodes."""
    searches = []
    searched = Adjacency._searched

    def counted(self: Adjacency, entries: tuple[tuple[int, int], ...]) -> memoryview:
        searches.append(entries)
        return searched(self, entries)

    monkeypatch.setattr(Adjacency, "_searched", counted)
    links = Links(PLANES)
    for source in range(PLANES.nodes):
        for target in range(PLANES.nodes):
            assert links.hop_count(source, target) is not None
    assert len(searches) == len(set(searches)) == 4 * 4


def test_a_node_that_is_cut_off_is_not_reached() -> None:
    whole = Links(PLANES)
    nic, switch = PLANES.first_of("nic"), PLANES.first_of("nvswitch")
    own = {whole.between(0, nic)[0], whole.between(0, switch)[0]}
    links = Links(PLANES, frozenset(own | {whole.reverse(link) for link in own}))
    assert links.hop_count(5, 0) is None
    assert links.hop_count(5, 1) is not None
