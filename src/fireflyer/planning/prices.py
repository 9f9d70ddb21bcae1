"""`PriceList`: what things cost and draw, as a TOML file gives them. Pure.

A price is an input: each has its source and date, and may be a range. What a bill names and the list lacks is an error,
not a zero.
"""

from __future__ import annotations

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.planning.amounts import Amount, amount_of

__all__ = ["NodePrice", "Price", "PriceList", "SourcedValue"]


class SourcedValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input that is no price of a piece: of electricity, of rent, a ratio."""

    value: float | tuple[float, float]
    """Two numbers are a range."""
    source: str
    date: str
    """When the source said so: 2024-08."""

    def __post_init__(self) -> None:
        amount_of(self.value, "value")
        _check_source("a value", self.source, self.date)

    @property
    def amount(self) -> Amount:
        return amount_of(self.value, "value")


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price of one piece."""

    price: float | tuple[float, float]
    """In the currency of the list; two numbers are a range."""
    watts: float | tuple[float, float] = 0.0
    source: str
    date: str
    """When the source said so: 2024-08."""

    def __post_init__(self) -> None:
        amount_of(self.price, "price")
        amount_of(self.watts, "watts")
        _check_source("a price", self.source, self.date)


class NodePrice(Price, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price of a node of one kind, and what it computes."""

    gpus: int = 0
    gpu_flops: float = 0.0
    """FLOPs per second that a GPU delivers, as measured by a large matrix product."""


class PriceList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of switches by layer, of cables by the layers that they join (`leaf-spine`; `node-leaf` for all nodes),
    and of nodes by kind. `switch`, `link` and `endpoint` stand for what has no price of its own."""

    currency: str
    switches: dict[str, Price] = {}
    cables: dict[str, Price] = {}
    """Of one link with what is plugged into both ends."""
    nodes: dict[str, NodePrice] = {}
    electricity_per_kwh: SourcedValue | None = None
    """None: it costs nothing."""
    pue: SourcedValue | None = None
    """Power of the building over that of its machines; None: 1."""
    upkeep_per_year: SourcedValue | None = None
    """Share of the price of all equipment: repairs, spares, staff; None: nothing."""
    rent_per_gpu_hour: SourcedValue | None = None
    """Of GPUs of others, beside which owning is put; None: beside nothing."""
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

    def of_switch(self, layer: str) -> Price:
        """Raises `UsageError`."""
        return self._of(self.switches, layer, "switch", "switches")

    def of_cable(self, below: str, above: str, *, of_node: bool) -> Price:
        """Raises `UsageError`."""
        names = list(dict.fromkeys([f"{below}-{above}", *([f"node-{above}", "endpoint"] if of_node else ["link"])]))
        for name in names:
            if name in self.cables:
                return self.cables[name]
        raise UsageError(f"the prices have no cables.{names[0]}, nor {' nor '.join(names[1:])}; add one of them")

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
