"""Answers about a network: its size, distances and cuts, what it costs, and both beside those of others. Pure.

given = load_network("fire-flyer-2")
fabric = given.build()
network_structure(fabric).most_switches, network_cut(fabric, "gpu0", "gpu9").links
network_costs(given, fabric, prices, with_nodes=True).ownership.per_gpu_hour
compare_networks([load_network("v3-two-layer"), load_network("v3-multi-plane")])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.planning.amounts import Amount
from fireflyer.planning.costs import (
    CableBill,
    Ownership,
    PricedLine,
    bill_of,
    break_even_hours,
    cost_of_ownership,
    price_bill,
)
from fireflyer.planning.network_file import NetworkFile
from fireflyer.planning.prices import PriceList
from fireflyer.topology.fabrics import (
    Bisection,
    Fabric,
    bisection,
    diameter,
    disjoint_paths,
    minimum_cut,
    vertex_name,
    vertex_named,
)

__all__ = ["ComparedNetwork", "CutLinks", "NetworkCosts", "NetworkCut", "NetworkSize", "NetworkStructure"]
__all__ += ["compare_networks", "network_costs", "network_cut", "network_size", "network_structure"]


class NetworkSize(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes, switches and links of a network, and its bisection."""

    nodes: dict[str, int]
    """Number of nodes by kind."""
    endpoints: int
    """Ports of nodes that are connected."""
    switches: int
    switches_by_layer: dict[str, int]
    links: int
    """Number of links between switches."""
    links_by_layer: dict[str, int]
    """Number of links between a layer, or a kind of node, and the one above: `leaf-spine`, `gpu-leaf`."""
    unused_ports: int
    """Ports of switches that no link uses."""
    bisection: Bisection
    """Links between two halves of the nodes in the worst division, or a bound of them."""
    bisection_bytes_per_s: float
    """Bandwidth of the links of the bisection, in one direction."""

    @property
    def endpoints_per_switch(self) -> float:
        return self.endpoints / self.switches


class NetworkStructure(NetworkSize, frozen=True, kw_only=True):
    """Size of a network, and how far its nodes are apart."""

    most_switches: int | None
    """Most switches on a shortest path between two nodes; None: the network is too large to look at all pairs."""
    disjoint_paths: int
    """Paths between the first and the last node without a common link: one fewer links may fail before these two are
    cut off from each other. 0: there is one node."""


class CutLinks(NamedTuple):
    """All links between two vertices, by their names."""

    below: str
    above: str
    links: int


class NetworkCut(msgspec.Struct, frozen=True, kw_only=True):
    """Fewest links whose failure, of all of them, cuts one vertex off from another."""

    links: int
    """0: nothing joins the two."""
    between: tuple[CutLinks, ...]
    """Links of the cut by their ends: nearest to the first vertex, where several cuts have as few links."""


class NetworkCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a network, or of a network with its nodes, over the years of a price list."""

    currency: str
    years: float
    lines: tuple[PricedLine, ...]
    """The bill of materials with its prices."""
    cables: CableBill
    """Cables by class of lengths."""
    network: Amount
    """Price of switches and cables."""
    network_per_endpoint: Amount
    network_watts: Amount
    """Power of switches and cables."""
    node_watts: Amount | None
    """Power of nodes at work; None: nodes are not counted."""
    ownership: Ownership
    """Cost of all that is counted."""
    rent_per_gpu_hour: Amount | None
    """Rent of a GPU for an hour, with which owning is compared; None: with nothing."""
    owning_is_cheaper_after_hours: Amount | None
    """Hours of use after which owning costs less than renting (`break_even_hours`); None: without a rent, or never."""


class ComparedNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """One network of several, without its nodes."""

    name: str
    size: NetworkSize
    costs: NetworkCosts | None
    """None: without prices."""


def network_size(fabric: Fabric) -> NetworkSize:
    """Count a network."""
    cut = bisection(fabric)
    return NetworkSize(
        nodes={group.kind: group.count for group in fabric.groups},
        endpoints=fabric.endpoints,
        switches=fabric.switches,
        switches_by_layer={layer.name: layer.count for layer in fabric.layers},
        links=fabric.links,
        links_by_layer={f"{below}-{above}": links for (below, above), links in fabric.links_by_layer().items()},
        unused_ports=fabric.unused_ports,
        bisection=cut,
        bisection_bytes_per_s=cut.links * fabric.link_bytes_per_s,
    )


def network_structure(fabric: Fabric) -> NetworkStructure:
    """Count a network, and look how far its nodes are apart, which takes some seconds for 65,536 endpoints."""
    last = fabric.nodes - 1
    try:
        most = diameter(fabric)
    except UsageError:
        most = None
    return NetworkStructure(
        **msgspec.structs.asdict(network_size(fabric)),
        most_switches=most,
        disjoint_paths=disjoint_paths(fabric, 0, last) if last else 0,
    )


def network_cut(fabric: Fabric, a: str, b: str) -> NetworkCut:
    """Find the links that two vertices depend on, named as `topology.fabrics.vertex_name` does: `gpu0`, `leaf3`. Raises
    `UsageError` for a vertex that the network has not, and for twice the same."""
    first, second = vertex_named(fabric, a), vertex_named(fabric, b)
    if first == second:
        raise UsageError("both ends are the same; name two")
    cut = minimum_cut(fabric, first, second)
    return NetworkCut(
        links=cut.links,
        between=tuple(
            CutLinks(vertex_name(fabric, cable.a), vertex_name(fabric, cable.b), cable.links) for cable in cut.cables
        ),
    )


def network_costs(
    given: NetworkFile,
    fabric: Fabric,
    prices: PriceList,
    *,
    with_nodes: bool = False,
    rent_per_gpu_hour: Amount | None = None,
) -> NetworkCosts:
    """Price the fabric that `given` builds. `with_nodes`: nodes count, too, as they do with a rent; the rent is by
    default that of the prices, where nodes count. Raises `UsageError` for what has no price, and with a rent where no
    node has GPUs."""
    with_nodes = with_nodes or rent_per_gpu_hour is not None
    kinds = [group.kind for group in fabric.groups]
    pieces = bill_of(fabric, with_nodes=with_nodes, frame_switch=given.frame_switch, metres=given.metres)
    bill = price_bill(pieces, prices, kinds)
    rent = rent_per_gpu_hour
    if rent is None and with_nodes and prices.rent_per_gpu_hour is not None:
        rent = prices.rent_per_gpu_hour.amount
    network = bill.price("switch", "cable")
    return NetworkCosts(
        currency=prices.currency,
        years=prices.years,
        lines=bill.lines,
        cables=bill.cables(prices),
        network=network,
        network_per_endpoint=network.over(fabric.endpoints),
        network_watts=bill.watts("switch", "cable"),
        node_watts=bill.watts("node") if with_nodes else None,
        ownership=cost_of_ownership(bill, prices),
        rent_per_gpu_hour=rent,
        owning_is_cheaper_after_hours=None if rent is None else break_even_hours(bill, prices, rent),
    )


def compare_networks(networks: Iterable[NetworkFile], prices: PriceList | None = None) -> tuple[ComparedNetwork, ...]:
    """Count and price networks, in their order. Raises `UsageError` for one that cannot be built, and for what has no
    price."""
    return tuple(_compared(one, prices) for one in networks)


def _compared(given: NetworkFile, prices: PriceList | None) -> ComparedNetwork:
    fabric = given.build()
    return ComparedNetwork(
        name=given.name,
        size=network_size(fabric),
        costs=None if prices is None else network_costs(given, fabric, prices),
    )
