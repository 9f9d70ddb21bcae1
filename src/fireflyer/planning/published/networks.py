"""Published figures about networks and their cost. Pure."""

from __future__ import annotations

from functools import cache

from fireflyer.base.errors import UsageError
from fireflyer.base.units import GIB
from fireflyer.netsim import LATENCIES, LatencyName, Settings, simulate
from fireflyer.planning.amounts import Amount
from fireflyer.planning.costs import BillLine, bill_of, bill_of_counts, price_bill
from fireflyer.planning.prices import PriceList
from fireflyer.planning.published.figure import PublishedFigure, PublishedRow, row
from fireflyer.planning.shipped import load_network
from fireflyer.topology.fabrics import (
    Counts,
    NodeGroup,
    counts_of,
    dragonfly_counts,
    slim_fly_counts,
    three_layer_tree,
    two_layer_tree,
    zones,
)
from fireflyer.topology.traffic import Transfer

__all__ = ["FIRE_FLYER", "V3", "architecture_costs", "latencies", "network_costs", "next_generation", "storage"]
__all__ += ["topologies"]

FIRE_FLYER = "Fire-Flyer AI-HPC, arXiv:2408.14158"
V3 = "Insights into DeepSeek-V3, arXiv:2505.09343"


def _gpus(count: int) -> tuple[NodeGroup, ...]:
    return (NodeGroup(kind="gpu", count=count),)


def architecture_costs() -> PublishedFigure:
    relative = (107 / 131 + 220 / 263) / 2
    return PublishedFigure(
        "ff-table-2",
        "PCIe A100 beside DGX-A100",
        f"{FIRE_FLYER}, table II",
        (
            row("TF32 GEMM of ours", 107, None, "measured by the authors", unit="TFLOPS"),
            row("TF32 GEMM of DGX", 131, None, "measured by the authors", unit="TFLOPS"),
            row("FP16 GEMM of ours", 220, None, "measured by the authors", unit="TFLOPS"),
            row("FP16 GEMM of DGX", 263, None, "measured by the authors", unit="TFLOPS"),
            row("relative performance", 0.83, relative, "mean of 107/131 and 220/263", step=0.01),
            row("node relative price", 0.60, None, "the authors' prices"),
            row("cost-performance ratio", 1.38, 0.83 / 0.60, "0.83 / 0.60", step=0.01),
            row("power relative to DGX", 0.60, 2500 / 4200, "2500 W / 4200 W", step=0.01),
            row(
                "power of the cluster, just over",
                3,
                1250 * 2500 / 1e6,
                "1,250 GPU nodes x 2500 W; switches and other nodes are not told, and all is below 4 MW",
                unit="MW",
                printed="cut",
            ),
        ),
    )


@cache
def network_costs() -> PublishedFigure:
    ours, dgx = (load_network(name).build() for name in ("fire-flyer-2", "fire-flyer-dgx"))
    three = three_layer_tree(_gpus(1600), radix=40, gbit_per_s=200)
    least = three_layer_tree(_gpus(10_000), radix=40, gbit_per_s=200)
    return PublishedFigure(
        "ff-table-3",
        "switches of the two-zone network and of three-layer fat-trees",
        f"{FIRE_FLYER}, III and table III",
        (
            row("switches of two zones", 122, ours.switches, "2 x (40 leaf + 20 spine) + 2"),
            row("switches, 1,600 endpoints in three layers", 200, three.switches, "80 leaf + 80 spine + 40 core"),
            row(
                "switches, 10,000 endpoints in three layers",
                1320,
                dgx.switches,
                "500 + 500 + 320; the 320 are an input",
            ),
            row(
                "core switches that the 10,000 need", 320, least.switches - 1000, "20 sets of 13; 250 by counting ports"
            ),
            row(
                "saved of the network's costs",
                40,
                100 * (1 - ours.switches / three.switches),
                "1 - 122/200, by the number of switches; the paper does not say what it counts",
                unit="%",
            ),
            row("relative price of network and nodes", 0.504, 11600 / 23000, "11600 / 23000", step=0.001),
            _zone_ports(),
        ),
    )


def _zone_ports() -> PublishedRow:
    """1,250 GPU nodes and 180 storage servers."""
    storage = (NodeGroup(kind="storage", count=180, ports=2),)
    try:
        zones(_gpus(1250), radix=40, gbit_per_s=200, between=0, shared=storage)
    except UsageError as error:
        how = f"625 GPU nodes + 180 storage servers: {str(error).partition(': ')[2]}"
    else:
        how = "625 GPU nodes + 180 storage servers"
    return row("ports of a zone that 1,250 GPU nodes and 180 storage servers need", 800, 625 + 180, how)


