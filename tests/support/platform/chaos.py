"""A platform under faults drawn from a seed, then healed: every task must end."""

from __future__ import annotations

from tests.support.platform.agents import Agents
from tests.support.platform.hosts import Chances, Host
from tests.support.platform.site import ADMIN, CALM, LONGEST_DELAY_NS, USERS, Site

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.commands import (
    AddReservation,
    DrainNode,
    MoveNode,
    ResumeNode,
    SetLimit,
    SetLimits,
    SetPolicy,
    SetShares,
)
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Policy, Reservation
from fireflyer.cluster.schema.tasks import After, Cause

__all__ = ["Cluster", "chaos", "copied_late", "flooded", "lost_slowly", "unheard"]

CHAOS_NS = 60 * SECOND
FLOOD_NS = 40 * SECOND
HEAL_NS = 900 * SECOND
LIMITS = (Limit(kind=LimitKind.USER, name="cyd", nodes=3),)


class Cluster(Site):
    """Whose agents stay on their nodes: our scheduler places."""

    def __init__(self, seed: int, *, managers: int = 2, nodes: int = 5) -> None:
        super().__init__(seed, managers=managers, nodes=nodes)

    def _build(self, managers: list[str], nodes: int) -> None:
        self.agents = agents = Agents(self.grounds, self.post, managers, self.oracle.said)
        self.hosts = [
            Host(self.world, self.grounds, f"n{number}", self._drift(), agents.boot) for number in range(nodes)
        ]

    def _places(self) -> list[str]:
        return [one.name for one in self.managers] + [one.name for one in self.hosts]

    # --- what users do ---

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
        self._roughen_links()
        rng = self.rng
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

    def _isolate(self) -> None:
        """One node from all managers, and not from other nodes."""
        self.cut_off_from_managers(self.rng.choice(self.hosts).name, symmetric=self.rng.random() < 0.6)

    def long_tasks_first(self) -> None:
        """As many as there are nodes."""
        rng = self.rng
        self._works[:] = [(100 if task <= len(self.hosts) else rng.randrange(5, 12)) * SECOND for task in range(200)]
        self._causes[:] = [Cause.SUCCEEDED for _ in self._causes]

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
