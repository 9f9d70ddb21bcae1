"""Bills of materials of fabrics, and what they cost: to buy, to power, to run for years, beside rent. Pure.

bill = price_bill(bill_of(fabric), prices)
cost_of_ownership(bill, prices, gpus=10_000).per_gpu_hour
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.planning.amounts import Amount, amount_of
from fireflyer.planning.prices import NodePrice, Price, PriceList, cable_names
from fireflyer.topology.fabrics import Counts, Fabric

__all__ = ["BillLine", "CableBill", "CableRow", "Ownership", "PricedBill", "PricedLine", "bill_of", "bill_of_counts"]
__all__ += ["break_even_hours"]
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
    metres: tuple[float, float] | None = None
    """Lengths of cables, metres, spread evenly from the first to the second; None: not known, or no cables."""


class PricedLine(NamedTuple):
    line: BillLine
    price: Amount
    """Price of all pieces of the line together."""
    watts: Amount
    length: str = ""
    """Class of lengths of a cable; empty: its layers have a price."""


class CableRow(msgspec.Struct, frozen=True, kw_only=True):
    """Cables of a class of lengths, whatever they join."""

    length: str
    """Name of the class; empty for those whose layers have a price."""
    links: int
    price_of_one: Amount | None
    """None where they differ."""
    price: Amount
    """Price of all cables of the row together."""
    watts: Amount


class CableBill(msgspec.Struct, frozen=True, kw_only=True):
    """All cables, and how they divide into classes of lengths, the shortest first."""

    by_length: tuple[CableRow, ...]
    links: int
    price: Amount
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

    def cables(self, prices: PriceList) -> CableBill:
        """`prices`: that the bill was priced with."""
        rows = []
        for name in (*(name for name, _ in prices.classes()), ""):
            lines = [one for one in self.lines if one.line.item == "cable" and one.length == name]
            links = sum(one.line.pieces for one in lines)
            if links:
                each = {one.price.over(one.line.pieces) for one in lines}
                rows.append(
                    CableRow(
                        length=name,
                        links=links,
                        price_of_one=each.pop() if len(each) == 1 else None,
                        price=_sum(one.price for one in lines),
                        watts=_sum(one.watts for one in lines),
                    )
                )
        links = sum(row.links for row in rows)
        return CableBill(by_length=tuple(rows), links=links, price=self.price("cable"), watts=self.watts("cable"))


class Ownership(NamedTuple):
    """Cost of having it for the years of the price list."""

    purchase: Amount
    energy: Amount
    upkeep: Amount
    total: Amount
    mean_watts: Amount
    """Mean power of the building: network, nodes at their utilisation, and cooling (`PriceList.pue`)."""
    per_gpu_hour: Amount | None
    """Cost of an hour in which a GPU computes; None: no node has a price with GPUs."""
    per_pflops_hour: Amount | None
    """Cost of an hour of 10^15 FLOPs per second as GPUs deliver them; None: no node has a price with FLOPs."""


def bill_of(
    fabric: Fabric,
    *,
    with_nodes: bool = False,
    frame_switch: bool = False,
    metres: Mapping[str, float | tuple[float, float]] | None = None,
) -> tuple[BillLine, ...]:
    """Switches and cables of a fabric. `frame_switch`: leaf and spine switches are modules of a frame, whose backplane
    joins them, so that there are no cables between them (Fire-Flyer paper, III-C). `metres`: see `NetworkFile`. Raises
    `UsageError` for lengths of cables that the fabric does not have."""
    lines = [BillLine("switch", layer.name, layer.count) for layer in fabric.layers if layer.count]
    kinds = {group.kind for group in fabric.groups}
    known = set()
    for (below, above), links in fabric.links_by_layer().items():
        if not (frame_switch and (below, above) == ("leaf", "spine")):
            names = cable_names(below, above, of_node=below in kinds)
            known.update(names)
            lines.append(BillLine("cable", f"{below}-{above}", links, _lengths(names, metres or {})))
    foreign = next((name for name in metres or {} if name not in known), None)
    if foreign is not None:
        raise UsageError(
            f"{fabric.name} has no cables {foreign}, whose metres are given; it has {', '.join(sorted(known))}"
        )
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


def _lengths(names: Sequence[str], metres: Mapping[str, float | tuple[float, float]]) -> tuple[float, float] | None:
    found = next((metres[name] for name in names if name in metres), None)
    return (found, found) if isinstance(found, int | float) else found


def price_bill(bill: Sequence[BillLine], prices: PriceList, kinds: Sequence[str] = ()) -> PricedBill:
    """Cables of a known length have the price of its class, where the prices have classes, and others that of their
    layers. `kinds`: of nodes, whose cables may have one price for all. Raises `UsageError` for what has no price."""
    lines, flops, gpus = [], 0.0, 0
    for line in bill:
        for price, length, pieces in _priced(line, prices, kinds):
            lines.append(
                PricedLine(
                    line._replace(pieces=pieces),
                    amount_of(price.price, line.name).times(pieces),
                    amount_of(price.watts, line.name).times(pieces),
                    length,
                )
            )
            if isinstance(price, NodePrice):
                gpus += pieces * price.gpus
                flops += pieces * price.gpus * price.gpu_flops
    return PricedBill(tuple(lines), flops, gpus)


def _priced(line: BillLine, prices: PriceList, kinds: Sequence[str]) -> list[tuple[Price, str, int]]:
    """Prices of its pieces, with the class of lengths, and how many pieces have them."""
    if line.metres is None or not prices.lengths:
        return [(_price_of(line, prices, kinds), "", line.pieces)]
    low, high = line.metres
    classes = prices.classes()
    longest = classes[-1][1].most_metres
    if high > longest:
        raise UsageError(
            f"{line.name} cables of {high:g} m are longer than all classes of the prices; add a class of lengths with "
            f"most_metres = {high:g} or more"
        )
    found: list[tuple[Price, str, int]] = []
    before = 0
    for name, one in classes:
        share = (
            float(one.most_metres >= high) if low == high else min(1.0, max(0.0, one.most_metres - low) / (high - low))
        )
        upto = round(line.pieces * share)
        if upto > before:
            found.append((one, name, upto - before))
        before = upto
    return found


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
