"""A platform under faults drawn from a seed, then healed: every task must end."""

from __future__ import annotations

import msgspec
from tests.support.platform.agents import Agents
from tests.support.platform.clients import Client
from tests.support.platform.hosts import ROUGH, Chances, Grounds, Host
from tests.support.platform.managers import ManagerHost
from tests.support.platform.oracle import PlatformOracle
from tests.support.platform.post import Post
from tests.support.platform.store import SimStore, StoreFaults

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.platform.commands import (
    AddReservation,
    Command,
    DrainNode,
    MoveNode,
    ResumeNode,
    ResumeTask,
    SetLimit,
    SetLimits,
    SetPolicy,
    SetPriority,
    SetShares,
    StopTask,
    SuspendTask,
)
from fireflyer.cluster.core.platform.messages import Commanded, Submitted
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Policy, Reservation
from fireflyer.cluster.schema.tasks import After, Cause, Program, TaskSpec
from fireflyer.sim import Link, SimNet, World

__all__ = ["Cluster", "chaos", "copied_late", "flooded", "lost_slowly", "unheard"]

MAX_DRIFT_PPM = 9_900
CHAOS_NS = 60 * SECOND
FLOOD_NS = 40 * SECOND
HEAL_NS = 900 * SECOND
CALM = Link(min_delay_ns=MS // 4, max_delay_ns=4 * MS)
USERS = ("ann", "bob", "cyd")
GROUPS = {"ann": "lab", "bob": "lab"}
ADMIN = ("platform:admin",)
SPEC = TaskSpec(name="t", program=Program(script="train.py"), grace_ns=4 * SECOND, max_requeues=4, max_restarts=1)
LIMITS = (Limit(kind=LimitKind.USER, name="cyd", nodes=3),)
LONGEST_DELAY_NS = 12 * SECOND


class Cluster:
    def __init__(self, seed: int, *, managers: int = 2, nodes: int = 5) -> None:
        self.world = World(seed)
        self.rng = self.world.fork_random("chaos")
        self.net = SimNet(self.world, default=CALM)
        self.post = Post(self.net)
        self.oracle = PlatformOracle(self.world)
        self.store = SimStore(self.world, self.oracle.committed)
        self.oracle.store = self.store
        self._cut: dict[tuple[str, str], bool] = {}
        work = self.world.fork_random("work")
        self._works = [work.choice([work.randrange(2, 25), work.randrange(20, 70)]) * SECOND for _ in range(200)]
        self._causes = [work.choice([Cause.SUCCEEDED] * 6 + [Cause.PROGRAM, Cause.INFRASTRUCTURE]) for _ in range(200)]
        self.grounds = Grounds(
            self.world,
            self.oracle.launch,
            self.oracle.started,
            lambda task: self._works[task % 200],
            lambda task: self._causes[task % 200],
            cut=lambda a, b: self._cut.get((a, b), False),
        )
        self.oracle.grounds = self.grounds
        names = [f"m{number}" for number in range(managers)]
        self.managers = [
            ManagerHost(self.world, self.post, self.store, self.oracle, self.oracle.tables, name, self._drift())
            for name in names
        ]
        agents = Agents(self.grounds, self.post, names, self.oracle.said)
        self.hosts = [
            Host(self.world, self.grounds, f"n{number}", self._drift(), agents.boot) for number in range(nodes)
        ]
        self.clients = [Client(self.world, self.post, user, names) for user in USERS]
        self._keys = 0
        self._check()

    def _drift(self) -> int:
        return self.rng.choice([-MAX_DRIFT_PPM, 0, MAX_DRIFT_PPM, self.rng.randint(-9000, 9000)])

    def _check(self) -> None:
        self.oracle.every_second()
        self.world.call_after(SECOND, self._check)

    # --- what users do ---

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

    def submit_something(self) -> None:
        rng = self.rng
        client = rng.choice(self.clients)
        least = rng.choice([1, 1, 2, 2, 3, 3 if client.name == "cyd" else len(self.hosts)])
        fields: dict[str, object] = {"least_nodes": least, "most_nodes": least + rng.choice([0, 0, 1])}
        fields["priority"] = rng.choice([5, 10, 10, 20])
        if rng.random() < 0.1:
            fields["array"] = 3
        if rng.random() < 0.1:
            fields["time_ns"] = rng.randrange(4, 30) * SECOND
        known = [task for tasks in client.submitted.values() for task in tasks]
        if known and rng.random() < 0.15:
            fields["after"] = (After(rng.choice(known), rng.random() < 0.5),)
        self.submit(client, **fields)

    def command_something(self) -> None:
        rng = self.rng
        client = rng.choice(self.clients)
        known = [task for tasks in client.submitted.values() for task in tasks]
        if not known:
            return
        task = rng.choice(known[-4:])
        commands: list[Command] = [StopTask(task), SuspendTask(task), ResumeTask(task), SetPriority(task, 20)]
        self.command(client, rng.choices(commands, [1, 2, 3, 1])[0])

    def drain_something(self) -> None:
        node = self.rng.choice(self.hosts).name
        command = DrainNode(node, "to be looked at") if self.rng.random() < 0.4 else ResumeNode(node)
        self.command(self.clients[0], command, ADMIN)

    def reserve_something(self) -> None:
        """For maintenance, or for a user: soon, or from now on."""
        rng = self.rng
        users = () if rng.random() < 0.6 else (rng.choice(USERS),)
        self._reserve(f"r{rng.randrange(4)}", rng.randrange(-2, 30), rng.randrange(5, 40), users)

    def _reserve(self, name: str, in_s: int, for_s: int, users: tuple[str, ...] = ()) -> None:
        state = self.oracle.state
        assert state is not None
        nodes = tuple(host.name for host in self.rng.sample(self.hosts, self.rng.choice([1, 1, 2])))
        begin_ns = state.time_ns + in_s * SECOND
        window = Reservation(name=name, nodes=nodes, begin_ns=begin_ns, until_ns=begin_ns + for_s * SECOND, users=users)
        self.command(self.clients[0], AddReservation(window), ADMIN)

    def limit_something(self) -> None:
        """Groups, priorities, each user; and shares."""
        rng = self.rng
        if rng.random() < 0.3:
            shares = {user: rng.choice([1.0, 2.0, 8.0]) for user in USERS}
            self.command(self.clients[0], SetShares(shares), ADMIN)
            return
        kind = rng.choice([LimitKind.GROUP, LimitKind.EACH])
        limit = Limit(
            kind=kind,
            name="lab" if kind is LimitKind.GROUP else "",
            priority=rng.choice([None, 10, 20]),
            nodes=rng.randrange(1, len(self.hosts)),
        )
        self.command(self.clients[0], SetLimit(limit), ADMIN)

    # --- running ---

    def run_for(self, duration_ns: int) -> None:
        self.world.run(until_ns=self.world.now_ns + duration_ns)
        for client in self.clients:
            for tasks in client.submitted.values():
                self.oracle.acknowledged.update(dict.fromkeys(tasks))

    def begin(self, age_step_ns: int = 30 * SECOND, gang_age_ns: int = 20 * SECOND) -> None:
        self.run_for(20 * SECOND)
        policy = Policy(
            cross_zone_nodes=2,
            age_step_ns=age_step_ns,
            gang_age_ns=gang_age_ns,
            usage_step_ns=5 * SECOND,
            usage_half_life_ns=60 * SECOND,
        )
        admin = self.clients[0]
        self.command(admin, SetPolicy(policy, guaranteed_ns=4 * SECOND), ADMIN)
        self.command(admin, SetLimits(LIMITS), ADMIN)
        for number, host in enumerate(self.hosts):
            self.command(admin, MoveNode(host.name, f"z{number % 2}", f"l{number % 3}"), ADMIN)
        self.run_for(5 * SECOND)
        assert admin.idle, "the managers do not answer"

    # --- faults ---

    def roughen(self) -> None:
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
        faults = (
            self._partition,
            self._stop_or_start_manager,
            self._cut_store,
            self._restart_agent,
            self._power,
            self._isolate,
            self._lose_slowly,
            self.command_something,
            self.drain_something,
            self.reserve_something,
            self.limit_something,
        )
        self._faults = [(self.submit_something, 6), (self._heal, 3), *((one, rng.choice([0, 1, 3])) for one in faults)]

    def disturb(self) -> None:
        self.rng.choices([fault for fault, _ in self._faults], [weight for _, weight in self._faults])[0]()

    def _names(self) -> list[str]:
        return [one.name for one in self.managers] + [one.name for one in self.hosts]

    def _partition(self) -> None:
        left = [name for name in self._names() if self.rng.random() < 0.4]
        right = [name for name in self._names() if name not in left]
        self._divide(left, right, symmetric=self.rng.random() < 0.6)

    def _isolate(self) -> None:
        """One node from all managers, and not from other nodes."""
        self.cut_off_from_managers(self.rng.choice(self.hosts).name, symmetric=self.rng.random() < 0.6)

    def replace_leader(self) -> None:
        """It leaves, the one that left before comes back."""
        self._start_managers()
        for manager in self.managers:
            if manager.acts():
                manager.leave()

    def cut_off_from_managers(self, name: str, *, symmetric: bool = True) -> None:
        self._divide([name], [one.name for one in self.managers], symmetric=symmetric)

    def cut_off(self, name: str) -> None:
        self._divide([name], [other for other in self._names() if other != name], symmetric=True)

    def short_tasks(self) -> None:
        self._works[:] = [2 * SECOND for _ in self._works]

    def long_tasks_first(self) -> None:
        """As many as there are nodes."""
        rng = self.rng
        self._works[:] = [(100 if task <= len(self.hosts) else rng.randrange(5, 12)) * SECOND for task in range(200)]
        self._causes[:] = [Cause.SUCCEEDED for _ in self._causes]

    def slow_tasks(self) -> None:
        self._works[:] = [100 * SECOND for _ in self._works]
        self._causes[:] = [Cause.SUCCEEDED for _ in self._causes]

    def _divide(self, left: list[str], right: list[str], *, symmetric: bool) -> None:
        self.net.partition(left, right, symmetric=symmetric)
        for a in left:
            for b in right:
                self._cut[a, b] = True
                self._cut[b, a] = self._cut.get((b, a), False) or symmetric

    def _heal(self) -> None:
        self.net.heal()
        self._cut.clear()
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

    def _restart_agent(self) -> None:
        host = self.rng.choice(self.hosts)
        if not host.powered:
            host.power_on()
        elif not host.agent.alive or self.rng.random() < 0.6:
            host.agent.restart()
        else:
            host.agent.crash()

    def _power(self) -> None:
        host = self.rng.choice(self.hosts)
        if not host.powered:
            host.power_on()
        else:
            host.power_cut()

    def _lose_slowly(self) -> None:
        """The agent of a node ends, the ranks there go on, and much later nobody reaches them."""
        running = {ranks.host.name for ranks in self.grounds.living_ranks()}
        busy = [host for host in self.hosts if host.agent.alive and host.name in running]
        if not busy:
            return
        host = self.rng.choice(busy)
        host.agent.crash()
        delay_ns = self.rng.randrange(2, 20) * SECOND
        self.world.call_after(delay_ns, lambda: self.cut_off(host.name))

    # --- the end of faults ---

    def heal(self) -> None:
        self._heal()
        self.net.set_default(CALM)
        self.store.faults = None
        self.grounds.faults = Chances()
        for host in self.hosts:
            if not host.powered:
                host.power_on()
            elif not host.agent.alive:
                host.agent.restart()
        self._start_managers()
        self.run_for(LONGEST_DELAY_NS + 5 * SECOND)
        self._start_managers()  # one that was leaving has left now
        self.run_for(25 * SECOND)  # until the last cut that was to come
        self._heal()
        self.oracle.maintenance.calm = self.oracle.starvation.calm = True
        self.command(self.clients[0], SetLimits(LIMITS), ADMIN)
        for host in self.hosts:
            self.command(self.clients[0], ResumeNode(host.name), ADMIN)
        self._reserve("last", self.rng.randrange(32, 60), self.rng.randrange(10, 40))
        end_ns = self.world.now_ns + HEAL_NS
        while self.world.now_ns < end_ns and not self._ended():
            self._resume_held()
            self.run_for(5 * SECOND)
        self.run_for(10 * SECOND)
        self.oracle.tables.slow = False
        end_ns = self.world.now_ns + HEAL_NS
        while self.world.now_ns < end_ns and not self.oracle.all_copied():
            self.run_for(2 * SECOND)
        assert self._ended(), f"seed {self.world.seed}: {self.describe()}"
        self.oracle.check_end()

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


def lost_slowly(seed: int) -> Cluster:
    """A gang runs on after the agent of a node has ended, until nobody reaches that node any more; then it is run again
    at once, while ranks live on there."""
    cluster = Cluster(seed, nodes=4)
    cluster.begin()
    cluster.slow_tasks()
    cluster.submit(cluster.clients[0], least_nodes=2, most_nodes=2)
    cluster.run_for(10 * SECOND)
    (launcher,) = cluster.grounds.launchers
    lost = cluster.grounds.hosts[launcher.nodes[1]]
    lost.agent.crash()
    cluster.run_for(cluster.rng.randrange(4, 16) * SECOND)
    cluster.cut_off(lost.name)
    cluster.run_for(45 * SECOND)
    cluster.heal()
    return cluster


def unheard(seed: int) -> Cluster:
    """Managers and the node of a launcher do not hear each other any more, while the gang reaches all of its nodes."""
    cluster = Cluster(seed, nodes=4)
    cluster.begin()
    cluster.slow_tasks()
    nodes = 1 + seed % 2
    cluster.submit(cluster.clients[0], least_nodes=nodes, most_nodes=nodes)
    cluster.run_for(10 * SECOND)
    (launcher,) = cluster.grounds.launchers
    cluster.cut_off_from_managers(launcher.nodes[0])
    cluster.run_for(45 * SECOND)
    cluster.heal()
    return cluster


def copied_late(seed: int) -> Cluster:
    """Leaders leave one after the other while the database is slow: what one has sent arrives after what the next ones
    have copied, when the tasks have ended already."""
    cluster = Cluster(seed)
    cluster.begin()
    cluster.short_tasks()
    for _ in range(12):
        for client in cluster.clients:
            cluster.submit(client)
        cluster.run_for(cluster.rng.randrange(SECOND, 5 * SECOND))
        cluster.replace_leader()
        cluster.run_for(10 * SECOND)
    cluster.heal()
    return cluster


def flooded(seed: int) -> Cluster:
    """One user has all nodes for long; then more than the cluster can do comes from others, nearly all of it of higher
    priority than a few tasks."""
    cluster = Cluster(seed, nodes=4)
    cluster.begin(age_step_ns=SECOND, gang_age_ns=2 * SECOND)
    cluster.long_tasks_first()
    cluster.oracle.starvation.calm = True
    rng = cluster.rng
    for _ in cluster.hosts:
        cluster.submit(cluster.clients[1], priority=50)
    cluster.run_for(6 * SECOND)
    end_ns = cluster.world.now_ns + FLOOD_NS
    low = [cluster.world.now_ns + rng.randrange(10 * SECOND) for _ in range(2)]
    while cluster.world.now_ns < end_ns:
        client = rng.choice([cluster.clients[0], cluster.clients[2]])
        nodes = rng.choice([1, 1, 2])
        cluster.submit(client, least_nodes=nodes, most_nodes=nodes, priority=rng.choice([40, 45, 50]))
        if low and low[0] <= cluster.world.now_ns:
            low.pop()
            cluster.submit(client, least_nodes=nodes, most_nodes=nodes, priority=rng.randrange(10))
        cluster.run_for(rng.randrange(SECOND, 3 * SECOND))
    cluster.heal()
    return cluster


def chaos(seed: int) -> Cluster:
    cluster = Cluster(seed, managers=3 if seed % 4 == 0 else 2, nodes=4 if seed % 3 else 6)
    cluster.begin()
    cluster.roughen()
    end_ns = cluster.world.now_ns + CHAOS_NS
    while cluster.world.now_ns < end_ns:
        cluster.disturb()
        cluster.run_for(cluster.rng.randrange(3 * SECOND))
    cluster.heal()
    return cluster
