"""The runs of one node under chaos: the agent is killed between any two effects, orders of two leaders are lost,
doubled and reordered, launchers end by themselves, hang and are killed, guards are started by ticket at any time,
managers are away. The machine is the real one; the world is what the shell rests on: records on disk, processes, the
lease file."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import pytest
from tests.support.campaigns.seeds import more_seeds

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core import runs
from fireflyer.cluster.core.runs import (
    Begin,
    Changed,
    Effect,
    Event,
    FoundRun,
    GuardsLiving,
    KillLauncher,
    LauncherGone,
    LauncherUp,
    OrdersHeard,
    RanksStarted,
    Remember,
    Remembered,
    RememberLeader,
    Remove,
    Removed,
    RenewLease,
    RunRecord,
    RunsMachine,
    StartLauncher,
    StopGuards,
    SuspendLauncher,
    TerminateLauncher,
    Tick,
    WatchLauncher,
)
from fireflyer.cluster.schema.sync import EndedRun, LaunchOrder, Orders, RunNode, RunOrder, RunStatus
from fireflyer.cluster.schema.tasks import Cause, Program, TaskSpec

STOP_AFTER_NS: Final = 40 * SECOND
TOKENS: Final = tuple(f"{number:08x}" for number in range(6))
LEADS: Final = frozenset(TOKENS[:4])
SPEC: Final = TaskSpec(name="t", program=Program(script="x.py"), grace_ns=5 * SECOND)
LAUNCH: Final = LaunchOrder(task=1, run=0, user="u", spec=SPEC, nodes=(RunNode(name="a", address="x", port=1),))


@dataclass(slots=True)
class Launched:
    token: str
    hangs: bool
    watchers: list[Callable[[], None]] = field(default_factory=list)
    result: EndedRun | None = None


@dataclass(slots=True)
class World:
    rng: random.Random
    agent_dies: float = 0.02
    make: Callable[[], RunsMachine] = RunsMachine
    now_ns: int = 0
    queue: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0
    machine: RunsMachine | None = None
    life: int = 0
    # on disk
    records: dict[str, tuple[RunRecord, int]] = field(default_factory=dict)
    results: dict[str, EndedRun] = field(default_factory=dict)
    term: int = 0
    lease_ends_ns: int = 0
    # processes
    launchers: dict[str, Launched] = field(default_factory=dict)
    guards: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    # managers
    wanted: dict[str, str] = field(default_factory=dict)
    version: int = 0
    leader: int = 1
    away: bool = False
    gone: set[str] = field(default_factory=set)
    ends: dict[str, EndedRun] = field(default_factory=dict)
    answered_ns: int = 0
    """When the last question was sent that was answered."""
    tickets_taken: int = 0
    killed: int = 0

    def later(self, delay_ns: int, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now_ns + delay_ns, self.count, act))

    def mine(self, delay_ns: int, act: Callable[[], None]) -> None:
        life = self.life
        self.later(delay_ns, lambda: act() if self.life == life and self.machine is not None else None)

    def upto(self, limit_ns: int) -> int:
        return self.rng.randrange(limit_ns)

    def run(self, until_ns: int) -> None:
        while self.queue and self.queue[0][0] <= until_ns:
            self.now_ns, _, act = heapq.heappop(self.queue)
            act()
            self.check()
        self.now_ns = until_ns

    def check(self) -> None:
        assert all(count == 1 for count in self.starts.values()), "a launcher was started twice"
        for token in self.gone:
            assert token not in self.launchers, f"the launcher of {token} lives after it was reported gone"
            assert not self.guards.get(token), f"guards of {token} live after it was reported gone"

    # -- the agent -----------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        if self.machine is not None:
            return
        self.machine = self.make()
        self.life += 1
        found = tuple(FoundRun(record, self.now_ns - at) for record, at in self.records.values())
        self.feed(Begin(found, self.term, self.lease_ends_ns, STOP_AFTER_NS))
        for token, number in self.guards.items():
            if number:
                self.mine(0, partial(self.guards_changed, token))
        self.mine(SECOND, self.tick)
        self.mine(self.upto(SECOND), self.sync)

    def die(self) -> None:
        self.machine = None

    def tick(self) -> None:
        self.feed(Tick())
        self.mine(SECOND, self.tick)

    def feed(self, event: Event) -> None:
        if self.machine is None:
            return
        events = [event]
        while events:
            for effect in self.machine.handle(self.now_ns, events.pop(0)):
                if self.rng.random() < self.agent_dies:
                    self.die()
                    self.later(self.upto(5 * SECOND), self.boot)
                    return
                events += self.perform(effect)

    def perform(self, effect: Effect) -> list[Event]:
        if isinstance(effect, SuspendLauncher | TerminateLauncher | KillLauncher):
            self.press(effect)
            return []
        match effect:
            case StartLauncher(record, _):
                self.records[record.token] = (record, self.now_ns)
                self.mine(self.upto(200 * MS), lambda: self.start(record.token))
                return [Remembered(record)]
            case WatchLauncher(token):
                self.mine(self.upto(20 * MS), lambda: self.watch(token))
            case StopGuards(token):
                self.mine(self.upto(100 * MS), lambda: self.guards_end(token))
            case Remember(record):
                if self.rng.random() < 0.05:  # the disk is full for a moment
                    return []
                self.records[record.token] = (record, self.now_ns)
                return [Remembered(record)]
            case Remove(token):
                self.mine(self.upto(SECOND), lambda: self.remove(token))
            case RenewLease(ends_ns):
                self.lease_ends_ns = ends_ns
            case RememberLeader(term, _, _):
                assert term >= self.term, "an older leader is followed"
                self.term = term
            case Changed():
                self.mine(self.upto(50 * MS), self.sync)
        return []

    def remove(self, token: str) -> None:
        self.records.pop(token, None)
        self.feed(Removed(token))

    def press(self, effect: SuspendLauncher | TerminateLauncher | KillLauncher) -> None:
        match effect:
            case SuspendLauncher(token):
                self.ask(token, EndedRun(cause=Cause.SUSPENDED, exit_code=85))
            case TerminateLauncher(token):
                self.ask(token, EndedRun(cause=Cause.STOPPED, exit_code=143))
            case KillLauncher(token):
                self.killed += 1
                self.end(token, None)

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self, token: str) -> None:
        self.starts[token] = self.starts.get(token, 0) + 1
        if self.rng.random() < 0.9:
            self.launchers[token] = Launched(token, hangs=self.rng.random() < 0.3)
            self.later(self.upto(60 * SECOND), lambda: self.ends_itself(token))
            self.later(SECOND, lambda: self.lease_check(token))
        self.watch(token)

    def watch(self, token: str) -> None:
        launched = self.launchers.get(token)
        if launched is None:
            self.feed(LauncherGone(token, True, self.results.get(token), token in self.starts))
            return
        life = self.life
        launched.watchers.append(lambda: self.later(self.upto(20 * MS), lambda: self.saw(token, life)))
        self.feed(LauncherUp(token))
        self.mine(self.upto(SECOND), lambda: self.feed(RanksStarted(token)))

    def saw(self, token: str, life: int) -> None:
        if self.machine is not None and self.life == life:
            self.feed(LauncherGone(token, True, self.results.get(token)))

    def ends_itself(self, token: str) -> None:
        if token in self.launchers and not self.launchers[token].hangs:
            self.end(token, EndedRun(cause=Cause.SUCCEEDED, exit_code=0))

    def ask(self, token: str, result: EndedRun) -> None:
        if token in self.launchers and not self.launchers[token].hangs:
            self.later(self.upto(3 * SECOND), lambda: self.end(token, result))

    def end(self, token: str, result: EndedRun | None) -> None:
        launched = self.launchers.pop(token, None)
        if launched is not None:
            if result is not None:
                self.results[token] = result
            for tell in launched.watchers:
                tell()

    def lease_check(self, token: str) -> None:
        """As its guard does."""
        if token in self.launchers:
            if self.now_ns >= self.lease_ends_ns:
                self.end(token, None)
            else:
                self.later(SECOND, lambda: self.lease_check(token))

    def show_ticket(self, token: str) -> None:
        if self.machine is not None and self.machine.refusal(self.now_ns, token) is None:
            self.tickets_taken += 1
            self.guards[token] = self.guards.get(token, 0) + 1
            self.later(self.upto(40 * SECOND), lambda: self.guards_end(token))
            self.feed(GuardsLiving(token, self.guards[token]))

    def guards_changed(self, token: str) -> None:
        self.feed(GuardsLiving(token, self.guards[token]))

    def guards_end(self, token: str) -> None:
        if self.guards.get(token):
            self.guards[token] = 0
            self.feed(GuardsLiving(token, 0))

    # -- managers ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """A question; its answer is lost, late or doubled, and may be that of a former leader."""
        machine = self.machine
        if machine is None:
            return
        asked_ns, statuses = self.now_ns, machine.statuses()
        self.mine(2 * SECOND + self.upto(3 * SECOND), self.sync)
        if self.away or self.rng.random() < 0.2:
            return
        self.hear(statuses)
        orders = self.orders()
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            self.mine(self.upto(4 * SECOND), lambda: self.answer(orders, asked_ns))

    def answer(self, orders: Orders, asked_ns: int) -> None:
        self.answered_ns = max(self.answered_ns, asked_ns)
        self.feed(OrdersHeard(orders, asked_ns))

    def hear(self, statuses: tuple[RunStatus, ...]) -> None:
        for status in statuses:
            if status.state == "gone":
                self.gone.add(status.token)
                if status.ended is not None:
                    assert self.ends.setdefault(status.token, status.ended) == status.ended, "another end is told"
            else:
                assert status.token not in self.gone, f"{status.token} is back after it was gone"

    def orders(self) -> Orders:
        listed = [
            RunOrder(run_token=token, wanted=wanted, launch=LAUNCH if token in LEADS else None)  # type: ignore[arg-type]
            for token, wanted in self.wanted.items()
        ]
        return Orders(term=self.leader, version=self.version, runs=tuple(listed), stop_after_ns=STOP_AFTER_NS)

    def decide(self, token: str, wanted: str | None) -> None:
        self.version += 1
        if wanted is None:
            self.wanted.pop(token, None)
        elif wanted != "forget" or token in self.gone:
            self.wanted[token] = wanted

    def new_leader(self) -> None:
        self.leader += 1
        self.version = 1


def chaos(seed: int, make: Callable[[], RunsMachine] = RunsMachine) -> World:
    rng = random.Random(seed)
    world = World(rng, make=make)
    world.boot()
    for token in TOKENS:
        begun_ns = world.upto(20 * SECOND)
        world.later(begun_ns, partial(world.decide, token, "run"))
        for wanted in ("suspend", "stop", "forget", None):
            if rng.random() < 0.5:
                at_ns = begun_ns + world.upto(60 * SECOND)
                world.later(at_ns, partial(world.decide, token, wanted))
        for _ in range(12):
            world.later(world.upto(100 * SECOND), partial(world.show_ticket, token))
    for _ in range(3):
        world.later(world.upto(90 * SECOND), world.die)
        world.later(world.upto(100 * SECOND), world.boot)
    if rng.random() < 0.5:
        world.later(world.upto(60 * SECOND), world.new_leader)
    if rng.random() < 0.3:
        at_ns = world.upto(40 * SECOND)
        world.later(at_ns, lambda: setattr(world, "away", True))
        world.later(at_ns + 60 * SECOND, lambda: setattr(world, "away", False))
        world.later(at_ns + STOP_AFTER_NS + 6 * SECOND, lambda: lease_holds(world))
    world.run(110 * SECOND)
    world.agent_dies, world.away = 0, False
    world.boot()
    for token in TOKENS:
        world.later(0, partial(world.decide, token, "stop"))
    world.run(110 * SECOND + 3 * STOP_AFTER_NS)
    return world


def lease_holds(world: World) -> None:
    """No answer came for `STOP_AFTER_NS` and a little: no launcher lives, whether or not its agent does."""
    if world.now_ns - world.answered_ns > STOP_AFTER_NS + 2 * SECOND:
        assert not world.launchers, "a launcher outlives the lease of its node"


def settled(world: World) -> None:
    assert not world.launchers, "launchers are left"
    assert not any(world.guards.values()), "guards are left"
    assert world.machine is not None
    assert {status.state for status in world.machine.statuses()} <= {"gone"}


@pytest.mark.parametrize("seed", range(150))
def test_launchers_start_once_gone_is_final_and_all_ends(seed: int) -> None:
    settled(chaos(seed))


@pytest.mark.parametrize("seeds", more_seeds(150, 750, blocks=1, wide=4150, seed_s=0.017))
def test_thousands_of_histories(seeds: range) -> None:
    for seed in seeds:
        settled(chaos(seed))


def test_the_chaos_reaches_what_it_is_for() -> None:
    worlds = [chaos(seed) for seed in range(40)]
    causes = {end.cause for world in worlds for end in world.ends.values()}
    assert causes >= {Cause.SUCCEEDED, Cause.STOPPED, Cause.SUSPENDED, Cause.INTERRUPTED}
    assert sum(world.tickets_taken for world in worlds) > 200
    assert sum(world.killed for world in worlds) > 5
    assert sum(world.life for world in worlds) > 150


# -- planted faults ----------------------------------------------------------------------------------------------------


class StartsAgain(RunsMachine):
    """A launcher that is over is started again when the manager orders it."""

    def _open(self, run: Any, order: RunOrder) -> None:
        if run.launcher is runs.Launcher.OVER and order.launch is not None:
            run.launcher = runs.Launcher.STARTING
            self._effects.append(StartLauncher(run.record, order.launch))
        super()._open(run, order)


class ForgetsStops(RunsMachine):
    """That a run is stopped is not written down."""

    def _change(self, run: Any, **changes: Any) -> None:
        super()._change(run, **changes)
        self._effects[-1] = Remember(msgspec.structs.replace(run.record, stopped=False))
        run.on_disk = True


class FollowsOldOrders(RunsMachine):
    def _on_orders(self, orders: Orders, asked_ns: int) -> None:
        self.term, self.version = 0, 0
        super()._on_orders(orders, asked_ns)


class LeaseFromTheAnswer(RunsMachine):
    """Counts from when the answer came, twice as long."""

    def _on_orders(self, orders: Orders, asked_ns: int) -> None:
        later = msgspec.structs.replace(orders, stop_after_ns=2 * orders.stop_after_ns)
        super()._on_orders(later, self._now_ns)


class GoneWithGuards(RunsMachine):
    """Looks at the launcher only."""

    def _on_guards(self, token: str, count: int) -> None:
        super()._on_guards(token, 0)


class TakesTicketsOfStoppedRuns(RunsMachine):
    def refusal(self, now_ns: int, token: str) -> runs.Refusal | None:
        return None if token in self._runs else super().refusal(now_ns, token)


class NeverKills(RunsMachine):
    def _escalate(self, run: Any) -> None:
        pass


class KeepsUnordered(RunsMachine):
    """A run that is not in the orders goes on."""

    def _stop(self, run: Any) -> None:
        if run.orphaned:
            super()._stop(run)


MUTANTS: Final = (
    StartsAgain,
    ForgetsStops,
    FollowsOldOrders,
    LeaseFromTheAnswer,
    GoneWithGuards,
    TakesTicketsOfStoppedRuns,
    NeverKills,
    KeepsUnordered,
)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_faults_are_found(mutant: type[RunsMachine]) -> None:
    for seed in range(400):
        try:
            settled(chaos(seed, mutant))
        except AssertionError:
            return
    raise AssertionError(f"{mutant.__name__} is not found")


# -- decisions one by one ----------------------------------------------------------------------------------------------


def heard(machine: RunsMachine, *orders: RunOrder, now_ns: int = 0, version: int = 1, term: int = 1) -> list[Effect]:
    answer = Orders(term=term, version=version, runs=orders, stop_after_ns=STOP_AFTER_NS)
    return machine.handle(now_ns, OrdersHeard(answer, now_ns))


RUN: Final = RunOrder(run_token=TOKENS[0], wanted="run", launch=LAUNCH)


def running(machine: RunsMachine) -> None:
    (started,) = [one for one in heard(machine, RUN) if isinstance(one, StartLauncher)]
    machine.handle(0, Remembered(started.record))
    machine.handle(0, LauncherUp(TOKENS[0]))
    machine.handle(0, RanksStarted(TOKENS[0]))


def test_orders_that_are_heard_twice_change_nothing() -> None:
    machine = RunsMachine()
    running(machine)
    assert heard(machine, RUN) == []
    suspend = msgspec.structs.replace(RUN, wanted="suspend", launch=None)
    assert heard(machine, suspend, version=2) == [SuspendLauncher(TOKENS[0])]
    assert heard(machine, suspend, version=2) == []


def test_a_launcher_that_was_stopped_before_it_was_up_is_told_when_it_is() -> None:
    machine = RunsMachine()
    heard(machine, RUN)
    heard(machine, version=2)
    assert TerminateLauncher(TOKENS[0]) in machine.handle(0, LauncherUp(TOKENS[0]))


def test_what_does_not_leave_is_terminated_and_then_killed() -> None:
    machine = RunsMachine()
    running(machine)
    heard(machine, msgspec.structs.replace(RUN, wanted="suspend"), version=2)
    term_ns = SPEC.grace_ns + runs.SUSPEND_SLACK_NS

    def pressed(now_ns: int) -> list[Effect]:
        machine.handle(now_ns, OrdersHeard(Orders(term=1, version=2, runs=(RUN,), stop_after_ns=1 << 50), now_ns))
        return [one for one in machine.handle(now_ns, Tick()) if isinstance(one, TerminateLauncher | KillLauncher)]

    assert pressed(term_ns - 1) == []
    assert pressed(term_ns) == [TerminateLauncher(TOKENS[0])]
    assert pressed(term_ns + runs.STOP_GRACE_NS) == [KillLauncher(TOKENS[0])]
    assert pressed(term_ns + runs.STOP_GRACE_NS + runs.KILL_NS) == [KillLauncher(TOKENS[0])]


def test_an_older_leader_is_not_heard_and_renews_no_lease() -> None:
    machine = RunsMachine()
    running(machine)
    heard(machine, RUN, term=2, version=1)
    assert heard(machine, now_ns=SECOND, term=1, version=9) == []
    assert machine.lease_ends_ns == STOP_AFTER_NS


def test_runs_are_stopped_politely_before_the_lease_ends() -> None:
    machine = RunsMachine()
    running(machine)
    early_ns = STOP_AFTER_NS - STOP_AFTER_NS // 5
    assert machine.handle(early_ns - 1, Tick()) == []
    assert TerminateLauncher(TOKENS[0]) in machine.handle(early_ns, Tick())
    stopped = EndedRun(cause=Cause.STOPPED, exit_code=143)
    machine.handle(early_ns, LauncherGone(TOKENS[0], True, stopped))
    refusal = machine.refusal(early_ns, TOKENS[0])
    assert refusal is not None
    assert not refusal.busy


def test_a_run_takes_so_many_guards_on_a_node_and_no_more() -> None:
    machine = RunsMachine()
    running(machine)
    for count in range(runs.MAX_GUARDS_OF_RUN):
        assert machine.refusal(0, TOKENS[0]) is None
        machine.handle(0, GuardsLiving(TOKENS[0], count + 1))
    refusal = machine.refusal(0, TOKENS[0])
    assert refusal is not None
    assert refusal.busy
    unknown = machine.refusal(0, TOKENS[1])
    assert unknown is not None
    assert unknown.busy


def test_a_run_is_known_until_its_directory_is_removed_so_that_nothing_is_written_there() -> None:
    machine = RunsMachine()
    record = RunRecord(token=TOKENS[0], over=True, lead=True, stopped=True, forgotten=True)
    assert machine.handle(0, Begin((FoundRun(record, runs.KEEP_NS),), 1, 0, STOP_AFTER_NS)) == []
    assert machine.handle(0, Tick()) == [Remove(TOKENS[0])]
    assert machine.handle(0, Tick()) == [], "it is asked for once"
    stop = RunOrder(run_token=TOKENS[0], wanted="stop")
    assert not [one for one in heard(machine, stop) if isinstance(one, Remember)]
    machine.handle(0, Removed(TOKENS[0]))
    assert [one for one in heard(machine, stop, version=2) if isinstance(one, Remember)]
