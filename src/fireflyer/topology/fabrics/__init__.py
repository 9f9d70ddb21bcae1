"""Fabrics as data: fat-trees, zones, planes, rails, Dragonfly, Slim Fly, and what follows from their graphs. Pure.

fabric = two_layer_tree([NodeGroup(kind="gpu", count=800)], radix=40, gbit_per_s=200)
fabric.switches, fabric.links, diameter(fabric), disjoint_paths(fabric, 0, 799)
"""

from fireflyer.topology.fabrics.cuts import Cut, disjoint_paths, links_across, minimum_cut
from fireflyer.topology.fabrics.flat import Counts, counts_of, dragonfly, dragonfly_counts, slim_fly, slim_fly_counts
from fireflyer.topology.fabrics.graph import Cable, Fabric, Layer, LayerRate, NodeGroup
from fireflyer.topology.fabrics.inside import open_nodes
from fireflyer.topology.fabrics.joined import multi_plane, rail_optimised, zones
from fireflyer.topology.fabrics.names import vertex_name, vertex_named
from fireflyer.topology.fabrics.properties import (
    Bisection,
    bisection,
    diameter,
    planes_of,
    separated_nodes,
)
from fireflyer.topology.fabrics.trees import three_layer_tree, two_layer_tree

__all__ = [
    "Bisection",
    "Cable",
    "Counts",
    "Cut",
    "Fabric",
    "Layer",
    "LayerRate",
    "NodeGroup",
    "bisection",
    "counts_of",
    "diameter",
    "disjoint_paths",
    "dragonfly",
    "dragonfly_counts",
    "links_across",
    "minimum_cut",
    "multi_plane",
    "open_nodes",
    "planes_of",
    "rail_optimised",
    "separated_nodes",
    "slim_fly",
    "slim_fly_counts",
    "three_layer_tree",
    "two_layer_tree",
    "vertex_name",
    "vertex_named",
    "zones",
]
