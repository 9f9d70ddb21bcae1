"""Loads of links: flows that are counted by hand, and a page that shows any text as text."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.planning.test_cluster import answer_of, shape

from fireflyer.codesign.model import ModelShape
from fireflyer.netsim import Settings
from fireflyer.planning import link_loads, render_cluster, ring_of
from fireflyer.topology.fabrics import NodeGroup, two_layer_tree

__all__ = ["shape"]


def test_each_node_of_a_ring_sends_and_receives_one_flow_and_none_is_lost_between_layers() -> None:
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=16)], radix=8, gbit_per_s=100)
    loads = link_loads(fabric, range(16), Settings())
    layers = {one.name: one for one in loads.layers}
    assert (layers["gpu to leaf"].mean, layers["leaf to gpu"].mean) == (1.0, 1.0)
    up, down = layers["leaf to spine"], layers["spine to leaf"]
    assert up.mean * up.links == down.mean * down.links
    assert up.most >= up.mean
    slowest = max(one.most for one in loads.layers)  # flows on the link where the last one ends
    assert layers["gpu to leaf"].utilisation == pytest.approx(1 / slowest)
    assert up.utilisation == pytest.approx(up.mean / slowest)
    assert max(one.most_utilisation for one in loads.layers) == pytest.approx(1.0)
    assert loads.heat is not None
    cells = [value for row in loads.heat.cells for value in row]
    parallel = up.links / len(cells)
    assert parallel * sum(cells) == up.mean * up.links


def test_the_page_escapes_every_text(shape: ModelShape) -> None:
    answer = msgspec.structs.replace(answer_of(shape), notes=("<b>note</b>",))
    page = render_cluster("<script>", {"<i>": {"<u>": "<s>"}, "empty": {}}, answer, None)
    for tag in ("<script>", "<i>", "<u>", "<s>", "<b>"):
        assert tag not in page
    assert "empty" not in page


def test_the_ring_has_the_nodes_of_the_run() -> None:
    groups = [NodeGroup(kind="storage", count=3), NodeGroup(kind="gpu", count=4, ports=2)]
    fabric = two_layer_tree(groups, radix=8, gbit_per_s=100)
    nodes, settings = ring_of(fabric, "gpu", 3, queue_pairs=1, seed=7)
    assert (nodes, settings.queue_pairs, settings.seed) == (range(3, 6), 2, 7)
