"""The agent of a machine under chaos: it is killed between any two effects, the machine is started again, process
numbers are given anew, launchers ask twice, late, in the wrong order and never, guards end by themselves, hang and
are killed.

The world below is what the real shell rests on: an order on disk, a lock that the processes of a guard hold, a record
of which process the guard is, the words that it said. The machine is the real one."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pytest

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.agent import (
    MAX_GUARDS,
    START_NS,
    STOP_NS,
    AgentMachine,
    Begin,
    Effect,
    End,
    Event,
    Forget,
    Forgotten,
    Found,
    GuardGone,
    GuardState,
    GuardUp,
    Joined,
    Kill,
    Order,
    Refused,
    Revoked,
    Spawn,
    StartRequested,
    StopRequested,
    Terminate,
    Tick,
    Watch,
)

PIDS: Final = 6
"""So few that numbers are given again soon."""


@dataclass(slots=True)
class Process:
    """A starter, which becomes a guard and thereby keeps its number."""

    pid: int
    start: int
    token: str
    hung: bool = False
    watchers: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True)
class Record:
    """The directory of a guard."""

    order: Order
    process: tuple[int, int] | None = None
    clean: bool = False
    end: End | None = None


@dataclass(slots=True)
class World:
    rng: random.Random
    agent_dies: float = 0.03
    """Before an effect."""
    now_ns: int = 0
    queue: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0
    records: dict[str, Record] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    machine: AgentMachine | None = None
    life: int = 0
    """Of the agent: what an earlier one began does not go on."""
    watched: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What the living agent has a pidfd of."""
    spawned: dict[str, int] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    """Tokens whose stop was answered."""
    refused: list[Refused] = field(default_factory=list)
    told: dict[str, End] = field(default_factory=dict)
    starts: int = 0

    def later(self, delay_ns: int, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now_ns + delay_ns, self.count, act))

    def mine(self, delay_ns: int, act: Callable[[], None]) -> None:
        """Done by the agent that lives now, if it lives then."""
        life = self.life
        self.later(delay_ns, lambda: act() if self.life == life and self.machine is not None else None)

    def upto(self, limit_ns: int) -> int:
        return self.rng.randrange(limit_ns)

    def run(self, until_ns: int) -> None:
        while self.queue and self.queue[0][0] <= until_ns:
            self.now_ns, _, act = heapq.heappop(self.queue)
            act()
        self.now_ns = until_ns

    # -- the agent -----------------------------------------------------------------------------------------------------

    def boot_agent(self) -> None:
        self.machine = AgentMachine(serves_own=True)
        self.life += 1
        self.watched = {}
        self.feed(Begin(tuple(Found(one.order, one.end) for one in self.records.values())))
        self.mine(SECOND, self.tick)

    def kill_agent(self) -> None:
        self.machine = None

    def tick(self) -> None:
        self.feed(Tick())
        self.mine(SECOND, self.tick)

    def feed(self, event: Event) -> list[Effect]:
        assert self.machine is not None
        effects = self.machine.handle(self.now_ns, event)
        for effect in effects:
            if self.rng.random() < self.agent_dies:
                self.kill_agent()
                self.later(self.upto(3 * SECOND), self.boot_again)
                return effects
            self.perform(effect)
        return effects

    def feed_again(self, order: Order) -> None:
        self.feed(StartRequested(order))

    def boot_again(self) -> None:
        if self.machine is None:
            self.boot_agent()

    def perform(self, effect: Effect) -> None:
        match effect:
            case Spawn(order):
                self.records[order.token] = Record(order)
                self.mine(self.upto(100 * MS), lambda: self.spawn(order))
            case Watch(token):
                self.mine(self.upto(10 * MS), lambda: self.watch(token))
            case Terminate(token):
                self.signal(token, self.ask)
            case Kill(token):
                self.signal(token, self.end)
                self.sweep(token)
            case Forget(token):
                record = self.records.pop(token)
                assert not self.lives(token), f"{token} is forgotten while it lives"
                assert record.end is not None
            case Refused():
                self.refused.append(effect)

    def spawn(self, order: Order) -> None:
        token = order.token
        free = [pid for pid in range(PIDS) if pid not in self.processes]
        if self.lives(token):
            raise AssertionError(f"{token} is started beside itself")
        if free:
            place = order.place
            assert self.latest.get(place, 0) < order.incarnation, f"{token} is started after a later incarnation"
            self.latest[place] = order.incarnation
            self.spawned[token] = self.spawned.get(token, 0) + 1
            self.starts += 1
            process = Process(self.rng.choice(free), self.starts, token, hung=self.rng.random() < 0.1)
            self.processes[process.pid] = process
            places = [one.token.rpartition(".")[0] for one in self.processes.values()]
            assert len(places) == len(set(places)), "two incarnations of a node run beside each other"
            self.later(self.upto(300 * MS), lambda: self.become_guard(process))
        self.watch(token)

    def watch(self, token: str) -> None:
        """As the shell does: looks until the record of the process is there or nothing lives."""
        record = self.records[token]
        if record.process is None and self.lives(token):
            self.mine(50 * MS, lambda: self.watch(token))
            return
        identity = record.process
        process = None if identity is None else self.processes.get(identity[0])
        if identity is not None and process is not None and process.start == identity[1]:
            life = self.life
            process.watchers.append(lambda: self.later(self.upto(20 * MS), lambda: self.saw_end(token, life)))
            self.watched[token] = identity
            self.feed(GuardUp(token))
            return
        self.conclude(token)

    def saw_end(self, token: str, life: int) -> None:
        if self.machine is not None and self.life == life:
            del self.watched[token]
            self.conclude(token)

    def conclude(self, token: str) -> None:
        record = self.records[token]
        if not record.clean:
            self.sweep(token)
        record.end = End(clean=not self.lives(token), reason="ended")
        self.feed(GuardGone(token, record.end))

    def signal(self, token: str, act: Callable[[Process], None]) -> None:
        identity = self.watched.get(token)
        process = None if identity is None else self.processes.get(identity[0])
        if process is not None and identity is not None and process.start == identity[1]:
            assert process.token == token, "a process of another guard was signalled"
            act(process)

    # -- processes -----------------------------------------------------------------------------------------------------

    def lives(self, token: str) -> bool:
        return any(process.token == token for process in self.processes.values())

    def become_guard(self, process: Process) -> None:
        if self.processes.get(process.pid) is not process:
            return
        if self.rng.random() < 0.1:  # no such directory, no memory
            self.end(process)
            return
        record = self.records.get(process.token)
        assert record is not None, f"{process.token} begins after it was forgotten"
        record.process = (process.pid, process.start)
        self.later(self.upto(20 * SECOND), lambda: self.end_by_itself(process))

    def end_by_itself(self, process: Process) -> None:
        """Its ranks have ended, or its lease."""
        if self.processes.get(process.pid) is process and not process.hung:
            self.records[process.token].clean = True
            self.end(process)

    def ask(self, process: Process) -> None:
        if not process.hung:
            self.later(self.upto(200 * MS), lambda: self.end_by_itself(process))

    def end(self, process: Process) -> None:
        if self.processes.get(process.pid) is process:
            del self.processes[process.pid]
            for tell in process.watchers:
                tell()

    def sweep(self, token: str) -> None:
        for process in [one for one in self.processes.values() if one.token == token]:
            self.end(process)

    def reboot(self) -> None:
        self.kill_agent()
        self.processes.clear()
        self.later(self.upto(SECOND), self.boot_again)

    # -- launchers -----------------------------------------------------------------------------------------------------

    def ask_start(self, order: Order) -> None:
        if self.machine is None:
            self.later(200 * MS, lambda: self.ask_start(order))
            return
        known = order.token in self.machine.guards
        if self.rng.random() < 0.5:  # asked twice, over a connection that the agent still reads
            self.mine(self.upto(20 * SECOND), lambda: self.feed_again(order))
        effects = self.feed(StartRequested(order))
        assert not (known and effects), "a known token was started again"
        if any(isinstance(effect, Refused) and effect.busy for effect in effects) and order.token not in self.stopped:
            self.later(200 * MS, lambda: self.ask_start(order))

    def ask_stop(self, token: str) -> None:
        if self.machine is None:
            self.later(200 * MS, lambda: self.ask_stop(token))
            return
        self.feed(StopRequested(token))
        if self.machine is not None:
            self.stopped.add(token)

    def stop_until_ended(self, token: str) -> None:
        """Stops it until it has ended: an agent that is killed forgets that it was asked to."""
        guard = None if self.machine is None else self.machine.guards.get(token)
        if guard is None or guard.state not in (GuardState.STOPPING, GuardState.ENDED):
            self.boot_again()
            self.ask_stop(token)
        if self.lives(token) or token in self.records:
            self.later(5 * SECOND, lambda: self.stop_until_ended(token))

    def hear(self, token: str) -> None:
        """A launcher that waits for the end, and says when it has heard of it."""
        guard = None if self.machine is None else self.machine.guards.get(token)
        if guard is not None and guard.state is GuardState.ENDED and guard.end is not None:
            if guard.end.clean:
                assert not self.lives(token), f"{token} lives though its end was told"
            self.told[token] = guard.end
            if self.rng.random() < 0.8:
                self.feed(Forgotten(token))
            return
        self.later(500 * MS, lambda: self.hear(token))


