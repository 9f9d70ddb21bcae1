"""The fleets that the loop is measured on were fixed before any of it was: tasks and faults have these hashes."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.replay.fleet.faults import Fault, Plan, draw_plan, faults_of_new_node
from fireflyer.cluster.core.replay.fleet.jobs import draw_tasks
from fireflyer.cluster.core.replay.fleet.settings import DAY_NS, FleetSettings
from fireflyer.cluster.core.replay.generator import TraceSettings, generate
from fireflyer.cluster.core.replay.trace import write_trace

SMALL = FleetSettings(nodes=60, days=10)
SHA256 = {
    "small": "5366bb499040051d8b36d31c86d6fd7f00ab07b4d8ea5e3700ff35785a7f377c",
    "whole": "00ec54d04003aa3edd8e47a333ca97bc04371ab8a1cbacf6295168b2f797f015",
}


def digest(settings: FleetSettings, seed: int) -> str:
    plan = draw_plan(settings, seed)
    found = hashlib.sha256("".join(write_trace(draw_tasks(settings, seed))).encode())
    found.update(repr(sorted(plan.lemons)).encode())
    # The class was `Kind` when the hashes were committed.
    found.update(repr(plan.faults).replace("FaultKind(", "Kind(").encode())
    return found.hexdigest()


def faults_of(plan: Plan, *, lemon: bool) -> list[Fault]:
    return [
        fault
        for node, faults in enumerate(plan.faults)
        for fault in faults
        if fault.ends_runs and (node in plan.lemons) == lemon
    ]


def test_a_small_fleet_is_the_one_that_was_committed() -> None:
    assert digest(SMALL, 1) == SHA256["small"]
    assert digest(SMALL, 2) != SHA256["small"]


@pytest.mark.slow
def test_the_fleet_of_ninety_days_is_the_one_that_was_committed() -> None:
    assert digest(FleetSettings(), 1) == SHA256["whole"]


@pytest.mark.parametrize("factor", [5.0, 10.0, 20.0])
def test_nodes_fail_at_their_rates_and_lemons_more_often(factor: float) -> None:
    settings = FleetSettings(lemon_factor=factor)
    plans = [draw_plan(settings, seed) for seed in range(1, 6)]
    assert all(len(plan.lemons) == 24 for plan in plans)
    lemons = sum(len(faults_of(plan, lemon=True)) for plan in plans) / (5 * 24 * 90)
    others = sum(len(faults_of(plan, lemon=False)) for plan in plans) / (5 * 1976 * 90)
    assert 1000 * (24 * lemons + 1976 * others) / 2000 == pytest.approx(6.5, rel=0.05)
    assert lemons / others == pytest.approx(factor, rel=0.15)


def test_kinds_have_their_shares() -> None:
    plans = [draw_plan(FleetSettings(), seed) for seed in range(1, 6)]
    faults = [fault for plan in plans for lemon in (True, False) for fault in faults_of(plan, lemon=lemon)]
    causes = Counter(fault.kind.cause for fault in faults)
    assert causes[""] / len(faults) == pytest.approx(0.15, abs=0.015)
    assert causes["xid_74"] / len(faults) == pytest.approx(0.15, abs=0.015)
    assert causes["xid_63"] / len(faults) == pytest.approx(0.7 * 120 / 292, abs=0.015)
    assert not any(fault.lasts for fault in faults if fault.kind.cause == "xid_74")
    assert all((fault.warned_ns > 0) == (fault.kind.cause == "xid_63") for fault in faults)
    assert not any(fault.cured_by is Remedy.TEST for fault in faults if fault.lasts)


def test_a_new_node_is_no_lemon() -> None:
    settings = FleetSettings(lemon_factor=1000.0)
    found = [faults_of_new_node(settings, 1, node, 30 * DAY_NS) for node in range(500)]
    assert all(fault.at_ns > 30 * DAY_NS for faults in found for fault in faults)
    count = sum(fault.ends_runs for faults in found for fault in faults)
    assert count / (500 * 60) == pytest.approx(settings.sound_per_day, rel=0.5)


def test_chains_have_the_work_of_their_tasks_and_large_tasks_are_as_they_were() -> None:
    settings = FleetSettings(nodes=400, days=3)
    tasks = draw_tasks(settings, 1)
    drawn = generate(TraceSettings(nodes=400, days=3, demand=0.83), 1)
    assert sum(task.nodes * task.work_ns for task in tasks) == sum(task.nodes * task.work_ns for task in drawn)
    assert [task for task in tasks if task.nodes > 1] == [task for task in drawn if task.nodes > 1]
    assert [task.submit_ns for task in tasks] == sorted(task.submit_ns for task in tasks)


def test_senseless_fleets_are_refused() -> None:
    for wrong in ({"lemon_factor": 0.5}, {"days": 0}, {"nodes": 0}, {"again_ns": SECOND // 2}, {"lemon_share": 0.9}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            FleetSettings(**wrong)
