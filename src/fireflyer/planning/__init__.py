"""Planning of clusters: bills of materials and costs of fabrics, limits of nodes, published figures. Pure."""

from fireflyer.planning.amounts import Amount, amount_of
from fireflyer.planning.cluster import (
    CheckpointPart,
    ClusterAnswer,
    ClusterPlan,
    StoragePart,
    TrainingPart,
    plan_cluster,
    ring_of,
    with_simulation,
)
from fireflyer.planning.costs import (
    BillLine,
    CableBill,
    CableRow,
    Ownership,
    PricedBill,
    PricedLine,
    bill_of,
    break_even_hours,
    cost_of_ownership,
    price_bill,
)
from fireflyer.planning.loads import HeatMap, LayerLoad, LinkLoads, link_loads
from fireflyer.planning.network_file import NetworkFile
from fireflyer.planning.node_limits import Limits, hfreduce_limits, host_memory_operations, ring_pcie_bandwidth
from fireflyer.planning.page import render_cluster
from fireflyer.planning.prices import LengthClass, NodePrice, Price, PriceList
from fireflyer.planning.published import PublishedFigure, PublishedRow, published_figures
from fireflyer.planning.step_traffic import SimulatedStep

__all__ = [
    "Amount",
    "BillLine",
    "CableBill",
    "CableRow",
    "CheckpointPart",
    "ClusterAnswer",
    "ClusterPlan",
    "HeatMap",
    "LayerLoad",
    "LengthClass",
    "Limits",
    "LinkLoads",
    "NetworkFile",
    "NodePrice",
    "Ownership",
    "Price",
    "PriceList",
    "PricedBill",
    "PricedLine",
    "PublishedFigure",
    "PublishedRow",
    "SimulatedStep",
    "StoragePart",
    "TrainingPart",
    "amount_of",
    "bill_of",
    "break_even_hours",
    "cost_of_ownership",
    "hfreduce_limits",
    "host_memory_operations",
    "link_loads",
    "plan_cluster",
    "price_bill",
    "published_figures",
    "render_cluster",
    "ring_of",
    "ring_pcie_bandwidth",
    "with_simulation",
]