@cache
def next_generation() -> PublishedFigure:
    fabric = load_network("fire-flyer-next").build()
    return PublishedFigure(
        "ff-section-9",
        "next generation: 4 planes of 128-port switches",
        f"{FIRE_FLYER}, IX",
        (row("GPUs, one port each", 32_768, fabric.endpoints, "4 x 128^2 / 2"),),
    )


def storage() -> PublishedFigure:
    return PublishedFigure(
        "ff-storage",
        "storage of Fire-Flyer 2",
        f"{FIRE_FLYER}, VI-B",
        (
            row(
                "bandwidth of all storage ports",
                9.0,
                360 * 25e9 / 1e12,
                "180 servers x 2 x 25 GB/s",
                unit="TB/s",
                step=0.1,
            ),
            row(
                "capacity with two replicas, over",
                20,
                2880 * 15.36e12 / 2 / (GIB * (1 << 20)),
                "2,880 x 15.36 TB / 2 = 22.1 PB = 19.6 PiB; PB and PiB are mixed up",
                unit="PiB",
                printed="at least",
            ),
        ),
    )


def topologies(prices: PriceList) -> PublishedFigure:
    """Raises `UsageError` for prices in another currency, or without one of what the table has."""
    if prices.currency != "USD":
        raise UsageError(f"the paper's costs are in USD, and the prices in {prices.currency}; give prices in USD")
    rows = []
    published = {
        "FT2": (2_048, 96, 2_048, 9, 4.39, 0.01),
        "MPFT": (16_384, 768, 16_384, 72, 4.39, 0.01),
        "FT3": (65_536, 5_120, 131_072, 491, 7.5, 0.1),
        "SF": (32_928, 1_568, 32_928, 146, 4.4, 0.1),
        "DF": (261_632, 16_352, 384_272, 1_522, 5.8, 0.1),
    }
    for name, (endpoints, switches, links, cost, each, step) in published.items():
        counts, bill = _table_3()[name]
        price = price_bill(bill, prices, ("gpu",)).price()
        rows += _topology(name, counts, price, (endpoints, switches, links, cost), each, step)
    return PublishedFigure("v3-table-3", "network topologies", f"{V3}, table 3", tuple(rows))


@cache  # other prices change no count
def _table_3() -> dict[str, tuple[Counts, tuple[BillLine, ...]]]:
    ideal = {
        "SF": slim_fly_counts(28),
        "DF": dragonfly_counts(nodes_per_switch=16, group_switches=32, global_links=16, groups=511),
    }
    names = {"FT2": "v3-two-layer", "MPFT": "v3-multi-plane", "FT3": "v3-three-layer"}
    built = {name: load_network(shipped).build() for name, shipped in names.items()}
    return {name: (counts, bill_of_counts(counts)) for name, counts in ideal.items()} | {
        name: (counts_of(fabric), bill_of(fabric)) for name, fabric in built.items()
    }


@cache
def latencies() -> PublishedFigure:
    """Of 64 bytes in a tree, simulated: nodes at one leaf switch, and at two."""
    published: dict[LatencyName, tuple[float, float]] = {"roce": (3.6, 5.6), "infiniband": (2.8, 3.7)}
    fabric = two_layer_tree(_gpus(8), radix=4, gbit_per_s=400)
    pairs = (("same leaf switch", 1), ("across leaf switches", 7))
    rows = []
    for name, printed in published.items():
        one = LATENCIES[name]
        settings = Settings(message_latency_ns=one.message_ns, switch_latency_ns=one.switch_ns)
        for (where, target), latency in zip(pairs, printed, strict=True):
            run = simulate(fabric, [Transfer(id=0, source=0, target=target, nbytes=64)], settings)
            how = f"{one.message_ns / 1000:g} us and {one.switch_ns / 1000:g} of each switch, which fit two figures"
            rows.append(row(f"{name}, {where}", latency, run.makespan_s * 1e6, how, unit="us", step=0.1))
    rows.append(row("NVLink", 3.33, None, "measured by the authors", unit="us"))
    return PublishedFigure("v3-table-5", "latency of 64 bytes between processors", f"{V3}, table 5", tuple(rows))


def _topology(
    name: str, counts: Counts, price: Amount, published: tuple[int, int, int, int], each: float, step: float
) -> list[PublishedRow]:
    endpoints, switches, links, cost = published
    thousands = price.over(1000 * counts.endpoints)
    how = f"not constructible: {counts.why_not_built}" if counts.why_not_built else "counted"
    priced = "switches, links and endpoints by their prices, which the table does not determine"
    return [
        row(f"{name}: endpoints", endpoints, counts.endpoints, how),
        row(f"{name}: switches", switches, counts.switches, how),
        row(f"{name}: links", links, counts.links, how),
        row(f"{name}: cost", cost, price.times(1e-6), priced, unit="M$", depends_on="prices"),
        row(f"{name}: cost of an endpoint", each, thousands, priced, unit="k$", step=step, depends_on="prices"),
    ]
