"""Processes that lose each other, re-form their group, and come back, in a seeded world. The machine is the real one.

Each process is a simulated node that runs `Membership` over one store, an operation at a time: others run, die and
pause between any two of them. A rendezvous is what is left of the real one: everybody says that it is there, twice (the
second time stands for the barrier), and waits for all others. What a process does next is written into `ends`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import msgspec

from fireflyer.base.errors import FireflyerError, StaleVersion
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.bootstrap.membership import (
    Admitted,
    AnnounceAndWait,
    Event,
    Generation,
    GenerationOpened,
    GenerationRead,
    JoinRequest,
    JoinRequestWritten,
    Membership,
    Policy,
    Propose,
    Proposed,
    ReadGeneration,
    Rejected,
    WriteJoinRequest,
)
from fireflyer.collectives.planning.plan import make_plan
from fireflyer.runtime.store_core import StoreTable
from fireflyer.sim.world import SimNode, World

__all__ = ["GRACE_NS", "LIMIT_NS", "POLICY", "Process", "ReformWorld"]

GRACE_NS = 400 * MS
MEETING_NS = 500 * MS
LIMIT_NS = 20 * SECOND
GLANCE_NS = 10 * MS
POLICY = Policy(1, None, GRACE_NS, suspect_ns=60 * MS, newcomer_ns=60 * MS)
Task = Generator[int | None, None, None]


@dataclass
class Process:
    name: str
    node: int
    rank: int
    """-1: it wants to join."""
    sim: SimNode | None = None
    generation: int = 0
    formed: Generation | None = None
    running: bool = False
    error: FireflyerError | None = None
    left: bool = False
    uid: str = ""
    refusals: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.sim is not None and self.sim.alive


@dataclass
class ReformWorld:
    seed: int
    nodes: list[int]
    """Of the ranks of generation 0."""
    policy: Policy = POLICY
    pause: float = 0.0
    """Chance, at each step, to stand still for up to a second."""
    die_at: dict[str, int] = field(default_factory=dict)
    """After so many of its steps a process dies."""
    leavers: frozenset[str] = frozenset()
    blind: float = 0.3
    """Chance that a survivor does not know who failed."""

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.table = StoreTable()
        self.processes: dict[str, Process] = {}
        self.decided: dict[int, bytes] = {}
        self.formed: dict[int, set[str]] = {}
        self.calm_ns = 5 * SECOND
        for rank, node in enumerate(self.nodes):
            self.start(f"p{rank}", node, rank)

    def start(self, name: str, node: int, rank: int = -1, *, delay_ns: int = 0, uid: str | None = None) -> Process:
        process = self.processes[name] = Process(name, node, rank, uid=uid or name)

        def boot(sim: SimNode) -> None:
            sim.after(delay_ns, lambda: sim.spawn(self._steps(process)))

        process.sim = self.world.node(name, boot)
        return process

    def run(self) -> None:
        self.world.run(until_ns=LIMIT_NS)

    # --- a process ---

    def _steps(self, process: Process) -> Task:
        """Its whole life, with deaths and pauses between the steps."""
        rng = self.world.fork_random(f"life of {process.name}")
        for number, delay in enumerate(self._life(process)):
            if self.die_at.get(process.name) == number:
                assert process.sim is not None
                process.sim.crash()
                return
            yield delay
            if self.world.now_ns < self.calm_ns and rng.random() < self.pause:
                yield rng.randrange(SECOND)

    def _life(self, process: Process) -> Task:
        world_size, suspects = len(self.nodes), self._suspects(process, {f"p{r}": r for r in range(len(self.nodes))})
        me = JoinRequest(process.uid, process.rank, -1, process.node, process.name in self.leavers, suspects)
        policy = self.policy
        if process.rank < 0:
            me = yield from self._ticket(process)
        while True:
            end: list[Admitted | Rejected] = []
            yield from self._take_part(process, me, world_size, policy, end)
            outcome = end[0]
            if isinstance(outcome, Rejected):
                process.error, process.left = outcome.error, outcome.error is None
                if not isinstance(outcome.error, StaleVersion):
                    return
                process.refusals.append(str(outcome.error))
                me = yield from self._ticket(process)
                process.generation, policy, world_size = self._latest(), self.policy, 0
                continue
            process.error = None
            process.generation, process.formed = outcome.formed.generation, outcome.formed
            self.check_decision(outcome.formed)
            met: list[bool] = []
            yield from self._meet(process, outcome, met)
            if met[0]:
                process.running = True
                self.formed.setdefault(process.generation, set()).add(process.name)
                yield from self._work(process, outcome)
                process.running = False
            names = {self._named(slot.uid): rank for rank, slot in enumerate(outcome.formed.slots)}
            me = me.survivor(outcome.rank, self._suspects(process, names))
            world_size = len(outcome.formed.slots)
            policy = self.policy if met[0] else self.policy.again(2 * MEETING_NS)

    def _ticket(self, process: Process) -> Generator[int | None, None, JoinRequest]:
        yield None
        total, _ = self.table.add("tickets", 1)
        process.uid = f"{process.name}/{total}"
        process.generation = self._latest()
        return JoinRequest(process.uid, -1, total, process.node)

    def _take_part(
        self, process: Process, me: JoinRequest, world_size: int, policy: Policy, end: list[Admitted | Rejected]
    ) -> Task:
        machine = Membership(
            me,
            generation=process.generation + 1,
            world_size=world_size,
            policy=policy,
            plan_of=make_plan,
            deadline_ns=self.world.now_ns + 10 * SECOND,
        )
        effect = machine.begin(self.world.now_ns)
        while not isinstance(effect, Admitted | Rejected):
            events: list[Event] = []
            yield from self._perform(effect, events)
            effect = machine.handle(self.world.now_ns, events[0])
        end.append(effect)

    def _perform(
        self, effect: AnnounceAndWait | WriteJoinRequest | ReadGeneration | Propose, events: list[Event]
    ) -> Task:
        yield None
        match effect:
            case AnnounceAndWait(generation, join_order, timeout_ns):
                self.table.set(f"{generation}/waiting/{join_order:08d}", b"waits")
                yield from self._until(f"{generation}/open", timeout_ns)
                events.append(GenerationOpened(self.table.get(f"{generation}/open") is not None))
            case WriteJoinRequest(generation, arrival):
                key = f"{generation}/member/{arrival.place}"
                held, _ = self.table.set_if_missing(key, msgspec.json.encode(arrival))
                yield None
                if arrival.rank >= 0:
                    self.table.set(f"{generation}/open", b"open")
                events.append(JoinRequestWritten(msgspec.json.decode(held, type=JoinRequest)))
            case ReadGeneration(generation, timeout_ns, everybody):
                yield from self._until(f"{generation}/seats", timeout_ns)
                yield from self._look(generation, everybody, events)
            case Propose(proposal):
                held, _ = self.table.set_if_missing(f"{proposal.generation}/seats", msgspec.json.encode(proposal))
                yield None
                events.append(Proposed(msgspec.json.decode(held, type=Generation)))

    def _look(self, generation: int, everybody: bool, events: list[Event]) -> Task:
        data = self.table.get(f"{generation}/seats")
        if data is not None:
            events.append(GenerationRead(msgspec.json.decode(data, type=Generation)))
            return
        arrivals = []
        for key in self.table.keys(f"{generation}/member/") if everybody else []:
            yield None
            arrivals.append(msgspec.json.decode(self.table.get(key) or b"", type=JoinRequest))
        waiting = [int(key.rpartition("/")[2]) for key in self.table.keys(f"{generation}/waiting/")]
        events.append(GenerationRead(None, tuple(arrivals), tuple(waiting)))

    def _until(self, key: str, timeout_ns: int) -> Task:
        deadline_ns = self.world.now_ns + timeout_ns
        while self.table.get(key) is None and self.world.now_ns < deadline_ns:
            yield min(GLANCE_NS, deadline_ns - self.world.now_ns)

    def _meet(self, process: Process, end: Admitted, met: list[bool]) -> Task:
        generation, ranks = end.formed.generation, range(len(end.formed.slots))
        deadline_ns = self.world.now_ns + MEETING_NS
        for phase in ("there", "ready"):
            yield None
            self.table.set(f"{generation}/{phase}/{end.rank}", b"yes")
            while any(self.table.get(f"{generation}/{phase}/{rank}") is None for rank in ranks):
                if self.world.now_ns >= deadline_ns:
                    met.append(False)
                    return
                yield GLANCE_NS
        met.append(True)

    def _work(self, process: Process, end: Admitted) -> Task:
        """Computes until a member is gone, or somebody wants to come in."""
        generation = end.formed.generation
        while True:
            yield 5 * GLANCE_NS
            others = [self.processes[self._named(slot.uid)] for slot in end.formed.slots]
            if any(not other.alive or other.generation != generation or not other.running for other in others):
                return
            if self.policy.max_world_size is None and self.table.keys(f"{generation + 1}/waiting/"):
                return

    def _latest(self) -> int:
        generation = 0
        while self.table.get(f"{generation + 1}/seats") is not None:
            generation += 1
        return generation

    def _named(self, uid: str) -> str:
        return uid.partition("/")[0]

    def _suspects(self, process: Process, rank_of: dict[str, int]) -> tuple[int, ...]:
        if self.world.fork_random(f"{process.name} {self.world.now_ns}").random() < self.blind:
            return ()
        dead = [rank for name, rank in rank_of.items() if name in self.processes and not self.processes[name].alive]
        return tuple(dead) if self.world.now_ns > 0 else ()

    # --- what must hold ---

    def check_decision(self, formed: Generation) -> None:
        """Nobody ever sees two lists of one generation; survivors keep their order, newcomers come after them."""
        data = msgspec.json.encode(formed)
        assert self.decided.setdefault(formed.generation, data) == data, f"two lists of generation {formed.generation}"
        before = [slot.previous_rank for slot in formed.slots if slot.previous_rank >= 0]
        assert before == sorted(set(before))
        assert [slot.previous_rank for slot in formed.slots[: len(before)]] == before
        orders = [slot.join_order for slot in formed.slots[len(before) :]]
        assert orders == sorted(set(orders))
        assert len({slot.uid for slot in formed.slots}) == len(formed.slots)
        assert len(before) >= 1
        assert len(formed.slots) >= self.policy.min_world_size
        assert len(formed.slots) <= (self.policy.max_world_size or len(formed.slots))

    def check_end(self) -> None:
        """Who is alive, and was not refused, computes in the newest generation, of which all members are alive."""
        living = [one for one in self.processes.values() if one.alive and not one.left and one.error is None]
        for process in living:
            assert process.running, f"{process} is stuck"
            assert process.generation == self._latest(), process
            assert process.formed is not None
            members = {self._named(slot.uid) for slot in process.formed.slots}
            assert members == {one.name for one in living}
