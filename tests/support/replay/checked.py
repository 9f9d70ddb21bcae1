"""Replays of small random traces, held to what an observer saw who knows nothing of how a replay adds up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay import baselines
from fireflyer.cluster.core.replay.failures import FailureSettings
from fireflyer.cluster.core.replay.life import Costs
from fireflyer.cluster.core.replay.policy import ClusterSettings, Decision, Policy, Start
from fireflyer.cluster.core.replay.replay import Outcome, Replay, ReplaySettings
from fireflyer.cluster.core.replay.sharing import TimeSharing
from fireflyer.cluster.core.replay.trace import TraceTask

__all__ = ["POLICIES", "Observed", "check", "random_settings", "random_trace", "replayed"]

HOUR_NS = 3600 * SECOND


def _sharing(tasks: Sequence[TraceTask], cluster: ClusterSettings) -> Policy:
    return TimeSharing(tasks, cluster, interrupt_cost_ns=60 * SECOND)


POLICIES: dict[str, Callable[[Sequence[TraceTask], ClusterSettings], Policy]] = {
    "sharing": _sharing,
    "fifo": lambda *given: baselines.fifo(*given),
    "backfill": lambda *given: baselines.backfill(*given),
    "preemption": lambda *given: baselines.preemption(*given),
}


class Observed:
    """Passes on everything, and keeps its own books: who has which node since when, and what is down."""

    def __init__(self, policy: Policy, tasks: Sequence[TraceTask], cluster: ClusterSettings, costs: Costs) -> None:
        self._policy, self._tasks, self._cluster, self._costs = policy, tasks, cluster, costs
        self._told: dict[int, int] = {}
        self.lost_ns = dict.fromkeys(range(len(tasks)), 0)
        self._has: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._down: dict[int, int] = {}
        self.node_ns = 0
        self.down_ns = 0
        self.ran_ns = dict.fromkeys(range(len(tasks)), 0)
        self.failures: list[tuple[int, int]] = []
        self.starts: list[int] = []
        self.waiting: set[int] = set()
        self.kills_before_guarantee = 0

    @property
    def name(self) -> str:
        return self._policy.name

    def submitted(self, now_ns: int, tasks: Sequence[int]) -> None:
        assert all(self._tasks[task].submit_ns == now_ns for task in tasks)
        self.waiting.update(tasks)
        self._policy.submitted(now_ns, tasks)

    def finished(self, now_ns: int, task: int) -> None:
        self._free(now_ns, task)
        self._policy.finished(now_ns, task)

    def vacated(self, now_ns: int, task: int) -> None:
        self.lost_ns[task] += self._unsaved_ns(now_ns, task)
        self._free(now_ns, task)
        self.waiting.add(task)
        self._policy.vacated(now_ns, task)

    def node_down(self, now_ns: int, node: int) -> None:
        self.failures.append((now_ns, node))
        self._down[node] = now_ns
        self._policy.node_down(now_ns, node)

    def node_up(self, now_ns: int, node: int) -> None:
        self.down_ns += now_ns - self._down.pop(node)
        self._policy.node_up(now_ns, node)

    def decide(self, now_ns: int) -> Sequence[Decision]:
        made = self._policy.decide(now_ns)
        for one in made:
            if isinstance(one, Start):
                self._allocate(now_ns, one)
            elif one.saves:
                self._told[one.task] = now_ns
            else:
                began_ns, _ = self._has[one.task]
                self.kills_before_guarantee += now_ns - began_ns < self._cluster.guaranteed_ns
        return made

    def wake_ns(self) -> int | None:
        return self._policy.wake_ns()

    def down_until(self, end_ns: int) -> int:
        return self.down_ns + sum(end_ns - since_ns for since_ns in self._down.values())

    def _allocate(self, now_ns: int, start: Start) -> None:
        held = {node for _, nodes in self._has.values() for node in nodes}
        assert start.task in self.waiting, f"task {start.task} was started and did not wait"
        assert not held & set(start.nodes), f"task {start.task} got a node that another has"
        assert not self._down.keys() & set(start.nodes), f"task {start.task} runs on a node that is down"
        self.waiting.discard(start.task)
        self.starts.append(start.task)
        self._has[start.task] = (now_ns, start.nodes)

    def _unsaved_ns(self, now_ns: int, task: int) -> int:
        told_ns = self._told.pop(task, None)
        if told_ns is not None and told_ns + self._costs.save_ns == now_ns:
            return 0
        began_ns, _ = self._has[task]
        computed_ns = (now_ns if told_ns is None else told_ns) - began_ns - self._costs.start_ns
        interval_ns = self._costs.interval_ns
        return min(computed_ns % (interval_ns + self._costs.checkpoint_ns), interval_ns) if computed_ns > 0 else 0

    def _free(self, now_ns: int, task: int) -> None:
        since_ns, nodes = self._has.pop(task)
        self.ran_ns[task] += now_ns - since_ns
        self.node_ns += (now_ns - since_ns) * len(nodes)


def random_trace(rng: random.Random, nodes: int, zones: int) -> tuple[TraceTask, ...]:
    most = max(1, nodes // zones - 1)
    sizes = [1, 1, 1, 2, most // 2 or 1, most]
    tasks = []
    for _ in range(rng.randint(1, 40)):
        work_ns = rng.choice((SECOND, 299 * SECOND, 300 * SECOND, HOUR_NS, rng.randint(1, 8 * HOUR_NS)))
        tasks.append(
            TraceTask(
                submit_ns=rng.choice((0, rng.randint(0, 12 * HOUR_NS))),
                nodes=min(rng.choice(sizes), most),
                work_ns=work_ns,
                user=rng.choice("abc"),
                priority=rng.choice((0, 10, 10, 30)),
                time_ns=rng.choice((None, 2 * work_ns + HOUR_NS)),
            )
        )
    return tuple(sorted(tasks, key=lambda task: task.submit_ns))


def random_settings(rng: random.Random) -> ReplaySettings:
    zones = rng.choice((1, 1, 2))
    return ReplaySettings(
        cluster=ClusterSettings(
            nodes=rng.randint(3 * zones, 20),
            zones=zones,
            leaf_nodes=3,
            cross_zone_nodes=4,
            guaranteed_ns=rng.choice((1, HOUR_NS)),
        ),
        costs=Costs(
            start_ns=rng.choice((0, 90 * SECOND)),
            checkpoint_ns=rng.choice((0, 7 * SECOND)),
            save_ns=rng.choice((0, 20 * SECOND)),
        ),
        failures=FailureSettings(per_1000_node_days=rng.choice((0.0, 500.0, 3000.0)), repair_median_ns=HOUR_NS),
        seed=rng.randint(0, 1000),
        warm_up_ns=rng.choice((0, HOUR_NS)),
    )


def replayed(name: str, tasks: Sequence[TraceTask], settings: ReplaySettings) -> tuple[Outcome, Observed]:
    observed = Observed(POLICIES[name](tasks, settings.cluster), tasks, settings.cluster, settings.costs)
    return Replay(tasks, settings, observed).run(), observed


def check(name: str, seed: int) -> Observed:
    """One random replay. Raises AssertionError where the books do not agree."""
    rng = random.Random(seed)
    settings = random_settings(rng)
    tasks = random_trace(rng, settings.cluster.nodes, settings.cluster.zones)
    outcome, observed = replayed(name, tasks, settings)
    end_ns = max(life.ended_ns or 0 for life in outcome.lives)
    whole, costs = outcome.whole, settings.costs
    assert not observed.waiting
    assert whole.allocated == observed.node_ns, "allocated node-time"
    assert whole.healthy == settings.cluster.nodes * end_ns - observed.down_until(end_ns), "healthy node-time"
    assert sum(whole.parts) == whole.allocated, "parts of the node-time"
    assert whole.parts.productive == sum(task.nodes * task.work_ns for task in tasks), "productive node-time"
    assert sum(bucket.allocated for bucket in outcome.hours) == whole.allocated, "hours"
    for number, (task, life) in enumerate(zip(tasks, outcome.lives, strict=True)):
        assert life.ended_ns is not None
        assert life.ended_ns - task.submit_ns == life.queued_ns + observed.ran_ns[number], f"life of task {number}"
        runs = observed.starts.count(number)
        assert runs == 1 + life.failures + life.interrupts - _doubled(life.interrupts, runs, life.failures)
        assert life.lost_ns == observed.lost_ns[number], f"lost work of task {number}"
    starts = sum(observed.starts.count(number) * task.nodes for number, task in enumerate(tasks))
    assert whole.parts.start <= starts * costs.start_ns, "time of starts"
    assert whole.parts.lost == sum(task.nodes * life.lost_ns for task, life in zip(tasks, outcome.lives, strict=True))
    assert not observed.kills_before_guarantee
    return observed


def _doubled(interrupts: int, runs: int, failures: int) -> int:
    """Runs that were told to leave and lost a node before they had saved ended once, and count twice."""
    doubled = 1 + failures + interrupts - runs
    assert 0 <= doubled <= min(interrupts, failures)
    return doubled
