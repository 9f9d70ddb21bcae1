"""Rates are max-min fair: the definition itself, and what follows from it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.netsim import Incidence, max_min_rates

Rows = list[tuple[tuple[int, ...], tuple[float, ...]]]


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[float], Rows]:
    links = draw(st.integers(1, 6))
    capacities = draw(st.lists(st.floats(0.5, 100.0), min_size=links, max_size=links))
    used = st.lists(st.integers(0, links - 1), min_size=1, max_size=links, unique=True)
    rows = [
        (tuple(one), tuple(draw(st.lists(st.sampled_from((0.25, 0.5, 1.0)), min_size=len(one), max_size=len(one)))))
        for one in draw(st.lists(used, min_size=1, max_size=8))
    ]
    return capacities, rows


def rates_of(capacities: list[float], rows: Rows) -> list[float]:
    return [float(one) for one in max_min_rates(np.array(capacities), Incidence.of(rows))]


def loads(capacities: list[float], rows: Rows, rates: list[float]) -> list[float]:
    found = [0.0] * len(capacities)
    for (links, weights), rate in zip(rows, rates, strict=True):
        for link, weight in zip(links, weights, strict=True):
            found[link] += weight * rate
    return found


@given(networks())
def test_each_flow_has_a_full_link_on_which_no_flow_has_more(network: tuple[list[float], Rows]) -> None:
    capacities, rows = network
    rates = rates_of(capacities, rows)
    load = loads(capacities, rows, rates)
    assert all(used <= capacity * (1 + 1e-9) for used, capacity in zip(load, capacities, strict=True))
    for (links, _), rate in zip(rows, rates, strict=True):
        full = [link for link in links if load[link] >= capacities[link] * (1 - 1e-9)]
        most = [max(r for (others, _), r in zip(rows, rates, strict=True) if link in others) for link in full]
        assert any(rate >= one * (1 - 1e-9) for one in most)


@given(networks(), st.data())
def test_a_faster_link_never_lowers_the_sorted_rates(network: tuple[list[float], Rows], data: st.DataObject) -> None:
    """Lexicographically, from the lowest."""
    capacities, rows = network
    link = data.draw(st.integers(0, len(capacities) - 1))
    faster = list(capacities)
    faster[link] *= data.draw(st.floats(1.0, 10.0))
    before, after = sorted(rates_of(capacities, rows)), sorted(rates_of(faster, rows))
    for low, high in zip(before, after, strict=True):
        if abs(low - high) > 1e-9 * low:
            assert high > low
            break


@given(networks(), st.randoms(use_true_random=False))
def test_the_order_of_flows_does_not_matter(network: tuple[list[float], Rows], rng: Random) -> None:
    capacities, rows = network
    order = list(range(len(rows)))
    rng.shuffle(order)
    rates = rates_of(capacities, rows)
    assert rates_of(capacities, [rows[one] for one in order]) == pytest.approx([rates[one] for one in order])


@given(networks(), st.floats(0.1, 10.0))
def test_rates_scale_with_the_links(network: tuple[list[float], Rows], factor: float) -> None:
    capacities, rows = network
    scaled = [capacity * factor for capacity in capacities]
    assert rates_of(scaled, rows) == pytest.approx([rate * factor for rate in rates_of(capacities, rows)])


def test_flows_without_links_and_no_flows() -> None:
    assert rates_of([1.0], [((), ()), ((0,), (1.0,))]) == [float("inf"), 1.0]
    assert rates_of([1.0], []) == []


def test_the_textbook_line_of_three_links() -> None:
    """Bertsekas and Gallager, Data Networks: one long flow and short ones."""
    one = (1.0,)
    rows: Rows = [((0, 1, 2), (1.0,) * 3), ((0,), one), ((1,), one), ((1,), one), ((2,), one)]
    assert rates_of([1.0, 1.0, 1.0], rows) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3, 2 / 3])


@given(networks(), st.randoms(use_true_random=False))
def test_flows_and_links_that_are_alike_are_treated_alike(network: tuple[list[float], Rows], rng: Random) -> None:
    """Flows over the same links have the same rate, and numbers of links mean nothing."""
    capacities, rows = network
    rates = rates_of(capacities, [*rows, *rows])
    assert rates[: len(rows)] == pytest.approx(rates[len(rows) :])
    places = list(range(len(capacities)))
    rng.shuffle(places)
    moved = [0.0] * len(capacities)
    for link, place in enumerate(places):
        moved[place] = capacities[link]
    renamed: Rows = [(tuple(places[link] for link in links), weights) for links, weights in rows]
    assert rates_of(moved, renamed) == pytest.approx(rates_of(capacities, rows))
