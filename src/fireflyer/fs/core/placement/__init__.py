"""Where the targets of chains lie, such that the loss of a node spreads evenly; and how to get there. Pure.

`place` makes a table for a cluster, `measure` says how even it is and what is possible (it has the metric),
`rebalance` plans the moves when nodes or disks come and go.
"""

from fireflyer.fs.core.placement.measure import Quality
from fireflyer.fs.core.placement.model import Cluster, DiskLocation, StorageNode, Table, uniform_cluster
from fireflyer.fs.core.placement.placing import Placement, place, quality_of
from fireflyer.fs.core.placement.rebalancing import Move, Plan, moves_between, rebalance

__all__ = [
    "Cluster",
    "DiskLocation",
    "Move",
    "Placement",
    "Plan",
    "Quality",
    "StorageNode",
    "Table",
    "moves_between",
    "place",
    "quality_of",
    "rebalance",
    "uniform_cluster",
]