def chaos(seed: int) -> World:
    rng = random.Random(seed)
    world = World(rng)
    world.boot_agent()
    orders = []
    for job in range(3):
        for node in range(2):
            for incarnation in range(1, 4):
                order = Order(token=f"{job:08x}.{node}.{incarnation}", job="job", node=node, incarnation=incarnation)
                orders.append(order)
                begun_ns = incarnation * 12 * SECOND + world.upto(8 * SECOND)
                world.later(begun_ns, partial(world.ask_start, order))
                if rng.random() < 0.6:
                    world.later(begun_ns + world.upto(10 * SECOND), partial(world.ask_stop, order.token))
                world.later(begun_ns + 5 * SECOND, partial(world.hear, order.token))
    for _ in range(4):
        world.later(world.upto(60 * SECOND), world.kill_agent)
        world.later(world.upto(60 * SECOND), world.boot_again)
    if rng.random() < 0.3:
        world.later(world.upto(60 * SECOND), world.reboot)

    world.run(90 * SECOND)
    world.agent_dies = 0
    for order in orders:
        world.stop_until_ended(order.token)
    world.run(90 * SECOND + 3 * (START_NS + STOP_NS))
    return world


@pytest.mark.parametrize("seed", range(60))
def test_guards_are_started_once_found_again_and_ended(seed: int) -> None:
    world = chaos(seed)
    assert all(count == 1 for count in world.spawned.values())
    assert not world.processes, "processes are left that no agent ends"
    assert all(record.end is not None for record in world.records.values())
    assert world.machine is not None
    assert {guard.state for guard in world.machine.guards.values()} == {GuardState.ENDED}


