"""Nobody waits for ever: the bound of docs/design/0042-scheduler.md, with everything as bad as it may be.

Tasks of the highest priority come so fast that they would fill the cluster several times over. They take their whole
guaranteed time and then as much again, and what is told to suspend needs the longest that it may.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from tests.support.scheduler.snapshots import NOW_NS, nodes_of

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.events import NodeChanged, RunEnded, TaskEnded, TasksSubmitted
from fireflyer.cluster.core.scheduler.machine import SchedulerMachine
from fireflyer.cluster.core.scheduler.model import Interrupt, Policy, Request, Start, Task

AGE_STEP_S = 100
GUARANTEE_S = 60
SUSPENSION_S = 20
HIGHEST = 15
GANG_AGE_S = 150
POLICY = Policy(
    age_step_ns=AGE_STEP_S * SECOND, gang_age_ns=GANG_AGE_S * SECOND, cross_zone_nodes=4, usage_step_ns=10 * SECOND
)
SEEDS = 8
NEVER_S = 6000
"""Without ageing it has not started then."""


class Flood:
    """Time goes on by seconds; `victim` is the task that must start in the end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.machine = SchedulerMachine(POLICY)
        self.now_s = 0
        self.tasks: dict[int, Task] = {}
        self.ends: dict[int, int] = {}
        """Of those that run: when they end, or have left."""
        self.leaving: set[int] = set()
        self.nodes = nodes_of(4, 4)
        for node in self.nodes:
            self.machine.apply(NodeChanged(node), NOW_NS)

    @property
    def now_ns(self) -> int:
        return NOW_NS + self.now_s * SECOND

    def submit(self, priority: int, nodes: int, user: str) -> Task:
        request = Request(
            user=user, priority=priority, least_nodes=nodes, most_nodes=nodes, guaranteed_ns=GUARANTEE_S * SECOND
        )
        number = len(self.tasks)
        task = Task(id=number, request=request, submitted_ns=self.now_ns, queued_ns=self.now_ns)
        self.tasks[number] = task
        self.machine.apply(TasksSubmitted((task,)), self.now_ns)
        return task

    def second(self) -> None:
        self.now_s += 1
        for number in [number for number, end_s in self.ends.items() if end_s <= self.now_s]:
            del self.ends[number]
            if number in self.leaving:
                self.leaving.remove(number)
                self.machine.apply(RunEnded(number), self.now_ns)
            else:
                self.machine.apply(TaskEnded(number), self.now_ns)
        if self.rng.random() < 0.1:
            self.submit(HIGHEST, self.rng.choice([1, 2, 3]), self.rng.choice(["ann", "bob"]))
        for one in self.machine.decide(self.now_ns):
            if isinstance(one, Start):
                self.ends[one.task] = self.now_s + 4 * GUARANTEE_S
            elif isinstance(one, Interrupt):
                self.leaving.add(one.task)
                self.ends[one.task] = self.now_s + SUSPENSION_S


def bound_s(flood: Flood, victim: Task, submitted_s: int) -> int:
    """A task passes every newcomer, of 3 nodes at most, after A; k come before it then, and have their turns until they
    count less."""
    head_s = GANG_AGE_S - min(GANG_AGE_S, (victim.request.least_nodes.bit_length() - 1) * GANG_AGE_S)
    passes_s = submitted_s + (HIGHEST - victim.request.priority + 1) * AGE_STEP_S + head_s
    before = [task for task in flood.tasks.values() if task.id != victim.id]
    before = [task for task in before if (task.submitted_ns - NOW_NS) // SECOND <= passes_s]
    lead_s = (HIGHEST - victim.request.priority) * AGE_STEP_S + head_s + submitted_s
    turns = 1 + lead_s / GUARANTEE_S
    return passes_s + int((len(before) + 1) * turns * (GUARANTEE_S + AGE_STEP_S + SUSPENSION_S))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_task_of_the_lowest_priority_starts_within_the_bound_whatever_comes(seed: int) -> None:
    flood = Flood(seed)
    for _ in range(flood.rng.randint(20, 200)):
        flood.second()
    submitted_s = flood.now_s
    victim = flood.submit(HIGHEST - flood.rng.randint(1, 4), flood.rng.choice([1, 4, 8]), "cy")
    while victim.id not in flood.ends:
        flood.second()
        assert flood.now_s <= bound_s(flood, victim, submitted_s)
    # The bound counts everybody before it one after the other; they run side by side.
    assert flood.now_s - submitted_s <= NEVER_S


def test_without_ageing_it_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flood is one: what the test above shows is the ageing."""
    monkeypatch.setattr(__name__ + ".POLICY", msgspec.structs.replace(POLICY, age_step_ns=10**9 * SECOND))
    flood = Flood(1)
    for _ in range(100):
        flood.second()
    victim = flood.submit(HIGHEST - 4, 8, "cy")
    for _ in range(NEVER_S):
        flood.second()
    assert victim.id not in flood.ends
    assert flood.machine.task(victim.id).run is None
