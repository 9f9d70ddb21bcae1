"""Which node, or which link, is slower than the others below its leaf."""

from __future__ import annotations

import itertools
import random

import pytest

from fireflyer.validators.core.validation.link_measurements import LinkMeasurements
from fireflyer.validators.core.validation.link_speeds import Pair, slow_links
from fireflyer.validators.core.validation.reports import LinkReport

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


# --- measured again ---


def of_a_leaf(**slow: float) -> LinkMeasurements:
    found = LinkMeasurements()
    for pair, speed in measured(4, 1, **slow).items():
        found.first(pair, "leaf-1", LinkReport(bytes_per_s=speed))
    return found


def again(found: LinkMeasurements, speed: float, wrong: int = 0) -> list[Pair]:
    pairs = found.to_repeat()
    for pair in pairs:
        found.again(pair, LinkReport(bytes_per_s=speed, wrong_blocks=wrong))
    return pairs


def told(found: LinkMeasurements) -> dict[str, list[str]]:
    events: dict[str, list[str]] = {
        names: [str(event.severity) for event in events] for names, events in found.events(1).items()
    }
    return {names: severities for names, severities in events.items() if severities != ["ok"]}


def test_a_link_that_was_slow_once_is_nobodys_fault_and_is_told_and_recorded_with_all_measurements() -> None:
    found = of_a_leaf(n1_n2=0.5)
    assert again(found, USUAL) == again(found, 0.99 * USUAL) == [("n1", "n2")]
    assert found.to_repeat() == []
    assert told(found) == {"n1 n2": ["warn"]}
    assert "slower than the usual of its leaf once of 3 measurements: " in found.events(1)["n1 n2"][0].words
    (link,) = (one for one in found.records(7) if one.repeated)
    (values,) = link.repeated.values()
    assert (link.node, link.seen_ns, values[1:]) == ("n1 n2", 7, (USUAL, 0.99 * USUAL))
    assert values[0] == pytest.approx(0.5 * USUAL, rel=0.05)
    assert list(link.figures.values()) == [0.99 * USUAL], "which counts"
    assert len(found.records(7)) == 6


def test_a_node_whose_links_stay_slow_is_at_fault() -> None:
    found = of_a_leaf(n2=0.5)
    assert again(found, 0.5 * USUAL) == [("n0", "n2"), ("n1", "n2"), ("n2", "n3")]
    assert found.to_repeat() == []
    assert told(found) == {"n2": ["low"]}
    assert found.events(1)["n2"][0].words.endswith("% below the usual of its leaf, also when measured again")


def test_a_link_whose_nodes_were_needed_meanwhile_is_warned_of() -> None:
    found = of_a_leaf(n1_n2=0.5)
    for pair in found.to_repeat():
        found.again(pair, None)
    assert told(found) == {"n1 n2": ["warn"]}
    assert found.events(1)["n1 n2"][0].words.endswith("it could not be measured again")


def test_a_link_whose_two_measurements_do_not_agree_is_warned_of() -> None:
    found = of_a_leaf(n1_n2=0.5)
    again(found, USUAL)
    for pair in found.to_repeat():
        found.again(pair, None)
    assert told(found) == {"n1 n2": ["warn"]}


def test_wrong_blocks_of_a_repetition_count() -> None:
    found = of_a_leaf(n1_n2=0.5)
    again(found, USUAL, wrong=3)
    assert found.events(1)["n1 n2"][0].words == "3 blocks are not what was sent"
    assert told(found) == {"n1 n2": ["high"]}


def test_few_links_are_never_slow_and_never_repeated() -> None:
    found = LinkMeasurements()
    for pair, speed in measured(3, 1, n1=0.1).items():
        found.first(pair, "leaf-1", LinkReport(bytes_per_s=speed))
    assert found.to_repeat() == []
    assert told(found) == {}
