"""Bills of materials of fabrics, and what they cost: to buy, to power, to run for years, beside rent. Pure.

bill = price_bill(bill_of(fabric), prices)
cost_of_ownership(bill, prices, gpus=10_000).per_gpu_hour
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.planning.amounts import Amount, amount_of
from fireflyer.planning.prices import NodePrice, Price, PriceList
from fireflyer.topology.fabrics import Counts, Fabric

__all__ = ["BillLine", "Ownership", "PricedBill", "PricedLine", "bill_of", "bill_of_counts", "break_even_hours"]
__all__ += ["cost_of_ownership", "price_bill"]

HOURS_PER_YEAR: Final = 8766.0
COUNTED_NODE: Final = "node"
"""Of which `bill_of_counts` has cables."""
Item = Literal["switch", "cable", "node"]


class BillLine(NamedTuple):
    item: Item
    name: str
    """Layer of switches, layers that cables join, kind of nodes."""
    pieces: int


class PricedLine(NamedTuple):
    line: BillLine
    price: Amount
    """Of all pieces."""
    watts: Amount


class PricedBill(NamedTuple):
    lines: tuple[PricedLine, ...]
    flops: float
    """FLOPs per second of all GPUs of priced nodes."""
    gpus: int

    def price(self, *items: Item) -> Amount:
        """Price of these items; of all where none is named."""
        return _sum(one.price for one in self.lines if not items or one.line.item in items)

    def watts(self, *items: Item) -> Amount:
        return _sum(one.watts for one in self.lines if not items or one.line.item in items)


class Ownership(NamedTuple):
    """Cost of having it for the years of the price list."""

    purchase: Amount
    energy: Amount
    upkeep: Amount
    total: Amount
    mean_watts: Amount
    """Of the building."""
    per_gpu_hour: Amount | None
    """Of an hour in which a GPU computes; None without priced nodes, as the next."""
    per_pflops_hour: Amount | None
    """Of an hour of a PFLOP per second as delivered."""


def bill_of(fabric: Fabric, *, with_nodes: bool = False, frame_switch: bool = False) -> tuple[BillLine, ...]:
    """Switches and cables of a fabric. `frame_switch`: leaf and spine switches are modules of a frame, whose backplane
    joins them, so that there are no cables between them (Fire-Flyer paper, III-C)."""
    lines = [BillLine("switch", layer.name, layer.count) for layer in fabric.layers if layer.count]
    for (below, above), links in fabric.links_by_layer().items():
        if not (frame_switch and (below, above) == ("leaf", "spine")):
            lines.append(BillLine("cable", f"{below}-{above}", links))
    if with_nodes:
        lines += [BillLine("node", group.kind, group.count) for group in fabric.groups]
    return tuple(lines)


def bill_of_counts(counts: Counts) -> tuple[BillLine, ...]:
    """Switches and cables of a network that is known by its numbers alone: a list has their prices as `switch`, `link`
    and `endpoint`."""
    return (
        BillLine("switch", "switch", counts.switches),
        BillLine("cable", "switch-switch", counts.links),
        BillLine("cable", f"{COUNTED_NODE}-switch", counts.endpoints),
    )


def price_bill(bill: Sequence[BillLine], prices: PriceList, kinds: Sequence[str] = ()) -> PricedBill:
    """`kinds`: of nodes, whose cables may have one price for all. Raises `UsageError` for what has no price."""
    lines, flops, gpus = [], 0.0, 0
    for line in bill:
        price = _price_of(line, prices, kinds)
        lines.append(
            PricedLine(
                line,
                amount_of(price.price, line.name).times(line.pieces),
                amount_of(price.watts, line.name).times(line.pieces),
            )
        )
        if isinstance(price, NodePrice):
            gpus += line.pieces * price.gpus
            flops += line.pieces * price.gpus * price.gpu_flops
    return PricedBill(tuple(lines), flops, gpus)


def _price_of(line: BillLine, prices: PriceList, kinds: Sequence[str]) -> Price:
    if line.item == "switch":
        return prices.of_switch(line.name)
    if line.item == "node":
        return prices.of_node(line.name)
    below, _, above = line.name.rpartition("-")
    return prices.of_cable(below, above, of_node=below in kinds or below == COUNTED_NODE)


def cost_of_ownership(bill: PricedBill, prices: PriceList) -> Ownership:
    """Purchase, energy and upkeep over `prices.years`."""
    purchase = bill.price()
    watts = bill.watts("switch", "cable").plus(bill.watts("node").times(prices.utilisation))
    building = watts.times(prices.power_ratio)
    energy = building.times(HOURS_PER_YEAR * prices.years / 1000).times(prices.per_kwh)
    upkeep = purchase.times(prices.upkeep).times(prices.years)
    total = purchase.plus(energy).plus(upkeep)
    hours = HOURS_PER_YEAR * prices.years * prices.utilisation
    return Ownership(
        purchase,
        energy,
        upkeep,
        total,
        building,
        total.over(hours * bill.gpus) if bill.gpus else None,
        total.over(hours * bill.flops / 1e15) if bill.flops else None,
    )


def break_even_hours(bill: PricedBill, prices: PriceList, rent_per_gpu_hour: Amount) -> Amount | None:
    """Hours of use after which having it has cost less than renting as many GPUs by the hour. `low` is with the lowest
    costs and the highest rent, `high` with the opposite; it is infinite where owning then never costs less, since an
    hour of energy and upkeep costs as much as the rent. None: it never does, whatever the inputs are between their
    bounds. Raises `UsageError` without priced GPUs."""
    if not bill.gpus:
        raise UsageError("the bill has no GPUs; give prices of nodes with gpus = 8")
    bounds = []
    own = cost_of_ownership(bill, prices)
    hours = HOURS_PER_YEAR * prices.years * prices.utilisation
    for purchase, running, rent in (
        (own.purchase.low, own.energy.low + own.upkeep.low, rent_per_gpu_hour.high),
        (own.purchase.high, own.energy.high + own.upkeep.high, rent_per_gpu_hour.low),
    ):
        saved = rent * bill.gpus - running / hours
        bounds.append(purchase / saved if saved > 0 else math.inf)
    return None if math.isinf(bounds[0]) else Amount(*bounds)


def _sum(amounts: Iterable[Amount]) -> Amount:
    found = Amount(0.0, 0.0)
    for amount in amounts:
        found = found.plus(amount)
    return found
