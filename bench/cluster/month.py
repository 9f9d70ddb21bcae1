"""The month of 2,000 nodes and 216,000 tasks, replayed at demand 1.1 and 1.3: processor time for each event, and what
each policy makes of it. The brief form is four days of 200 nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from bench.report import Figure, Options, Result, figure
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay import baselines
from fireflyer.cluster.core.replay.generator import MONTH, TraceSettings, generate
from fireflyer.cluster.core.replay.policy import ClusterSettings, Policy
from fireflyer.cluster.core.replay.replay import Replay, ReplaySettings
from fireflyer.cluster.core.replay.sharing import TimeSharing
from fireflyer.cluster.core.replay.summary import Summary, summarise

__all__ = ["SEED", "is_met", "month"]

SEED: Final = 1
DEMANDS: Final = (1.1, 1.3)
DAY_NS: Final = 86400 * SECOND
WARM_UP_DAYS: Final = {"tiny": 0, "brief": 1, "full": 3}
TRACES: Final = {"tiny": TraceSettings(nodes=20, days=1), "brief": TraceSettings(nodes=200, days=4), "full": MONTH}


class _Replayed(NamedTuple):
    summary: Summary
    event_s: float
    total_s: float


_EVENT_S: Final = 0.4e-3
_TOTAL_S: Final = 300.0
_UTILISATION: Final = 0.99


def month(options: Options) -> Iterator[Result]:
    """For each demand: seconds of processor time for an event (the mean) and for all, utilisation, the longest wait of
    the largest tasks, and lost node-hours; ours beside FIFO, backfill and preemption."""
    for demand in DEMANDS:
        if options.selects(f"month/{demand}"):
            yield from _at(demand, options.scale)


def _at(demand: float, scale: str) -> list[Result]:
    settings = msgspec.structs.replace(TRACES[scale], demand=demand)
    tasks = generate(settings, SEED)
    cluster = ClusterSettings(nodes=settings.nodes)
    replay = ReplaySettings(cluster=cluster, warm_up_ns=WARM_UP_DAYS[scale] * DAY_NS)
    cost_ns = replay.costs.save_ns + replay.costs.start_ns
    policies: list[Policy] = [
        TimeSharing(tasks, cluster, interrupt_cost_ns=cost_ns),
        baselines.fifo(tasks, cluster),
        baselines.backfill(tasks, cluster),
        baselines.preemption(tasks, cluster),
    ]
    ours, *peers = [_replayed(Replay(tasks, replay, policy)) for policy in policies]
    note = (
        f"{ours.summary.events:,} events, {ours.total_s:.0f} s, at most {ours.summary.most_waiting:,} wait, "
        f"goodput {ours.summary.goodput:.2%}"
    )

    every = [ours, *peers]
    longest = [one.summary.by_size[-1] for one in every]
    case = f"month/{demand}"
    return [
        _row(f"{case}/event_s", "lower", every, [one.event_s for one in every], "<= 0.4 ms", _EVENT_S, note),
        _row(f"{case}/total_s", "lower", every, [one.total_s for one in every], "< 5 minutes", _TOTAL_S, note),
        _row(
            f"{case}/utilisation_share",
            "higher",
            every,
            [one.summary.utilisation for one in every],
            ">= 99 %",
            _UTILISATION,
            note,
        ),
        _row_of_waits(f"{case}/largest_first_start_s", every, [one.first_start.max_s for one in longest], note),
        _row_of_waits(f"{case}/largest_queued_s", every, [one.queued.max_s for one in longest], note),
        _row(f"{case}/lost_node_hours", "lower", every, [one.summary.lost_node_hours for one in every], "", None, note),
    ]


def _row_of_waits(case: str, every: list[_Replayed], values: list[float], note: str) -> Result:
    return _row(case, "lower", every, values, "<= the best baseline", min(values[1:]), note)


def _row(
    case: str, better: str, every: list[_Replayed], values: list[float], target: str, limit: float | None, note: str
) -> Result:
    """`values`: ours, and those of the others; without a limit there is nothing to meet."""
    told: dict[str, Figure | str] = {
        one.summary.policy: figure([value]) for one, value in zip(every[1:], values[1:], strict=True)
    }
    met = None if limit is None else is_met(values[0], better, limit)
    return Result(
        suite="cluster",
        case=case,
        metric=case.rpartition("/")[2],
        better=better,
        ours=figure([values[0]]),
        peers=told,
        bound=None,
        target=target,
        note=note,
        met=met,
        verdicts={} if met is None else {target: met},
    )


def is_met(value: float, better: str, limit: float) -> bool:
    """Whether `value` is as good as the limit, or better."""
    return value <= limit if better == "lower" else value >= limit


def _replayed(replay: Replay) -> _Replayed:
    began_s = time.process_time()
    outcome = replay.run()
    total_s = time.process_time() - began_s
    return _Replayed(summarise(outcome), total_s / outcome.events, total_s)
