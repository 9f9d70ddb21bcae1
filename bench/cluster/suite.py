"""The scheduler and suspension. Times are processor time of one core, except where a case says otherwise.

`full/NODESxQUEUED`: one pass of the definition; and a machine that is loaded with all of it and decides.
`event/KIND/NODESxQUEUED`: one event and the decisions that follow; the median of rounds, and their 99th percentile.
`month/DEMAND`: the trace of a month on 2,000 nodes, by our policy and by three others.
`manager/AGENTS`: a manager process with so many agents, while tasks are submitted at a fixed rate (wall time).
`submit/…`, `suspend/platform`: what a user waits for on an idle platform (wall time; `bench.cluster.idle_platform`).
`suspend/call`, `suspend/free`: a call that finds no news; from the signal to `ff run` until it has ended (wall time).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.cluster import suspend
from bench.cluster.idle_platform import idle_platform
from bench.cluster.manager import manager
from bench.cluster.month import month
from bench.cluster.workload import KINDS, Cluster
from bench.report import Bound, Measuring, Options, Result, figure
from fireflyer.cluster.core.scheduler.events import LimitsChanged, NodeChanged, SharesChanged, TasksSubmitted, UsageSet
from fireflyer.cluster.core.scheduler.machine import SchedulerMachine
from fireflyer.cluster.core.scheduler.schedule import schedule

__all__ = ["run"]

SIZES: Final = {
    "tiny": ((200, 200),),
    "brief": ((1_000, 1_000),),
    "full": ((1_000, 10_000), (10_000, 10_000), (10_000, 50_000)),
}
EVENTS: Final = {"tiny": 30, "brief": 300, "full": 1_000}
"""In each round."""


def run(options: Options) -> Measuring:
    for nodes, queued in SIZES[options.scale]:
        size = f"{nodes}x{queued}"
        if options.selects(f"full/{size}"):
            yield from _full(options, nodes, queued)
        if any(options.selects(f"event/{kind}/{size}") for kind in (*KINDS, "leave", "array", "all")):
            yield from _events(options, nodes, queued)
    yield from month(options)
    yield from manager(options)
    yield from idle_platform(options)
    if options.selects("suspend/call") or options.selects("suspend/free"):
        yield from _suspend(options)
    return ("seconds of processor time; suspend, submit and manager: wall time",)


def _result(
    case: str, metric: str, samples: list[float], target: str = "", note: str = "", limit: float | None = None
) -> Result:
    ours = figure(samples)
    met = None if limit is None else ours.median < limit
    verdicts = {} if limit is None else {target: met}
    return Result(
        suite="cluster", case=case, metric=metric, better="lower", ours=ours, peers={}, bound=None, target=target,
        note=note, met=met, verdicts=verdicts,
    )  # fmt: skip


def _full(options: Options, nodes: int, queued: int) -> list[Result]:
    cluster = Cluster(nodes, queued)
    snapshot, now_ns = cluster.machine.snapshot(), cluster.now_ns
    definition, loading = [], []
    for _ in range(options.rounds):
        began_s = time.process_time()
        schedule(snapshot, now_ns)
        definition.append(time.process_time() - began_s)
        began_s = time.process_time()
        machine = SchedulerMachine(snapshot.policy)
        for node in snapshot.nodes:
            machine.apply(NodeChanged(node), now_ns)
        machine.apply(UsageSet(snapshot.usage), now_ns)
        machine.apply(SharesChanged(snapshot.share), now_ns)
        machine.apply(LimitsChanged(snapshot.limits), now_ns)
        machine.apply(TasksSubmitted(snapshot.tasks), now_ns)
        machine.decide(now_ns)
        loading.append(time.process_time() - began_s)
    size = f"{nodes}x{queued}"
    note = f"{len(cluster.running)} runs"
    return [
        _result(f"full/{size}", "pass_s", definition, "< 1 s", note, 1.0),
        _result(f"full/{size}", "load_and_decide_s", loading, note=note),
    ]


def _events(options: Options, nodes: int, queued: int) -> list[Result]:
    cluster = Cluster(nodes, queued)
    rounds: list[dict[str, list[float]]] = []
    for number in range(options.rounds + 1):
        times: dict[str, list[float]] = {}
        for at in range(EVENTS[options.scale]):
            kind = cluster.next_kind() if at else "array"
            event = cluster.event(kind)
            began_ns = time.process_time_ns()
            cluster.machine.apply(event, cluster.now_ns)
            decisions = cluster.machine.decide(cluster.now_ns)
            took_s = (time.process_time_ns() - began_ns) / 1e9
            cluster.carry_out(decisions)
            if kind == "array":
                cluster.withdraw(event)
            times.setdefault(kind, []).append(took_s)
            if kind != "array":
                times.setdefault("all", []).append(took_s)
        if number:  # the first round warms up
            rounds.append(times)
    found = []
    for kind in ("all", "leave", *KINDS, "array"):
        mine = [times[kind] for times in rounds if times.get(kind)]
        if mine and options.selects(f"event/{kind}/{nodes}x{queued}"):
            found += _of_kind(f"event/{kind}/{nodes}x{queued}", mine)
    return found


def _of_kind(case: str, rounds: list[list[float]]) -> list[Result]:
    one = [time_s for times in rounds for time_s in times]
    note = f"mean {1e3 * statistics.fmean(one):.3f} ms, {len(one)} events"
    found = [_result(case, "event_s", one, note=note)]
    if "/array/" not in case:
        p99 = [sorted(times)[int(len(times) * 0.99)] for times in rounds]
        found.append(_result(case, "p99_s", p99, "< 10 ms", limit=0.010))
    return found


def _suspend(options: Options) -> list[Result]:
    call, loop = suspend.call_ns()
    times = []
    for _ in range(min(options.rounds, 5)):
        with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
            times.append(suspend.free_s(Path(directory)))
    limit_s = 2 * suspend.STEP_S + suspend.SAVE_S + 1
    bound = Bound(2 * suspend.STEP_S + suspend.SAVE_S, "two steps and the save")
    free = _result("suspend/free", "wall_s", times, "<= two steps + save + 1 s", limit=limit_s)
    return [
        _result("suspend/call", "call_s", [call / 1e9], "<= 1 us", f"an empty loop: {loop:.0f} ns", 1e-6),
        Result(**{**{name: getattr(free, name) for name in free.__struct_fields__}, "bound": bound}),
    ]
