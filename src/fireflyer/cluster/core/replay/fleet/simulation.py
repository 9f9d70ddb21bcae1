"""Weeks of a fleet under the platform's scheduler, with the loop or without it, and what is measured of them.

The *failure share* is of runs of 512 GPUs and more that ended within the time: those that a node's fault ended, or that
a check took off a faulty node, over all. A run is what one placement of a task is: as in accounting, a task that is
queued again has another one. With the loop on, a run that is moved by a check counts as failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay.fleet.faults import draw_plan
from fireflyer.cluster.core.replay.fleet.jobs import draw_tasks
from fireflyer.cluster.core.replay.fleet.known_rates import found_by_known_rates
from fireflyer.cluster.core.replay.fleet.lemon_watch import Loop
from fireflyer.cluster.core.replay.fleet.nodes import EndedRun, FailedBy, FleetNodes
from fireflyer.cluster.core.replay.fleet.settings import DAY_NS, LARGE_NODES, FleetSettings
from fireflyer.cluster.core.replay.policy import ClusterSettings
from fireflyer.cluster.core.replay.replay import Outcome, Replay, ReplaySettings
from fireflyer.cluster.core.replay.sharing import TimeSharing
from fireflyer.cluster.core.scheduler.model import Policy

__all__ = ["FleetOutcome", "LemonOutcome", "RunShares", "simulate"]

LAST_DAYS: Final = 30
USAGE_STEP_NS: Final = 900 * SECOND
"""Users' usage is added up so often, a setting of sites: the 400 users of 90 days, each minute, take most of the time."""


class RunShares(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of large tasks."""

    runs: int
    by_fault: int
    """The first one that a fault ended."""
    by_same_fault: int
    """Further ones that it ended."""
    by_check: int
    of_lemons: int
    """Of those that failed."""

    @property
    def failed(self) -> int:
        return self.by_fault + self.by_same_fault + self.by_check

    @property
    def failure_share(self) -> float:
        return self.failed / self.runs if self.runs else 0.0


class LemonOutcome(msgspec.Struct, frozen=True, kw_only=True):
    lemons: int
    accused: int
    """Nodes that were replaced, or are proposed at the end."""
    right: int
    replaced: int
    known_rates_right: int
    """Lemons that the test finds which knows the rates."""


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one seed, with the loop or without."""

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
    policy = TimeSharing(
        tasks,
        cluster,
        interrupt_cost_ns=replay.costs.save_ns + replay.costs.start_ns,
        policy=Policy(usage_step_ns=USAGE_STEP_NS),
    )
    outcome = Replay(tasks, replay, policy, fleet).run()
    ended = [run for run in fleet.ended_runs if run.at_ns < settings.end_ns]
    large = [run for run in ended if run.nodes >= LARGE_NODES]
    last_ns = settings.end_ns - LAST_DAYS * DAY_NS
    found = None
    if loop is not None:
        found = LemonOutcome(
            lemons=len(plan.lemons),
            accused=len(loop.accused),
            right=sum(lemon for _, lemon in loop.accused),
            replaced=loop.replaced,
            known_rates_right=len(found_by_known_rates(settings, plan)),
        )
    whole_ns = settings.nodes * (outcome.window_ns[1] - outcome.window_ns[0]) or 1
    return FleetOutcome(
        seed=seed,
        loop=loop is not None,
        large=_shares(large),
        large_last=_shares([run for run in large if run.at_ns >= last_ns]),
        small=_shares([run for run in ended if run.nodes < LARGE_NODES]),
        large_ettr=_ettr(outcome),
        goodput=outcome.window.parts.productive / whole_ns,
        open_share=outcome.window.healthy / whole_ns,
        drains=0 if loop is None else loop.drains,
        lemons=found,
        events=outcome.events,
    )


def _shares(runs: Sequence[EndedRun]) -> RunShares:
    by = [run.failed_by for run in runs]
    return RunShares(
        runs=len(runs),
        by_fault=by.count(FailedBy.FAULT),
        by_same_fault=by.count(FailedBy.SAME_FAULT),
        by_check=by.count(FailedBy.CHECK),
        of_lemons=sum(run.failed_by is not None and run.of_lemon for run in runs),
    )


def _ettr(outcome: Outcome) -> float:
    large = [
        (task, life.ended_ns)
        for task, life in zip(outcome.tasks, outcome.lives, strict=True)
        if task.nodes >= LARGE_NODES and life.ended_ns is not None
    ]
    taken_ns = sum(task.nodes * (ended_ns - task.submit_ns) for task, ended_ns in large)
    return sum(task.nodes * task.work_ns for task, _ in large) / taken_ns if taken_ns else 0.0
