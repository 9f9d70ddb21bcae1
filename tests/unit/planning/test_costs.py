"""Bills are the fabric's pieces, and costs follow from prices by sums that anybody can do by hand."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.planning import (
    Amount,
    BillLine,
    LengthClass,
    NetworkFile,
    NodePrice,
    Price,
    PriceList,
    SourcedValue,
    amount_of,
    bill_of,
    break_even_hours,
    cost_of_ownership,
    price_bill,
)
from fireflyer.topology.fabrics import NodeGroup, two_layer_tree

FABRIC = two_layer_tree(
    [NodeGroup(kind="gpu", count=6), NodeGroup(kind="storage", count=2)], radix=4, gbit_per_s=200, name="small"
)


def priced(price: float | tuple[float, float], watts: float = 0.0) -> Price:
    return Price(price=price, watts=watts, source="offer", date="2024-08")


def sourced(value: float | tuple[float, float]) -> SourcedValue:
    return SourcedValue(value=value, source="tariff", date="2024-08")


def prices(**fields: object) -> PriceList:
    node = NodePrice(price=1000.0, watts=500.0, source="offer", date="2024-08", gpus=8, gpu_flops=2e14)
    given_: dict[str, object] = {
        "currency": "USD",
        "switches": {"switch": priced(100.0, 10.0), "spine": priced((200.0, 300.0), 20.0)},
        "cables": {"link": priced(3.0), "node-leaf": priced(2.0), "storage-leaf": priced(1.0)},
        "nodes": {"gpu": node, "storage": NodePrice(price=50.0, watts=100.0, source="offer", date="2024-08")},
    }
    return PriceList(**(given_ | fields))  # type: ignore[arg-type]


def test_a_bill_has_all_pieces_and_a_frame_switch_has_no_cables_inside() -> None:
    assert bill_of(FABRIC) == (
        BillLine("switch", "leaf", 4),
        BillLine("switch", "spine", 2),
        BillLine("cable", "gpu-leaf", 6),
        BillLine("cable", "storage-leaf", 2),
        BillLine("cable", "leaf-spine", 8),
    )
    assert BillLine("cable", "leaf-spine", 8) not in bill_of(FABRIC, frame_switch=True)
    assert bill_of(FABRIC, with_nodes=True)[-2:] == (BillLine("node", "gpu", 6), BillLine("node", "storage", 2))


def test_a_piece_has_its_own_price_or_the_general_one() -> None:
    bill = price_bill(bill_of(FABRIC), prices(), ("gpu", "storage"))
    assert bill.price("switch") == Amount(4 * 100 + 2 * 200, 4 * 100 + 2 * 300)
    assert bill.price("cable") == Amount(6 * 2 + 2 * 1 + 8 * 3, 6 * 2 + 2 * 1 + 8 * 3)
    assert bill.watts() == Amount(4 * 10 + 2 * 20, 4 * 10 + 2 * 20)


COPPER = LengthClass(price=20.0, watts=0.0, source="offer", date="2024-08", most_metres=3.0)
OPTICAL = LengthClass(price=(100.0, 150.0), watts=4.0, source="offer", date="2024-08", most_metres=30.0)
FIBRE = LengthClass(price=500.0, watts=9.0, source="offer", date="2024-08", most_metres=2000.0)
CLASSES = {"fibre": FIBRE, "copper": COPPER, "optical": OPTICAL}


def test_cables_fall_into_classes_of_lengths_with_their_own_prices() -> None:
    """6 and 2 links of nodes of 2 m; 8 between switches from 1 to 9 m, of which 2 of 8 metres are copper."""
    metres: dict[str, float | tuple[float, float]] = {"node-leaf": 2.0, "leaf-spine": (1.0, 9.0)}
    given_ = prices(lengths=CLASSES)
    bill = price_bill(bill_of(FABRIC, metres=metres), given_, ("gpu", "storage"))
    found = bill.cables(given_)
    copper, optical = found.by_length
    assert (copper.length, copper.links, copper.price_of_one) == ("copper", 6 + 2 + 2, Amount(20, 20))
    assert (copper.price, copper.watts) == (Amount(200, 200), Amount(0, 0))
    assert (optical.length, optical.links, optical.price_of_one) == ("optical", 6, Amount(100, 150))
    assert (optical.price, optical.watts) == (Amount(600, 900), Amount(24, 24))
    assert (found.links, found.price, found.watts) == (16, Amount(800, 1100), Amount(24, 24))
    assert bill.price("cable") == found.price
    assert sum(one.line.pieces for one in bill.lines if one.line.item == "cable") == 16


def test_cables_without_a_length_or_classes_have_the_price_of_their_layers() -> None:
    given_ = prices(lengths=CLASSES)
    bill = price_bill(bill_of(FABRIC, metres={"link": 100.0}), given_, ("gpu", "storage"))
    fibre, others = bill.cables(given_).by_length
    assert (fibre.length, fibre.links, fibre.price) == ("fibre", 8, Amount(4000, 4000))
    assert (others.length, others.links, others.price_of_one) == ("", 8, None)
    assert others.price == Amount(6 * 2 + 2 * 1, 6 * 2 + 2 * 1)
    plain = price_bill(bill_of(FABRIC, metres={"link": 100.0}), prices(), ("gpu", "storage"))
    assert plain.price("cable") == Amount(38, 38)


@given(
    low=st.floats(0.1, 50), spread=st.floats(0, 100), links=st.integers(1, 5000),
    most=st.lists(st.floats(0.1, 60), min_size=1, max_size=4, unique=True),
)  # fmt: skip
def test_each_link_is_in_one_class_that_is_long_enough(
    low: float, spread: float, links: int, most: list[float]
) -> None:
    high = low + spread
    classes = {
        f"c{at}": LengthClass(price=1.0, source="offer", date="2024-08", most_metres=one)
        for at, one in enumerate([*most, 200.0])
    }
    given_ = prices(lengths=classes)
    rows = price_bill([BillLine("cable", "leaf-spine", links, (low, high))], given_).cables(given_).by_length
    assert sum(row.links for row in rows) == links
    assert all(classes[row.length].most_metres >= low for row in rows)
    for row in rows:
        shorter = [one.most_metres for one in classes.values() if one.most_metres < classes[row.length].most_metres]
        assert max(shorter, default=0.0) <= high
        if high > low:
            share = (min(high, classes[row.length].most_metres) - max(low, max(shorter, default=0.0))) / (high - low)
            assert row.links == pytest.approx(links * share, abs=1.01)


def test_cables_that_no_class_is_long_enough_for_and_lengths_of_none_are_refused() -> None:
    given_ = prices(lengths=CLASSES)
    with pytest.raises(UsageError, match="leaf-spine cables of 3000 m are longer than all classes"):
        price_bill(bill_of(FABRIC, metres={"link": 3000.0}), given_, ("gpu", "storage"))
    with pytest.raises(UsageError, match="has no cables leaf-core, whose metres are given; it has"):
        bill_of(FABRIC, metres={"leaf-core": 3.0})
    with pytest.raises(UsageError, match="two classes of lengths have the same most_metres"):
        prices(lengths={"a": COPPER, "b": COPPER})
    with pytest.raises(UsageError, match=r"nor link; add one of them, or metres\.leaf-spine to the network"):
        price_bill(bill_of(FABRIC), prices(cables={"endpoint": priced(1.0)}, lengths=CLASSES), ("gpu", "storage"))
    with pytest.raises(UsageError, match=r"most_metres is 0\.0"):
        msgspec.structs.replace(COPPER, most_metres=0.0)
    groups = (NodeGroup(kind="gpu", count=4),)
    for length in (0.0, (5.0, 2.0), float("inf")):
        with pytest.raises(UsageError, match=r"metres.link is .*; write a length above 0, or \[shortest, longest\]"):
            NetworkFile(name="n", family="two-layer", gbit_per_s=200, radix=4, nodes=groups, metres={"link": length})


def test_years_of_ownership() -> None:
    given_ = prices(
        electricity_per_kwh=sourced(0.1),
        pue=sourced((1.1, 1.3)),
        upkeep_per_year=sourced(0.02),
        years=2.0,
        utilisation=0.5,
    )
    bill = price_bill(bill_of(FABRIC, with_nodes=True), given_, ("gpu", "storage"))
    own = cost_of_ownership(bill, given_)
    watts = 80 + (6 * 500 + 2 * 100) * 0.5
    assert own.mean_watts == pytest.approx((watts * 1.1, watts * 1.3))
    assert own.energy.low == pytest.approx(watts * 1.1 / 1000 * 2 * 8766 * 0.1)
    assert own.upkeep.high == pytest.approx(own.purchase.high * 0.02 * 2)
    assert own.total.high == pytest.approx(own.purchase.high + own.energy.high + own.upkeep.high)
    hours = 2 * 8766 * 0.5
    assert own.per_gpu_hour is not None
    assert own.per_gpu_hour.low == pytest.approx(own.total.low / (48 * hours))
    assert own.per_pflops_hour is not None
    assert own.per_pflops_hour.low == pytest.approx(own.total.low / (48 * 0.2 * hours))


def test_without_nodes_there_is_no_gpu_hour() -> None:
    own = cost_of_ownership(price_bill(bill_of(FABRIC), prices(), ("gpu", "storage")), prices())
    assert (own.per_gpu_hour, own.per_pflops_hour) == (None, None)
    with pytest.raises(UsageError, match="no GPUs"):
        break_even_hours(price_bill(bill_of(FABRIC), prices(), ("gpu", "storage")), prices(), Amount(1, 1))


def test_at_the_break_even_owning_has_cost_as_much_as_renting() -> None:
    given_ = prices(electricity_per_kwh=sourced(0.1), upkeep_per_year=sourced(0.05))
    bill = price_bill(bill_of(FABRIC, with_nodes=True), given_, ("gpu", "storage"))
    hours = break_even_hours(bill, given_, Amount(0.02, 0.02))
    assert hours is not None
    own = cost_of_ownership(bill, given_)
    share = hours.low / (given_.years * 8766)
    assert own.purchase.low + (own.energy.low + own.upkeep.low) * share == pytest.approx(0.02 * 48 * hours.low)
    assert break_even_hours(bill, given_, Amount(0.0001, 0.0001)) is None
    ranged = break_even_hours(bill, given_, Amount(0.01, 0.02))
    assert ranged is not None
    assert ranged.low == hours.low
    assert ranged.high > 2 * ranged.low, "half the rent saves less than half, since energy costs the same"
    assert break_even_hours(bill, given_, Amount(0.0001, 0.02)) == (hours.low, math.inf), "never at the lowest rent"


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)).map(sorted), min_size=2, max_size=2), st.floats(0.1, 9))
def test_results_of_values_between_bounds_lie_between_the_bounds_of_the_results(
    bounds: list[list[float]], factor: float
) -> None:
    a, b = (Amount(*pair) for pair in bounds)
    for at in (0.0, 0.3, 1.0):
        x, y = a.low + (a.high - a.low) * at, b.low + (b.high - b.low) * (1 - at)
        for result, value in ((a.plus(b), x + y), (a.times(b), x * y), (a.times(factor), x * factor)):
            assert result.low <= value * (1 + 1e-9) + 1e-9
            assert value <= result.high * (1 + 1e-9) + 1e-9
        divisor = Amount(b.low + 1, b.high + 1)
        assert a.over(divisor).low <= x / (y + 1) * (1 + 1e-9) + 1e-9
    with pytest.raises(UsageError, match="may be 0"):
        a.over(Amount(0, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('currency = "USD"\npue = { value = 0.9, source = "a", date = "b" }', "1 or more"),
        ('currency = "USD"\npue = { value = 1.2, source = "", date = "b" }', "a value has no source or no date"),
        ('currency = "USD"\nupkeep_per_year = { value = 0.1, source = "a" }', "missing required field `date`"),
        ('currency = "USD"\nrent_per_gpu_hour = 1.5', "Expected `object | null`"),
        ('currency = "USD"\nyears = 0', "more than 0"),
        ('currency = "USD"\nutilisation = 2', "at most 1"),
        (
            'currency = "USD"\nelectricity_per_kwh = { value = [2, 1], source = "a", date = "b" }',
            r"or \[low, high\]",
        ),
        ('currency = "USD"\n[switches.leaf]\nprice = -1\nsource = "a"\ndate = "2024"', "price is -1"),
        ('currency = "USD"\n[switches.leaf]\nprice = 1\nsource = ""\ndate = "2024"', "no source or no date"),
        ('currency = "USD"\nspeed = 3', "unknown field"),
    ],
)
def test_a_wrong_list_is_one_line(text: str, words: str) -> None:
    with pytest.raises((UsageError, msgspec.ValidationError), match=words):
        msgspec.toml.decode(text, type=PriceList)


def test_what_has_no_price_is_named() -> None:
    with pytest.raises(UsageError, match=r"no switches.leaf, nor switches.switch"):
        price_bill(bill_of(FABRIC), prices(switches={}), ("gpu", "storage"))
    with pytest.raises(UsageError, match=r"no cables.gpu-leaf, nor node-leaf nor endpoint"):
        price_bill(bill_of(FABRIC), prices(cables={}), ("gpu", "storage"))
    with pytest.raises(UsageError, match=r"no nodes.gpu"):
        price_bill(bill_of(FABRIC, with_nodes=True), prices(nodes={}), ("gpu", "storage"))


def test_amounts_are_printed_as_people_write_them() -> None:
    assert str(amount_of(1234.5, "price")) == "1,234"
    assert str(amount_of((2.0, 30_000.0), "price")) == "2 to 30,000"
    assert str(Amount(3000.0, math.inf)) == "3,000 or more"
