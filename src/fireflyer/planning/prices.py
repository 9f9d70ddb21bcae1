"""`PriceList`: what things cost and draw, as a TOML file gives them. Pure.

A price is an input: each has its source and date, and may be a range. What a bill names and the list lacks is an error,
not a zero.
"""

from __future__ import annotations

import math

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.planning.amounts import Amount, amount_of

__all__ = ["LengthClass", "NodePrice", "Price", "PriceList", "SourcedValue", "cable_names"]


class SourcedValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input that is no price of a piece: of electricity, of rent, a ratio."""

    value: float | tuple[float, float]
    """Two numbers are a range."""
    source: str
    date: str
    """Date of the source: 2024-08."""

    def __post_init__(self) -> None:
        amount_of(self.value, "value")
        _check_source("a value", self.source, self.date)

    @property
    def amount(self) -> Amount:
        return amount_of(self.value, "value")


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price of one piece."""

    price: float | tuple[float, float]
    """Price of one piece in the currency of the list; two numbers are a range."""
    watts: float | tuple[float, float] = 0.0
    source: str
    date: str
    """Date of the source: 2024-08."""

    def __post_init__(self) -> None:
        amount_of(self.price, "price")
        amount_of(self.watts, "watts")
        _check_source("a price", self.source, self.date)


class NodePrice(Price, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price of a node of one kind, and what it computes."""

    gpus: int = 0
    gpu_flops: float = 0.0
    """FLOPs per second that a GPU delivers, as measured by a large matrix product."""


class LengthClass(Price, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price of a link of some lengths with what is plugged into both ends: copper in a rack, active optical cables in a
    row, transceivers and fibre between rooms."""

    most_metres: float
    """The longest; it begins where the class below it ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.most_metres < math.inf:
            raise UsageError(f"most_metres is {self.most_metres}; write a length above 0")


def cable_names(below: str, above: str, *, of_node: bool) -> list[str]:
    """Names under which a table has what is said of cables between two layers, the most special one first."""
    general = [f"node-{above}", "endpoint"] if of_node else ["link"]
    return list(dict.fromkeys([f"{below}-{above}", *general]))


class PriceList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of switches by layer, of cables by the layers that they join (`leaf-spine`; `node-leaf` for all nodes),
    and of nodes by kind. `switch`, `link` and `endpoint` stand for what has no price of its own."""

    currency: str
    switches: dict[str, Price] = {}
    cables: dict[str, Price] = {}
    """Prices of one link with what is plugged into both ends, by the layers that it joins."""
    lengths: dict[str, LengthClass] = {}
    """Prices of links whose length the network gives (`metres`), by class; other links have those of `cables`."""
    nodes: dict[str, NodePrice] = {}
    electricity_per_kwh: SourcedValue | None = None
    """None: it costs nothing."""
    pue: SourcedValue | None = None
    """Power of the building over that of its machines; None: 1."""
    upkeep_per_year: SourcedValue | None = None
    """Share of the price of all equipment: repairs, spares, staff; None: nothing."""
    rent_per_gpu_hour: SourcedValue | None = None
    """Rent of a GPU for an hour, with which owning is compared; None: with nothing."""
    years: float = 5.0
    utilisation: float = 1.0
    """Share of the time in which nodes draw their power and compute."""

    def __post_init__(self) -> None:
        if self.power_ratio.low < 1:
            raise UsageError(f"pue is {self.power_ratio}; a building draws at least what its machines do: 1 or more")
        if not 0 < self.years <= 50:
            raise UsageError(f"years is {self.years}; use more than 0 and at most 50")
        if not 0 < self.utilisation <= 1:
            raise UsageError(f"utilisation is {self.utilisation}; use more than 0 and at most 1")
        longest = [one.most_metres for one in self.lengths.values()]
        if len(set(longest)) < len(longest):
            raise UsageError("two classes of lengths have the same most_metres; give each its own")

    def of_switch(self, layer: str) -> Price:
        """Raises `UsageError`."""
        return self._of(self.switches, layer, "switch", "switches")

    def of_cable(self, below: str, above: str, *, of_node: bool) -> Price:
        """Raises `UsageError`."""
        names = cable_names(below, above, of_node=of_node)
        for name in names:
            if name in self.cables:
                return self.cables[name]
        also = f", or metres.{names[0]} to the network, whose class of lengths has a price" if self.lengths else ""
        raise UsageError(f"the prices have no cables.{names[0]}, nor {' nor '.join(names[1:])}; add one of them{also}")

    def classes(self) -> list[tuple[str, LengthClass]]:
        """Classes of lengths with their names, the shortest first."""
        return sorted(self.lengths.items(), key=lambda one: one[1].most_metres)

    def of_node(self, kind: str) -> NodePrice:
        """Raises `UsageError`."""
        if kind not in self.nodes:
            raise UsageError(f"the prices have no nodes.{kind}; add it, or leave out the table of nodes")
        return self.nodes[kind]

    @staticmethod
    def _of(prices: dict[str, Price], name: str, general: str, table: str) -> Price:
        found = prices.get(name, prices.get(general))
        if found is None:
            raise UsageError(f"the prices have no {table}.{name}, nor {table}.{general}; add one of them")
        return found

    @property
    def per_kwh(self) -> Amount:
        return _amount(self.electricity_per_kwh, 0.0)

    @property
    def power_ratio(self) -> Amount:
        """Power of the building over that of its machines."""
        return _amount(self.pue, 1.0)

    @property
    def upkeep(self) -> Amount:
        """Share of the price of all equipment, of a year."""
        return _amount(self.upkeep_per_year, 0.0)


def _amount(given: SourcedValue | None, otherwise: float) -> Amount:
    return Amount(otherwise, otherwise) if given is None else given.amount


def _check_source(what: str, source: str, date: str) -> None:
    if not source or not date:
        raise UsageError(f"{what} has no source or no date; say whose figure it is, and of when")
