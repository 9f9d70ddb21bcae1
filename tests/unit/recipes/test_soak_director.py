"""What the soak does next: which fault comes when, and when it was recovered from."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.recipes.soak.director import (
    LIMIT_NS,
    Action,
    Director,
    GiveUp,
    Inject,
    Phase,
    Recovered,
    Release,
    Submit,
)
from fireflyer.recipes.soak.faults import KINDS, Kind, Lane, Target, kind_named, schedule
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.soak.seen import PlatformSample, Seen, TaskSeen
from fireflyer.recipes.testbed.facts import StorageSample

AGENTS = tuple(f"agent-{number}" for number in range(1, 5))
STEP = 200 * MS


class World:
    """A cluster that does what it is told, at once, unless a test spoils it; the clock stands still between looks."""

    def __init__(self, plan: SoakPlan) -> None:
        self.director = Director(plan)
        self.now_ns = 0
        self.tasks: dict[str, TaskSeen] = {}
        self.incarnations = [1, 1, 1]
        self.alive: tuple[int, ...] = (1, 2, 3)
        self.whole = 3
        self.heard: Mapping[str, int] | None = None
        """None: all, now."""
        self.writes = True
        self.acknowledged_ns = -1
        self.actions: list[Action] = []

    def seen(self) -> Seen:
        if self.writes:
            self.acknowledged_ns = self.now_ns
        return Seen(
            storage=StorageSample(at_ns=self.now_ns, alive=self.alive, incarnations=tuple(self.incarnations), chains=3,
                                  whole=self.whole, serving=3),
            platform=PlatformSample(
                at_ns=self.now_ns,
                heard_ns=dict.fromkeys(AGENTS, self.now_ns) if self.heard is None else self.heard,
                well=frozenset(AGENTS),
                tasks=dict(self.tasks),
            ),
            acknowledged_ns={"append": self.acknowledged_ns},
        )  # fmt: skip

    def step(self, trains: bool = True) -> list[Action]:
        self.now_ns += STEP
        if trains:
            for name, task in self.tasks.items():
                if task.state == "running":
                    self.tasks[name] = msgspec.structs.replace(task, step=task.step + 1)
        actions = self.director.handle(self.now_ns, self.seen())
        self.actions += actions
        for action in actions:
            match action:
                case Submit(task=planned):
                    nodes = AGENTS[:2] if len(self.tasks) % 2 == 0 else AGENTS[2:]
                    self.tasks[planned.name] = TaskSeen(state="running", step=0, starts=1, nodes=nodes)
                case Inject(fault=fault):
                    self.director.injected(fault.number, 1, self.now_ns)
                case Release(fault=fault):
                    self.director.released(fault.number, self.now_ns)
        return actions

    def until(self, kind: type[Action], most: int = 400, *, trains: bool = True) -> Action:
        for _ in range(most):
            found = [action for action in self.step(trains) if isinstance(action, kind)]
            if found:
                return found[0]
        raise AssertionError(f"no {kind.__name__} within {most} looks")


def plan_of(*names: str, minutes: float = 5.0, steps: int = 100_000) -> SoakPlan:
    return SoakPlan(minutes=minutes, steps=steps, kinds=tuple(kind_named(name) for name in names))


def test_the_same_seed_gives_the_same_faults_and_each_round_has_every_kind() -> None:
    for lane in Lane:
        mine = [kind for kind in KINDS if kind.lane is lane]
        first, second, other = (schedule(seed, lane, KINDS) for seed in (3, 3, 4))
        rounds = [[next(first) for _ in mine] for _ in range(3)]
        assert rounds[0] == [next(second) for _ in mine]
        assert rounds[0] != [next(other) for _ in mine]
        for one in rounds:
            assert sorted(planned.kind.name for planned in one) == sorted(kind.name for kind in mine)
            assert all(0 <= planned.choice < 1 and planned.hold_ns < planned.kind.most_hold_ns for planned in one)


def test_kinds_that_exclude_each_other_say_so_on_both_sides() -> None:
    for kind in KINDS:
        for name in kind.excludes:
            assert kind.name in kind_named(name).excludes
            assert kind_named(name).lane is not kind.lane


def test_the_course_of_a_fault() -> None:
    world = World(plan_of("storage-pause"))
    injected = world.until(Inject)
    assert isinstance(injected, Inject)
    assert world.director.phase is Phase.FAULTS
    fault = injected.fault
    released = world.until(Release)
    assert isinstance(released, Release)
    assert released.fault.number == fault.number == 1
    world.whole = 2
    for _ in range(20):
        assert world.step() == []
    world.whole = 3
    recovered = world.until(Recovered, most=1)
    assert isinstance(recovered, Recovered)
    again = world.until(Inject)
    assert isinstance(again, Inject)
    assert again.fault.number == 2
    assert recovered.fault.recovered_ns is not None
    assert again.fault.at_ns - recovered.fault.recovered_ns >= 500 * MS


def test_a_lane_never_has_two_faults_and_both_lanes_have_one_at_the_same_time() -> None:
    world = World(SoakPlan(minutes=60, steps=100_000))
    active: set[int] = set()
    together = 0
    kinds: dict[int, Kind] = {}
    for _ in range(3000):
        for action in world.step():
            if isinstance(action, Inject):
                kinds[action.fault.number] = kind_named(action.fault.kind)
                active.add(action.fault.number)
                if kinds[action.fault.number].name == "storage-away":
                    world.alive = tuple(one for one in (1, 2, 3) if str(one) != action.fault.target)
                if action.fault.kind in ("storage-kill", "storage-away"):
                    world.incarnations[int(action.fault.target) - 1] += 1
                if action.fault.kind == "task-suspend":
                    old = world.tasks[action.fault.target]
                    world.tasks[action.fault.target] = msgspec.structs.replace(old, state="suspended")
                elif action.fault.kind in ("rank-kill", "guard-kill", "node-kill"):
                    old = world.tasks[action.fault.task]
                    world.tasks[action.fault.task] = msgspec.structs.replace(old, starts=old.starts + 1)
            elif isinstance(action, Release):
                world.alive = (1, 2, 3)
                if action.fault.kind == "task-suspend":
                    old = world.tasks[action.fault.target]
                    world.tasks[action.fault.target] = msgspec.structs.replace(old, state="running")
            elif isinstance(action, Recovered):
                active.discard(action.fault.number)
            assert not isinstance(action, GiveUp), action
        lanes = [kinds[number].lane for number in active]
        assert len(lanes) == len(set(lanes))
        names = {kinds[number].name for number in active}
        assert not any(names & set(kind_named(name).excludes) for name in names)
        together = max(together, len(lanes))
    assert together == 2
    assert {kind.name for kind in kinds.values()} == {kind.name for kind in KINDS}


@pytest.mark.parametrize("spoiled", ["incarnation", "whole", "alive", "writers"])
def test_a_storage_fault_is_over_when_the_node_is_back_every_chain_whole_and_every_writer_writes(spoiled: str) -> None:
    world = World(plan_of("storage-kill"))
    injected = world.until(Inject)
    assert isinstance(injected, Inject)
    number = int(injected.fault.target)
    before = world.acknowledged_ns
    if spoiled != "incarnation":
        world.incarnations[number - 1] += 1
    world.whole = 2 if spoiled == "whole" else 3
    world.alive = (1, 2) if spoiled == "alive" else (1, 2, 3)
    world.writes = spoiled != "writers"
    world.acknowledged_ns = before
    for _ in range(10):
        assert world.step() == []
    world.incarnations[number - 1] = 2
    world.whole, world.alive, world.writes = 3, (1, 2, 3), True
    world.until(Recovered, most=1)


def test_a_node_that_is_to_stay_away_is_killed_until_it_counts_as_failed() -> None:
    world = World(plan_of("storage-away"))
    first = world.until(Inject)
    assert isinstance(first, Inject)
    number = int(first.fault.target)
    for _ in range(5):
        assert [type(action) for action in world.step()] == [Inject]
    world.alive = tuple(one for one in (1, 2, 3) if one != number)
    released = world.until(Release, most=1)
    assert isinstance(released, Release)
    assert released.fault.failed
    world.alive = (1, 2, 3)
    world.incarnations[number - 1] += 1
    world.until(Recovered, most=1)


def test_a_fault_of_a_task_is_over_when_the_task_has_done_more_than_before() -> None:
    world = World(plan_of("rank-kill"))
    injected = world.until(Inject)
    assert isinstance(injected, Inject)
    fault = injected.fault
    old = world.tasks[fault.task]
    assert fault.target in old.nodes
    world.tasks[fault.task] = msgspec.structs.replace(old, step=fault.step - 10 if fault.step > 10 else 0)
    for _ in range(5):
        assert world.step(trains=False) == []
    world.tasks[fault.task] = msgspec.structs.replace(old, step=fault.step)
    assert world.step(trains=False) == []
    world.tasks[fault.task] = msgspec.structs.replace(old, step=fault.step + 1)
    assert world.step(trains=False) == []  # its ranks went on until somebody noticed
    world.tasks[fault.task] = msgspec.structs.replace(old, step=fault.step + 1, starts=old.starts + 1)
    world.until(Recovered, most=1, trains=False)


@pytest.mark.parametrize("name", ["manager-kill", "agent-kill"])
def test_a_fault_of_the_platform_is_over_when_all_nodes_were_heard_after_it(name: str) -> None:
    world = World(plan_of(name))
    world.until(Inject)
    world.heard = {**dict.fromkeys(AGENTS, world.now_ns + SECOND), "agent-2": world.now_ns}
    for _ in range(5):
        assert world.step() == []
    world.heard = None
    world.until(Recovered, most=1)


def test_a_suspended_task_is_resumed_when_it_has_left() -> None:
    world = World(plan_of("task-suspend"))
    injected = world.until(Inject)
    assert isinstance(injected, Inject)
    name = injected.fault.target
    for state in ("running", "suspending"):
        world.tasks[name] = msgspec.structs.replace(world.tasks[name], state=state)
        assert world.step() == []
    world.tasks[name] = msgspec.structs.replace(world.tasks[name], state="suspended")
    world.until(Release, most=1)


def test_no_fault_comes_to_a_task_that_is_about_to_end_and_no_disk_is_full_when_it_saves_last() -> None:
    for name in ("node-kill", "task-suspend", "storage-full"):
        world = World(plan_of(name, steps=100))
        world.step()
        world.step()
        world.tasks = {one: TaskSeen(state="running", step=81, starts=1, nodes=task.nodes)
                       for one, task in world.tasks.items()}  # fmt: skip
        for _ in range(100):
            assert world.step(trains=False) == []


def test_a_fault_that_reached_nothing_is_none() -> None:
    world = World(plan_of("rank-kill"))
    injected = world.until(Inject)
    assert isinstance(injected, Inject)
    director = Director(plan_of("rank-kill"))
    world = World(plan_of("rank-kill"))
    world.director = director
    for _ in range(400):
        world.now_ns += STEP
        for name, task in world.tasks.items():
            world.tasks[name] = msgspec.structs.replace(task, step=task.step + 1)
        for action in director.handle(world.now_ns, world.seen()):
            if isinstance(action, Submit):
                world.tasks[action.task.name] = TaskSeen(state="running", step=0, starts=1, nodes=AGENTS[:2])
            if isinstance(action, Inject):
                director.injected(action.fault.number, 0, world.now_ns)
                assert director.faults == {}
    assert world.director.phase is Phase.FAULTS


def test_tasks_are_submitted_until_the_time_is_over_and_then_everything_ends() -> None:
    world = World(plan_of("agent-kill", minutes=0.2, steps=50))
    for _ in range(400):
        world.step()
        world.tasks = {
            name: msgspec.structs.replace(task, state="finished" if task.step >= 50 else task.state)
            for name, task in world.tasks.items()
        }
    assert world.director.phase is Phase.DONE
    assert len(world.director.plans) == len(world.tasks) > 2
    assert all(task.state == "finished" for task in world.tasks.values())
    assert all(fault.recovered_ns is not None for fault in world.director.faults.values())
    assert world.director.handle(world.now_ns + LIMIT_NS, world.seen()) == []


def test_each_wait_is_bounded_and_says_for_what() -> None:
    world = World(plan_of("storage-pause"))
    world.writes = False
    given = world.until(GiveUp, most=LIMIT_NS // STEP + 10)
    assert given == GiveUp("waited 300 s for all nodes to train, every chain to be whole and each writer to write")

    world = World(plan_of("storage-pause"))
    world.until(Release)
    world.whole = 2
    given = world.until(GiveUp, most=kind_named("storage-pause").limit_ns // STEP + 10)
    assert isinstance(given, GiveUp)
    assert "storage process stands still" in given.reason
    assert "not every chain is whole" in given.reason
    assert world.director.phase is Phase.DONE

    world = World(plan_of("storage-pause", minutes=60))
    world.until(Inject)
    world.tasks["task-0002"] = TaskSeen(state="queued", step=7, starts=2, nodes=())
    given = world.until(GiveUp, most=LIMIT_NS // STEP + 10)
    assert given == GiveUp("task task-0002 has been queued at step 7 for 300 s")


def test_targets_are_spread_by_the_seed() -> None:
    chosen = {
        int(1 + planned.choice * 3) for planned, _ in zip(schedule(1, Lane.STORAGE, KINDS), range(50), strict=False)
    }
    assert chosen == {1, 2, 3}
    assert {kind.target for kind in KINDS} == set(Target)


@pytest.mark.parametrize("values", [{"replicas": 1}, {"steps": 30}, {"kinds": ()}, {"storage_nodes": 1}])
def test_a_plan_in_which_nothing_can_be_disturbed_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        msgspec.structs.replace(SoakPlan(), **values)
