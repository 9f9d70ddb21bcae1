"""Answers about a network as a library: they are those of the fabric and of its bill, and what is shipped is found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.planning import (
    Amount,
    CutLinks,
    NetworkFile,
    NodePrice,
    Price,
    PriceList,
    SourcedValue,
    bill_of,
    break_even_hours,
    compare_networks,
    cost_of_ownership,
    fitted_prices,
    load_network,
    load_shape,
    network_costs,
    network_cut,
    network_names,
    network_size,
    network_structure,
    price_bill,
    shape_names,
)
from fireflyer.topology.fabrics import NodeGroup, bisection, diameter, disjoint_paths

GIVEN = NetworkFile(
    name="small", family="two-layer", gbit_per_s=200, radix=8, frame_switch=True,
    nodes=(NodeGroup(kind="gpu", count=12, ports=2), NodeGroup(kind="storage", count=4)),
)  # fmt: skip
FABRIC = GIVEN.build()
OFFER: dict[str, Any] = {"source": "offer", "date": "2024-08"}
PRICES = PriceList(
    currency="USD",
    years=2.0,
    switches={"switch": Price(price=(100.0, 200.0), watts=10.0, **OFFER)},
    cables={"endpoint": Price(price=2.0, watts=1.0, **OFFER)},
    nodes={
        "gpu": NodePrice(price=1000.0, watts=500.0, gpus=8, **OFFER),
        "storage": NodePrice(price=50.0, watts=100.0, **OFFER),
    },
    rent_per_gpu_hour=SourcedValue(value=1.0, **OFFER),
)


def test_the_structure_is_that_of_the_graph() -> None:
    found = network_structure(FABRIC)
    assert (found.nodes, found.endpoints) == ({"gpu": 12, "storage": 4}, 28)
    assert (found.switches, found.switches_by_layer) == (11, {"leaf": 7, "spine": 4})
    assert (found.links, found.links_by_layer) == (28, {"gpu-leaf": 24, "storage-leaf": 4, "leaf-spine": 28})
    assert found.unused_ports == FABRIC.unused_ports == 11 * 8 - 28 - 2 * 28
    assert found.bisection == bisection(FABRIC)
    assert found.bisection_bytes_per_s == found.bisection.links * 25e9
    assert found.endpoints_per_switch == pytest.approx(28 / 11)
    assert (found.most_switches, found.disjoint_paths) == (diameter(FABRIC), disjoint_paths(FABRIC, 0, 15))
    size = network_size(FABRIC)
    assert msgspec.structs.asdict(size).items() <= msgspec.structs.asdict(found).items()
    alone = msgspec.structs.replace(GIVEN, nodes=(NodeGroup(kind="gpu", count=1),)).build()
    assert network_structure(alone).disjoint_paths == 0


def test_distances_of_a_network_that_is_too_large_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.topology.fabrics.properties.MAX_WORK", 10)
    assert network_structure(FABRIC).most_switches is None


def test_a_cut_names_the_links_that_two_vertices_depend_on() -> None:
    cut = network_cut(FABRIC, "storage0", "leaf1")
    (only,) = cut.between
    assert cut.links == only.links == 1
    assert only.below == "storage0"
    assert only.above.startswith("leaf")
    of_leaf = network_cut(FABRIC, "leaf0", "leaf1")
    assert (of_leaf.links, of_leaf.between) == (4, tuple(CutLinks("leaf0", f"spine{spine}", 1) for spine in range(4)))
    with pytest.raises(UsageError, match="both ends are the same"):
        network_cut(FABRIC, "leaf0", "leaf00")
    with pytest.raises(UsageError, match="there is no leaf7; there are gpu0 to gpu11"):
        network_cut(FABRIC, "leaf7", "gpu0")


def test_costs_are_those_of_the_bill() -> None:
    """A frame switch has no cables between its leaf and spine switches."""
    costs = network_costs(GIVEN, FABRIC, PRICES)
    assert costs.network == costs.ownership.purchase == Amount(11 * 100 + 28 * 2, 11 * 200 + 28 * 2)
    assert costs.network_per_endpoint == pytest.approx((1156 / 28, 2256 / 28))
    assert costs.network_watts == Amount(11 * 10 + 28, 11 * 10 + 28)
    assert (costs.currency, costs.years, costs.cables.links) == ("USD", 2.0, 28)
    assert (costs.node_watts, costs.rent_per_gpu_hour, costs.owning_is_cheaper_after_hours) == (None, None, None)
    assert {one.line.item for one in costs.lines} == {"switch", "cable"}


def test_nodes_count_where_they_are_asked_for_and_with_a_rent() -> None:
    kinds = ("gpu", "storage")
    bill = price_bill(bill_of(FABRIC, with_nodes=True, frame_switch=True), PRICES, kinds)
    costs = network_costs(GIVEN, FABRIC, PRICES, with_nodes=True)
    assert costs.ownership == cost_of_ownership(bill, PRICES)
    assert costs.node_watts == Amount(12 * 500 + 4 * 100, 12 * 500 + 4 * 100)
    assert costs.network == network_costs(GIVEN, FABRIC, PRICES).network
    assert costs.rent_per_gpu_hour == Amount(1, 1), "of the prices"
    assert costs.owning_is_cheaper_after_hours == break_even_hours(bill, PRICES, Amount(1, 1))
    rented = network_costs(GIVEN, FABRIC, PRICES, rent_per_gpu_hour=Amount(2, 3))
    assert (rented.ownership, rented.rent_per_gpu_hour) == (costs.ownership, Amount(2, 3))
    assert rented.owning_is_cheaper_after_hours == break_even_hours(bill, PRICES, Amount(2, 3))


def test_networks_beside_each_other_are_as_each_alone() -> None:
    other = msgspec.structs.replace(GIVEN, name="other", radix=16, frame_switch=False)
    prices = msgspec.structs.replace(PRICES, cables={"link": Price(price=5.0, **OFFER), **PRICES.cables})
    first, second = compare_networks(iter((GIVEN, other)), prices)
    assert (first.name, first.size, first.costs) == (
        "small", network_size(FABRIC), network_costs(GIVEN, FABRIC, prices),
    )  # fmt: skip
    assert second.name == "other"
    assert second.size == network_size(other.build())
    assert second.costs is not None
    assert second.costs.cables.links == 28 + second.size.links
    (bare,) = compare_networks([other])
    assert (bare.size, bare.costs) == (second.size, None)


def test_what_is_shipped_is_found_by_its_name() -> None:
    """The published figures build all networks but the one of the training run."""
    networks = {name: load_network(name) for name in network_names()}
    assert len({one.name for one in networks.values()}) == len(networks) == 7
    trained = networks["v3-cluster"].build()
    assert (trained.endpoints, trained.switches) == (2048, 96)
    assert [load_shape(name).layers for name in ("deepseek-v3", "gpt2-medium")] == [61, 24]
    assert {"deepseek-v3", "llama-13b"} <= set(shape_names())
    assert {price.price for price in fitted_prices().switches.values()} == {40_000}
    with pytest.raises(UsageError, match=r"no network 'v4' is shipped; use fire-flyer-2, .*, v3-two-layer"):
        load_network("v4")
    with pytest.raises(UsageError, match=r"no model .*gpt2-medium. is shipped; use deepseek-moe-16b, "):
        load_shape("../models/gpt2-medium")
