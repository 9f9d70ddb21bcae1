"""Planning of clusters: bills of materials and costs of fabrics, limits of nodes, published figures. Pure."""

from fireflyer.planning.amounts import Amount, amount_of
from fireflyer.planning.costs import (
    BillLine,
    Ownership,
    PricedBill,
    PricedLine,
    bill_of,
    break_even_hours,
    cost_of_ownership,
    price_bill,
)
from fireflyer.planning.network_file import NetworkFile
from fireflyer.planning.node_limits import Limits, hfreduce_limits, host_memory_operations, ring_pcie_bandwidth
from fireflyer.planning.prices import NodePrice, Price, PriceList
from fireflyer.planning.published import PublishedFigure, PublishedRow, published_figures

__all__ = [
    "Amount",
    "BillLine",
    "Limits",
    "NetworkFile",
    "NodePrice",
    "Ownership",
    "Price",
    "PriceList",
    "PricedBill",
    "PricedLine",
    "PublishedFigure",
    "PublishedRow",
    "amount_of",
    "bill_of",
    "break_even_hours",
    "cost_of_ownership",
    "hfreduce_limits",
    "host_memory_operations",
    "price_bill",
    "published_figures",
    "ring_pcie_bandwidth",
]