def test_the_chaos_reaches_what_it_is_for() -> None:
    worlds = [chaos(seed) for seed in range(20)]
    assert sum(world.starts for world in worlds) > 100
    assert sum(world.life for world in worlds) > 60
    assert any("former processes" in one.reason for world in worlds for one in world.refused)
    assert any("later incarnation" in one.reason for world in worlds for one in world.refused)
    assert any(not world.spawned.get(token) for world in worlds for token in world.told)
    killed = [world for world in worlds if any(not end.clean for end in world.told.values())]
    assert not killed  # SIGKILL works here, so everything was cleaned up before it was told


# -- decisions one by one ----------------------------------------------------------------------------------------------


def order_of(token: str) -> Order:
    node, incarnation = (int(part) for part in token.split(".")[1:])
    return Order(token=token, job="job", node=node, incarnation=incarnation)


def started(machine: AgentMachine, token: str) -> None:
    assert machine.handle(0, StartRequested(order_of(token))) == [Spawn(order_of(token))]
    assert machine.handle(0, GuardUp(token)) == []


def test_an_agent_of_root_starts_nothing() -> None:
    (refused,) = AgentMachine(serves_own=False).handle(0, StartRequested(order_of("00000001.0.1")))
    assert isinstance(refused, Refused)
    assert not refused.busy
    assert refused.reason.startswith("its agent runs as root and takes work only from a platform")


