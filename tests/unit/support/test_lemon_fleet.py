"""Fleets with lemon nodes have the rates that they say."""

from __future__ import annotations

import pytest
from tests.support.reliability.lemon_fleet import FAILURES_PER_NODE_DAY, draw_fleet, known_rates_threshold, normal_rate


@pytest.mark.parametrize("ratio", [5.0, 10.0, 20.0])
def test_a_fleet_fails_at_its_rate_and_its_lemons_more_often(ratio: float) -> None:
    fleets = [draw_fleet(seed, ratio) for seed in range(10)]
    assert all(len(fleet.lemons) == 24 for fleet in fleets)
    incidents = [incident for fleet in fleets for incident in fleet.incidents]
    node_days = 10 * 2000 * 90
    assert len(incidents) / node_days == pytest.approx(FAILURES_PER_NODE_DAY, rel=0.05)
    of_lemons = sum(incident.node in fleet.lemons for fleet in fleets for incident in fleet.incidents)
    assert of_lemons / (10 * 24 * 90) == pytest.approx(ratio * normal_rate(ratio), rel=0.15)
    assert fleets[0] == draw_fleet(0, ratio), "a seed gives the same fleet"


def test_the_test_that_knows_the_rates_needs_more_failures_where_lemons_are_less_bad() -> None:
    assert [known_rates_threshold(ratio, 90, 0.85) for ratio in (5.0, 10.0, 20.0)] == [5, 5, 4]
    assert [known_rates_threshold(ratio, 28, 0.85) for ratio in (5.0, 10.0, 20.0)] == [5, 4, 3]
