"""What a platform in a seeded world has whatever its engine: managers, users, the store, and a network that is cut."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from tests.support.platform.clients import Client
from tests.support.platform.hosts import ROUGH, Chances, Grounds
from tests.support.platform.managers import ManagerHost
from tests.support.platform.oracle import PlatformOracle
from tests.support.platform.post import Post
from tests.support.platform.store import SimStore, StoreFaults

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.platform.commands import Command, ResumeTask, SetPriority, StopTask, SuspendTask
from fireflyer.cluster.core.platform.messages import Commanded, Submitted
from fireflyer.cluster.schema.tasks import Cause, Program, TaskSpec
from fireflyer.sim import Link, SimNet, World

__all__ = ["ADMIN", "CALM", "LONGEST_DELAY_NS", "MAX_DRIFT_PPM", "USERS", "Site"]

MAX_DRIFT_PPM = 9_900
CALM = Link(min_delay_ns=MS // 4, max_delay_ns=4 * MS)
USERS = ("ann", "bob", "cyd")
GROUPS = {"ann": "lab", "bob": "lab"}
ADMIN = ("platform:admin",)
SPEC = TaskSpec(name="t", program=Program(script="train.py"), grace_ns=4 * SECOND, max_requeues=4, max_restarts=1)
LONGEST_DELAY_NS = 12 * SECOND
_TASKS = 200


class Site:
    """`_build` makes the nodes."""

    def __init__(self, seed: int, *, managers: int, nodes: int) -> None:
        self.world = World(seed)
        self.rng = self.world.fork_random("chaos")
        self.net = SimNet(self.world, default=CALM)
        self.post = Post(self.net)
        self.oracle = self._oracle()
        self.store = SimStore(self.world, self.oracle.committed)
        self.oracle.store = self.store
        self._cut: dict[tuple[str, str], bool] = {}
        work = self.world.fork_random("work")
        self._works = [work.choice([work.randrange(2, 25), work.randrange(20, 70)]) * SECOND for _ in range(_TASKS)]
        causes = [Cause.SUCCEEDED] * 6 + [Cause.PROGRAM, Cause.INFRASTRUCTURE]
        self._causes = [work.choice(causes) for _ in range(_TASKS)]
        self.grounds = Grounds(
            self.world,
            self.oracle.launch,
            self.oracle.started,
            lambda task: self._works[task % _TASKS],
            lambda task: self._causes[task % _TASKS],
            cut=self.is_cut,
        )
        self.oracle.grounds = self.grounds
        names = [f"m{number}" for number in range(managers)]
        self.managers = [self._manager(name, self._drift()) for name in names]
        self._build(names, nodes)
        self.clients = [Client(self.world, self.post, user, names) for user in USERS]
        self._keys = 0
        self._faults: list[tuple[Callable[[], None], int]] = []
        self._check()

    # --- what engines differ in ---

    def _oracle(self) -> PlatformOracle:
        return PlatformOracle(self.world)

    def _manager(self, name: str, drift_ppm: int) -> ManagerHost:
        return ManagerHost(self.world, self.post, self.store, self.oracle, self.oracle.tables, name, drift_ppm)

    def _build(self, managers: list[str], nodes: int) -> None:
        raise NotImplementedError

    def _places(self) -> list[str]:
        """All that can be cut off from each other."""
        raise NotImplementedError

    def is_cut(self, a: str, b: str) -> bool:
        """From the one to the other."""
        return self._cut.get((a, b), False)

    def _drift(self) -> int:
        return self.rng.choice([-MAX_DRIFT_PPM, 0, MAX_DRIFT_PPM, self.rng.randint(-9000, 9000)])

    def _check(self) -> None:
        self.oracle.every_second()
        self.world.call_after(SECOND, self._check)

    def submit(self, client: Client, **fields: object) -> None:
        self._keys += 1
        base = msgspec.structs.replace(SPEC, name=f"t{self._keys}")
        request = Submitted(
            call=0,
            user=client.name,
            group=GROUPS.get(client.name, ""),
            key=f"k{self._keys}",
            specs=(msgspec.structs.replace(base, **fields),),
        )
        client.ask(request)

    def command(self, client: Client, command: Command, roles: tuple[str, ...] = ()) -> None:
        client.ask(Commanded(call=0, user=client.name, roles=roles, command=command))

    def command_something(self) -> None:
        rng = self.rng
        client = rng.choice(self.clients)
        known = [task for tasks in client.submitted.values() for task in tasks]
        if not known:
            return
        task = rng.choice(known[-4:])
        commands: list[Command] = [StopTask(task), SuspendTask(task), ResumeTask(task), SetPriority(task, 20)]
        self.command(client, rng.choices(commands, [1, 2, 3, 1])[0])

    def run_for(self, duration_ns: int) -> None:
        self.world.run(until_ns=self.world.now_ns + duration_ns)
        for client in self.clients:
            for tasks in client.submitted.values():
                self.oracle.acknowledged.update(dict.fromkeys(tasks))

    def _partition(self) -> None:
        left = [name for name in self._places() if self.rng.random() < 0.4]
        right = [name for name in self._places() if name not in left]
        self._divide(left, right, symmetric=self.rng.random() < 0.6)

    def replace_leader(self) -> None:
        """It leaves, the one that left before comes back."""
        self._start_managers()
        for manager in self.managers:
            if manager.acts():
                manager.leave()

    def cut_off_from_managers(self, name: str, *, symmetric: bool = True) -> None:
        self._divide([name], [one.name for one in self.managers], symmetric=symmetric)

    def cut_off(self, name: str) -> None:
        self._divide([name], [other for other in self._places() if other != name], symmetric=True)

    def short_tasks(self) -> None:
        self._works[:] = [2 * SECOND for _ in self._works]

    def slow_tasks(self) -> None:
        self._works[:] = [100 * SECOND for _ in self._works]
        self._causes[:] = [Cause.SUCCEEDED for _ in self._causes]

    def _divide(self, left: list[str], right: list[str], *, symmetric: bool) -> None:
        self.net.partition(left, right, symmetric=symmetric)
        for a in left:
            for b in right:
                self._cut[a, b] = True
                self._cut[b, a] = self._cut.get((b, a), False) or symmetric

    def rejoin(self) -> None:
        """Everybody reaches everybody again; other faults stay."""
        self.net.heal()
        self._cut.clear()

    def _heal(self) -> None:
        self.rejoin()
        self.store.cut.clear()

    def _stop_or_start_manager(self) -> None:
        manager = self.rng.choice(self.managers)
        if not manager.node.alive or self.rng.random() < 0.5:
            manager.node.restart()
        elif self.rng.random() < 0.3:
            manager.leave()
        else:
            manager.node.crash()

    def _cut_store(self) -> None:
        name = self.rng.choice(self.managers).name
        self.store.cut[name] = not self.store.cut.get(name, False)

    def _start_managers(self) -> None:
        for manager in self.managers:
            if not manager.node.alive:
                manager.node.restart()

    def _resume_held(self) -> None:
        for client in self.clients:
            for task in [task for tasks in client.submitted.values() for task in tasks]:
                row = self.oracle.tasks.get(task)
                if row is not None and row.held and client.idle:
                    self.command(client, ResumeTask(task))

    def _ended(self) -> bool:
        tasks = self.oracle.tasks.values()
        return (
            all(client.idle for client in self.clients)
            and all(row.ended_ns is not None for row in tasks)
            and not self.oracle.places
        )

    def describe(self) -> str:
        rows = [
            f"{row.id}: {row.state.value} run {row.runs - 1}"
            for row in self.oracle.tasks.values()
            if row.ended_ns is None
        ]
        leader = next((one for one in self.managers if one.acts()), None)
        whys = [
            leader.machine.why(row.id, leader.now_ns).text
            for row in self.oracle.tasks.values()
            if row.ended_ns is None and leader is not None
        ]
        waiting = [str(one) for client in self.clients for one in client.waiting.values()]
        return f"not all has ended: {rows} {whys} {sorted(self.oracle.places)} {waiting}"

    def disturb(self) -> None:
        self.rng.choices([fault for fault, _ in self._faults], [weight for _, weight in self._faults])[0]()

    def _roughen_links(self) -> None:
        """The network, the store, and what starts on nodes."""
        rng = self.rng
        self.net.set_default(
            Link(
                min_delay_ns=MS // 4,
                max_delay_ns=40 * MS,
                loss=rng.choice([0.0, 0.02, 0.1]),
                duplication=rng.choice([0.0, 0.05, 0.3]),
                slow_probability=rng.choice([0.0, 0.04, 0.2]),
                slow_ns=rng.choice([2 * SECOND, LONGEST_DELAY_NS]),
            )
        )
        self.store.faults = StoreFaults(
            slow=rng.choice([0.0, 0.05, 0.3]), failed=rng.choice([0.0, 0.05]), unknown=rng.choice([0.0, 0.05, 0.2])
        )
        self.grounds.faults = rng.choice([ROUGH, ROUGH, Chances()])
