"""A small fleet that fails often, with the loop and without it; and what shows when a part of it does not work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.reliability.lemon_fleet import known_rates_threshold

from fireflyer.analytics.reliability.lemons import WINDOW_DAYS, LemonReport, NodeSignals, Proposal, find_lemons
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.machine import HealthMachine
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.replay.fleet.faults import KINDS, SEEN_SHARE, Fault, draw_plan
from fireflyer.cluster.core.replay.fleet.known_rates import found_by_known_rates
from fireflyer.cluster.core.replay.fleet.lemon_watch import Loop
from fireflyer.cluster.core.replay.fleet.settings import DAY_NS, FleetSettings
from fireflyer.cluster.core.replay.fleet.sharing import launcher_sees
from fireflyer.cluster.core.replay.fleet.simulation import FleetOutcome, RunShares, simulate

SMALL = FleetSettings(nodes=60, days=10, per_1000_node_days=80.0, large_nodes=4)
LEMONS = FleetSettings(
    nodes=60, days=35, demand=0.3, per_1000_node_days=20.0, lemon_share=0.05, lemon_factor=40.0, large_nodes=8
)
SEEDS = (1, 2, 3)
LASTING = Fault(0, KINDS[0], "", True, 0, True, Remedy.RESET, 0.5, SECOND, 0)


def pooled_share(outcomes: Sequence[FleetOutcome]) -> float:
    return sum(one.large.failed for one in outcomes) / sum(one.large.runs for one in outcomes)


@pytest.fixture(scope="module")
def off() -> list[FleetOutcome]:
    return [simulate(SMALL, seed, None) for seed in SEEDS]


def test_a_fleet_without_the_loop_is_the_one_that_was_recorded(off: list[FleetOutcome]) -> None:
    assert off[0].large == RunShares(
        runs=154, by_fault=21, by_same_fault=14, by_check=0, failed=35, failure_share=35 / 154, of_lemons=4
    )
    assert off[0].lemons is None


def test_the_loop_halves_the_share_of_large_runs_that_fail(off: list[FleetOutcome]) -> None:
    on = [simulate(SMALL, seed, Loop()) for seed in SEEDS]
    assert pooled_share(on) <= 0.5 * pooled_share(off)
    assert all(one.drains for one in on)
    assert sum(one.large.by_same_fault for one in on) < 0.2 * sum(one.large.by_same_fault for one in off)
    assert on[0] == simulate(SMALL, SEEDS[0], Loop()), "a seed gives the same fleet"
    assert not sum(one.large.by_check for one in on), "no run begins before checks know of the fault"


def test_a_run_that_begins_before_the_checks_after_a_failure_have_answered_is_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HealthMachine, "_run_failed", lambda *_: None)
    on = [simulate(SMALL, seed, Loop()) for seed in SEEDS]
    assert sum(one.large.by_check for one in on)


def test_the_launcher_excludes_nodes_for_what_it_sees_itself_whether_health_checks_run_or_not() -> None:
    kinds = {kind.cause or kind.check: kind for kind in KINDS}
    seen = {name for name, kind in kinds.items() if launcher_sees(LASTING._replace(kind=kind))}
    assert seen == {"uncorrected", "down"}
    assert not launcher_sees(LASTING._replace(kind=kinds["down"], lasts=False)), "a flash cut is over when it looks"


def test_lemons_are_judged_over_the_window_of_the_report() -> None:
    loop = Loop(detector=nobody)
    simulate(FleetSettings(nodes=40, days=1, large_nodes=8), 1, loop)
    loop._incidents = {3: [DAY_NS, 60 * DAY_NS, 100 * DAY_NS]}
    signals = loop._signals(3, (10 + WINDOW_DAYS) * DAY_NS)
    assert (signals.incidents, signals.days) == (2, WINDOW_DAYS)
    loop._since_ns[3] = 99 * DAY_NS
    assert (loop._signals(3, 101 * DAY_NS).incidents, loop._signals(3, 101 * DAY_NS).days) == (1, 2)


def test_checks_that_take_no_node_out_change_nothing(off: list[FleetOutcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HealthMachine, "handle", lambda *_: [])
    on = [simulate(SMALL, seed, Loop(detector=nobody)) for seed in SEEDS]
    assert not any(one.drains for one in on)
    assert pooled_share(on) == pytest.approx(pooled_share(off), abs=0.01), "the scheduler is asked at more instants"


def nobody(fleet: Sequence[NodeSignals]) -> LemonReport:
    return LemonReport(nodes=len(fleet), incidents_per_node_day=0.0, expected_false=0.0, proposals=())


def anybody(fleet: Sequence[NodeSignals]) -> LemonReport:
    """Each seventh node, whatever it did."""
    accused = tuple(
        Proposal(signals=one, probability=1.0, expected=0.0, times=0.0, why=()) for one in fleet[:: len(fleet) // 8]
    )
    return LemonReport(nodes=len(fleet), incidents_per_node_day=0.0, expected_false=0.0, proposals=accused)


def test_lemons_are_found_and_replaced_and_a_detector_that_accuses_anybody_shows() -> None:
    right = accused = 0
    for seed in (1, 2):
        lemons = simulate(LEMONS, seed, Loop(detector=find_lemons)).lemons
        assert lemons is not None
        assert lemons.lemons == 3
        assert lemons.replaced
        right, accused = right + lemons.right, accused + lemons.accused
    assert right >= 0.75 * accused
    assert right >= 4, "of six"
    lemons = simulate(LEMONS, 1, Loop(detector=anybody)).lemons
    assert lemons is not None
    assert lemons.precision is not None
    assert lemons.precision < 0.5


@pytest.mark.parametrize("factor", [5.0, 10.0, 20.0])
def test_the_test_that_knows_the_rates_has_the_threshold_of_these_rates(factor: float) -> None:
    settings = FleetSettings(lemon_factor=factor)
    plan = draw_plan(settings, 1)
    threshold = known_rates_threshold(factor, SEEN_SHARE * 90, 0.85)
    counts = {
        node: sum(bool(fault.kind.check) for fault in plan.faults[node] if fault.ends_runs) for node in plan.lemons
    }
    assert found_by_known_rates(settings, plan) == {node for node, count in counts.items() if count >= threshold}
