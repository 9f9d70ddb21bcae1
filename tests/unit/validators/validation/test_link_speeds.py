"""Which node, or which link, is slower than the others below its leaf."""

from __future__ import annotations

import itertools
import random

import pytest

from fireflyer.validators.core.validation.link_speeds import slow_links

USUAL = 12.5e9


def measured(nodes: int, seed: int, **slow: float) -> dict[tuple[str, str], float]:
    """All pairs with 1 % of noise; `slow`: share of the usual speed of a node (`n1`) or of a link (`n1_n2`)."""
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(nodes)]
    return {
        (a, b): USUAL * rng.gauss(1, 0.01) * min(slow.get(a, 1), slow.get(b, 1), slow.get(f"{a}_{b}", 1))
        for a, b in itertools.combinations(names, 2)
    }


@pytest.mark.parametrize("nodes", [4, 5, 8, 24])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_bad_cable_is_blamed_on_its_node(nodes: int, share: float) -> None:
    for seed in range(20):
        (found,) = slow_links(measured(nodes, seed, n2=share))
        assert found.nodes == ("n2",)
        assert (found.slow, found.measured) == (nodes - 1, nodes - 1)
        assert found.bytes_per_s == pytest.approx(share * USUAL, rel=0.05)
        assert found.usual_bytes_per_s == pytest.approx(USUAL, rel=0.05)


def test_two_bad_nodes_of_eight_are_both_named() -> None:
    assert [found.nodes for found in slow_links(measured(8, 1, n2=0.5, n5=0.7))] == [("n2",), ("n5",)]


def test_one_link_alone_blames_neither_of_its_nodes() -> None:
    (found,) = slow_links(measured(8, 1, n2_n5=0.5))
    assert found.nodes == ("n2", "n5")


def test_noise_is_nobodys_fault() -> None:
    assert all(not slow_links(measured(8, seed)) for seed in range(200))


def test_fewer_than_four_links_say_nothing() -> None:
    assert slow_links(measured(3, 1, n1=0.1)) == []