def test_a_stop_that_overtakes_the_start_prevents_it() -> None:
    machine = AgentMachine(serves_own=True)
    assert machine.handle(0, StopRequested("00000001.0.1")) == []
    assert machine.handle(0, StartRequested(order_of("00000001.0.1"))) == []
    assert machine.guards["00000001.0.1"].state is GuardState.ENDED
    assert machine.handle(0, Forgotten("00000001.0.1")) == []  # nothing of it is on disk


def test_a_guard_that_is_stopped_before_it_is_up_is_asked_when_it_is() -> None:
    machine = AgentMachine(serves_own=True)
    machine.handle(0, StartRequested(order_of("00000001.0.1")))
    assert machine.handle(0, StopRequested("00000001.0.1")) == []
    assert machine.handle(0, GuardUp("00000001.0.1")) == [Terminate("00000001.0.1")]


def test_a_guard_that_lives_is_not_forgotten() -> None:
    machine = AgentMachine(serves_own=True)
    started(machine, "00000001.0.1")
    assert machine.handle(0, Forgotten("00000001.0.1")) == []
    assert machine.guards["00000001.0.1"].state is GuardState.RUNNING


def test_guards_of_a_revoked_credential_are_stopped_and_none_is_started_until_the_machine_joins_again() -> None:
    machine = AgentMachine(serves_own=True)
    started(machine, "00000001.0.1")
    assert machine.handle(0, Revoked()) == [Terminate("00000001.0.1")]
    (refused,) = machine.handle(0, StartRequested(order_of("00000002.0.1")))
    assert isinstance(refused, Refused)
    assert "revoked" in refused.reason
    machine.handle(0, Joined())
    assert machine.handle(0, StartRequested(order_of("00000002.0.1"))) == [Spawn(order_of("00000002.0.1"))]


def test_a_guard_that_does_not_end_is_killed_and_again_until_it_has() -> None:
    machine = AgentMachine(serves_own=True)
    started(machine, "00000001.0.1")
    assert machine.handle(0, StopRequested("00000001.0.1")) == [Terminate("00000001.0.1")]
    assert machine.handle(STOP_NS - 1, Tick()) == []
    assert machine.handle(STOP_NS, Tick()) == [Kill("00000001.0.1")]
    assert machine.handle(2 * STOP_NS - 1, Tick()) == []
    assert machine.handle(2 * STOP_NS, Tick()) == [Kill("00000001.0.1")]


def test_a_machine_runs_so_many_guards_at_a_time_and_no_more() -> None:
    machine = AgentMachine(serves_own=True)
    for number in range(MAX_GUARDS):
        started(machine, f"{number:08x}.0.1")
    (refused,) = machine.handle(0, StartRequested(order_of("ffffffff.0.1")))
    assert isinstance(refused, Refused)
    assert refused.busy
    machine.handle(0, GuardGone("00000000.0.1", End(clean=True, reason="")))
    assert machine.handle(0, StartRequested(order_of("ffffffff.0.1"))) == [Spawn(order_of("ffffffff.0.1"))]
