"""Topology of the hardware as plain data: a node (NUMA, caches, PCI) and the zones of the network; placement of ranks
and order of nodes that follow from it."""

from fireflyer.topology.machine import Device, Machine, NumaNode
from fireflyer.topology.placement import Placement, network_placement, rank_placement
from fireflyer.topology.sysfs import format_list, memory_nodes, parse_list, read_machine
from fireflyer.topology.two_zone import (
    Crossings,
    count_crossings,
    pairs_across,
    words_of_pairs,
    zone_order,
    zone_trees,
    zones_of_hosts,
)

__all__ = [
    "Crossings",
    "Device",
    "Machine",
    "NumaNode",
    "Placement",
    "count_crossings",
    "format_list",
    "memory_nodes",
    "network_placement",
    "pairs_across",
    "parse_list",
    "rank_placement",
    "read_machine",
    "words_of_pairs",
    "zone_order",
    "zone_trees",
    "zones_of_hosts",
]
