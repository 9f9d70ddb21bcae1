"""Planning of clusters: bills of materials and costs of fabrics, traffic on them, what a model needs, limits of nodes,
published figures. Pure.

plan_model(shape_from_config(config), ModelUse(sequence_tokens=32_768)).request_tokens_per_s["fp8"]
traffic_rates(fabric, "permutation", queue_pairs=4).slowest_share
"""

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
    bill_of_counts,
    break_even_hours,
    cost_of_ownership,
    price_bill,
)
from fireflyer.planning.loads import HeatMap, LayerLoad, LinkLoads, link_loads
from fireflyer.planning.model_needs import (
    ExpertLimits,
    ModelAnswer,
    ModelUse,
    ServiceAnswer,
    SpeculationGain,
    plan_model,
)
from fireflyer.planning.network_file import NetworkFile
from fireflyer.planning.network_traffic import (
    LaneTimes,
    LinksFailure,
    NetworkTraffic,
    PlaneFailure,
    TrafficPattern,
    TrafficRates,
    TrafficTimes,
    simulate_traffic,
    traffic_rates,
)
from fireflyer.planning.node_limits import Limits, hfreduce_limits, host_memory_operations, ring_pcie_bandwidth
from fireflyer.planning.page import render_cluster
from fireflyer.planning.prices import LengthClass, NodePrice, Price, PriceList, SourcedValue
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
    "ExpertLimits",
    "HeatMap",
    "LaneTimes",
    "LayerLoad",
    "LengthClass",
    "Limits",
    "LinkLoads",
    "LinksFailure",
    "ModelAnswer",
    "ModelUse",
    "NetworkFile",
    "NetworkTraffic",
    "NodePrice",
    "Ownership",
    "PlaneFailure",
    "Price",
    "PriceList",
    "PricedBill",
    "PricedLine",
    "PublishedFigure",
    "PublishedRow",
    "ServiceAnswer",
    "SimulatedStep",
    "SourcedValue",
    "SpeculationGain",
    "StoragePart",
    "TrafficPattern",
    "TrafficRates",
    "TrafficTimes",
    "TrainingPart",
    "amount_of",
    "bill_of",
    "bill_of_counts",
    "break_even_hours",
    "cost_of_ownership",
    "hfreduce_limits",
    "host_memory_operations",
    "link_loads",
    "plan_cluster",
    "plan_model",
    "price_bill",
    "published_figures",
    "render_cluster",
    "ring_of",
    "ring_pcie_bandwidth",
    "simulate_traffic",
    "traffic_rates",
    "with_simulation",
]
