"""Weeks of a fleet under the platform's scheduler, with the loop or without it, and what is measured of them.

The *failure share* is of runs of large tasks, 512 GPUs and more, that ended within the time: those that a node's fault
ended, or that a check took off a faulty node, over all. A run is what one placement of a task is: as in accounting, a
task that is queued again has another one. With the loop on, a run that is moved by a check counts as failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.cluster.core.replay.fleet.faults import Plan, draw_plan
from fireflyer.cluster.core.replay.fleet.jobs import draw_tasks
from fireflyer.cluster.core.replay.fleet.known_rates import found_by_known_rates
from fireflyer.cluster.core.replay.fleet.lemon_watch import Loop
from fireflyer.cluster.core.replay.fleet.nodes import EndedRun, FailedBy, FleetNodes
from fireflyer.cluster.core.replay.fleet.settings import DAY_NS, FleetSettings
from fireflyer.cluster.core.replay.fleet.sharing import FleetSharing
from fireflyer.cluster.core.replay.policy import ClusterSettings
from fireflyer.cluster.core.replay.replay import Outcome, Replay, ReplaySettings

__all__ = ["FleetOutcome", "LemonOutcome", "RunShares", "simulate"]

LAST_DAYS: Final = 30


class RunShares(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of large tasks."""

    runs: int
    by_fault: int
    """The first one that a fault ended."""
    by_same_fault: int
    """Further ones that it ended."""
    by_check: int
    failed: int
    """All three."""
    failure_share: float
    of_lemons: int
    """Of those that failed."""


class LemonOutcome(msgspec.Struct, frozen=True, kw_only=True):
    lemons: int
    accused: int
    """Nodes that were replaced, or are proposed at the end."""
    right: int
    replaced: int
    known_rates_right: int
    """Lemons that the test finds which knows the rates (`known_rates`)."""
    precision: float | None
    """None where no node is accused."""
    recall: float | None
    known_rates_recall: float | None


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one seed, with the loop or without."""

    lemon_factor: float
    seed: int
    loop: bool
    large: RunShares
    large_last: RunShares
    """Of the last 30 days."""
    small: RunShares
    """All other runs."""
    large_ettr: float
    """Work of large tasks over the time from their submission to their end, weighted with nodes."""
    goodput: float
    """Productive node-time over that of all nodes."""
    open_share: float
    """Node-time in which nodes took tasks, over all."""
    drains: int
    """By checks."""
    lemons: LemonOutcome | None
    events: int


def simulate(settings: FleetSettings, seed: int, loop: Loop | None) -> FleetOutcome:
    """Without `loop` nodes that failed take the next run at once."""
    tasks, plan = draw_tasks(settings, seed), draw_plan(settings, seed)
    cluster = ClusterSettings(nodes=settings.nodes)
    replay = ReplaySettings(cluster=cluster)
    fleet = FleetNodes(settings, plan, seed, loop)
    policy = FleetSharing(tasks, cluster, fleet, interrupt_cost_ns=replay.costs.save_ns + replay.costs.start_ns)
    outcome = Replay(tasks, replay, policy, fleet).run()
    ended = [run for run in fleet.ended_runs if run.at_ns < settings.end_ns]
    large = [run for run in ended if run.nodes >= settings.large_nodes]
    last_ns = settings.end_ns - LAST_DAYS * DAY_NS
    whole_ns = settings.nodes * (outcome.window_ns[1] - outcome.window_ns[0]) or 1
    return FleetOutcome(
        lemon_factor=settings.lemon_factor,
        seed=seed,
        loop=loop is not None,
        large=_shares(large),
        large_last=_shares([run for run in large if run.at_ns >= last_ns]),
        small=_shares([run for run in ended if run.nodes < settings.large_nodes]),
        large_ettr=_ettr(outcome, settings.large_nodes),
        goodput=outcome.window.parts.productive / whole_ns,
        open_share=outcome.window.healthy / whole_ns,
        drains=0 if loop is None else loop.drains,
        lemons=None if loop is None else _lemons(settings, plan, loop),
        events=outcome.events,
    )


def _shares(runs: Sequence[EndedRun]) -> RunShares:
    by = [run.failed_by for run in runs]
    failed = len(by) - by.count(None)
    return RunShares(
        runs=len(runs),
        failed=failed,
        failure_share=failed / len(runs) if runs else 0.0,
        by_fault=by.count(FailedBy.FAULT),
        by_same_fault=by.count(FailedBy.SAME_FAULT),
        by_check=by.count(FailedBy.CHECK),
        of_lemons=sum(run.failed_by is not None and run.of_lemon for run in runs),
    )


def _lemons(settings: FleetSettings, plan: Plan, loop: Loop) -> LemonOutcome:
    lemons, right = len(plan.lemons), sum(lemon for _, lemon in loop.accused)
    known = len(found_by_known_rates(settings, plan))
    return LemonOutcome(
        lemons=lemons,
        accused=len(loop.accused),
        right=right,
        replaced=loop.replaced,
        known_rates_right=known,
        precision=right / len(loop.accused) if loop.accused else None,
        recall=right / lemons if lemons else None,
        known_rates_recall=known / lemons if lemons else None,
    )


def _ettr(outcome: Outcome, least_nodes: int) -> float:
    large = [
        (task, life.ended_ns)
        for task, life in zip(outcome.tasks, outcome.lives, strict=True)
        if task.nodes >= least_nodes and life.ended_ns is not None
    ]
    taken_ns = sum(task.nodes * (ended_ns - task.submit_ns) for task, ended_ns in large)
    return sum(task.nodes * task.work_ns for task, _ in large) / taken_ns if taken_ns else 0.0
