"""Lemon nodes, beside the test that knows the rates (`tests.support.reliability.lemon_fleet`).

The fleets of these tests are none of those that the prior was chosen with.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from tests.support.reliability.lemon_fleet import draw_fleet, known_rates_threshold

from fireflyer.analytics.reliability.lemons import NodeSignals, find_lemons
from fireflyer.base.errors import UsageError


class Found(NamedTuple):
    precision: float
    recall: float
    known_rates_recall: float


def found_in(seeds: range, ratio: float, days: float) -> Found:
    """Over all fleets together, of what happened in the last `days` of their 90."""
    threshold = known_rates_threshold(ratio, days, 0.85)
    right = wrong = lemons = known = 0
    for seed in seeds:
        fleet = draw_fleet(seed, ratio)
        counts = Counter(one.node for one in fleet.incidents if one.at_day >= fleet.days - days)
        signals = [NodeSignals(node=str(node), days=days, incidents=counts[node]) for node in range(fleet.nodes)]
        proposed = {int(one.signals.node) for one in find_lemons(signals).proposals}
        right += len(proposed & fleet.lemons)
        wrong += len(proposed - fleet.lemons)
        lemons += len(fleet.lemons)
        known += sum(counts[node] >= threshold for node in fleet.lemons)
    return Found(right / max(1, right + wrong), right / lemons, known / lemons)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [5.0, 10.0, 20.0])
def test_most_proposals_are_lemons_and_most_that_can_be_found_are_proposed(ratio: float) -> None:
    found = found_in(range(2000, 2060), ratio, 90.0)
    assert found.precision >= 0.85
    assert found.recall >= 0.8 * found.known_rates_recall


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [10.0, 20.0])
def test_four_weeks_are_enough_for_nodes_that_fail_ten_times_as_often(ratio: float) -> None:
    """Of nodes that fail five times as often, four weeks show 0.2 % even to the test that knows the rates."""
    found = found_in(range(2000, 2060), ratio, 28.0)
    assert found.precision >= 0.85
    assert found.recall >= 0.8 * found.known_rates_recall


def test_lemons_of_a_few_fleets_are_found() -> None:
    found = found_in(range(1000, 1005), 20.0, 90.0)
    assert found.precision >= 0.8
    assert found.recall >= 0.9


def fleet_of(counts: list[int]) -> list[NodeSignals]:
    return [NodeSignals(node=f"gpu{number:04}", days=28, incidents=count) for number, count in enumerate(counts)]


def test_a_fleet_without_lemons_has_no_proposal() -> None:
    report = find_lemons(fleet_of([1] * 30 + [0] * 970))
    assert not report.proposals
    assert report.incidents_per_node_day == pytest.approx(0.03 / 28, rel=0.2)
    assert not find_lemons(fleet_of([0] * 10)).proposals
    assert not find_lemons(fleet_of([1])).proposals


def test_nodes_that_all_fail_are_a_bad_fleet_and_no_lemons() -> None:
    assert not find_lemons(fleet_of([6, 7, 5, 8, 6, 7] * 50)).proposals


def test_a_proposal_says_why_and_nodes_with_the_same_history_are_proposed_together() -> None:
    fleet = fleet_of([0] * 900 + [1] * 90)
    bad = [
        NodeSignals(
            node=name, days=28, incidents=9, xid_cnt=3, out_count=5, single_node_node_fails=4, single_node_jobs=8
        )
        for name in ("gpu9001", "gpu9002")
    ]
    report = find_lemons([*fleet, *bad])
    assert [one.signals.node for one in report.proposals] == ["gpu9001", "gpu9002"]
    proposal = report.proposals[0]
    assert proposal.probability > 0.99
    assert proposal.times > 50
    assert proposal.why[0].startswith("9 incidents in 28 days, where a node like the others has 0.0")
    assert "share of the jobs of one node that failed on it: 50%, more than 99.8% of the nodes have" in proposal.why
    assert report.expected_false < 0.02


def test_what_users_exclude_is_no_incident() -> None:
    fleet = fleet_of([0] * 900 + [1] * 90)
    excluded = NodeSignals(node="disliked", days=28, incidents=1, excl_jobid_count=400)
    assert not find_lemons([*fleet, excluded]).proposals


def test_a_node_that_was_there_for_a_day_is_compared_with_a_day() -> None:
    fleet = [*fleet_of([0] * 900 + [1] * 95 + [2] * 5), NodeSignals(node="new", days=1, incidents=4)]
    assert [one.signals.node for one in find_lemons(fleet).proposals] == ["new"]


def test_senseless_input_is_refused() -> None:
    with pytest.raises(UsageError, match="no node"):
        find_lemons([])
    with pytest.raises(UsageError, match="observed"):
        find_lemons([NodeSignals(node="n", days=0, incidents=0)])
    with pytest.raises(UsageError, match="false_share"):
        find_lemons(fleet_of([1]), false_share=1.0)
