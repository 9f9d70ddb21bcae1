"""A cluster under faults drawn from a seed, then healed: everything must serve again."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.fs.manager_sim.cluster import (
    FAILURE_TIMEOUT_NS,
    Administrator,
    ManagerHost,
    StorageHost,
    fake_client,
)
from tests.support.fs.manager_sim.oracle import ClusterOracle
from tests.support.fs.manager_sim.store import SimStore, StoreFaults

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.rows import MOVES
from fireflyer.fs.schema.manager import (
    AddChains,
    AddMoves,
    AddNode,
    AddTable,
    AddTargets,
    Drain,
    NewChain,
    NewMove,
    Override,
    RotateKeys,
)
from fireflyer.fs.schema.routing import Member, TargetState
from fireflyer.sim import Link, SimNet, World

__all__ = ["Cluster", "chaos", "inject_faults", "some_cluster"]

MAX_DRIFT_PPM = 9_900
"""Just under the bound that the fence is made for, either way."""
SLICE_NS = 500 * MS
CHAOS_NS = 24 * SECOND
HEAL_NS = 70 * SECOND
"""Silence (T), hold-off after broken paths (5 T), leases, and one target after the other to be synced."""
SPARE = 900
"""Target 902 of node 2 is in no chain at first."""
MOVE_NS = 40 * SECOND
"""For moves that have begun, one after the other."""
CALM = Link(min_delay_ns=MS // 4, max_delay_ns=4 * MS)
LONGEST_DELAY_NS = 8 * SECOND


class Cluster:
    """`nodes` storage nodes with one target for each chain that they are in; chain c is on nodes c, c + 1, ..."""

    def __init__(self, seed: int, *, managers: int = 2, nodes: int = 3, chains: int = 2, replicas: int = 2) -> None:
        self.world = World(seed)
        self.rng = self.world.fork_random("chaos")
        self.net = SimNet(self.world, default=CALM)
        self.oracle = ClusterOracle(self.world, [f"m{number}" for number in range(managers)])
        self.store = SimStore(self.world, self.oracle.committed)
        self.managers = [
            ManagerHost(self.world, self.net, self.store, self.oracle, name, self._drift())
            for name in self.oracle.manager_names
        ]
        self.oracle.managers.extend(self.managers)
        self.targets: dict[int, list[int]] = {node: [] for node in range(1, nodes + 1)}
        self.new_chains = []
        for chain in range(1, chains + 1):
            members = [(chain + place - 1) % nodes + 1 for place in range(replicas)]
            for node in members:
                self.targets[node].append(100 * chain + node)
            self.new_chains.append(NewChain(chain, tuple(100 * chain + node for node in members)))
        for node, targets in self.targets.items():
            targets.append(SPARE + node)
        self.hosts = [self._host(node, f"n{node}") for node in self.targets]
        self._failed: dict[str, bool] = {}
        """Hosts on which a disk has failed since."""
        self._faults: list[tuple[Callable[[], None], int]] = []
        self.admin = Administrator(self.world, self.net, self.oracle)
        self.clients = [fake_client(self.world, self.net, self.oracle, f"c{number}") for number in range(3)]

    def _drift(self) -> int:
        return self.world.random.choice([-MAX_DRIFT_PPM, 0, MAX_DRIFT_PPM, self.world.random.randint(-9000, 9000)])

    def _host(self, node: int, name: str) -> StorageHost:
        host = StorageHost(self.world, self.net, self.oracle, node, self.targets[node], name, self._drift())
        self.oracle.hosts.append(host)
        return host

    # --- running ---

    def run_for(self, duration_ns: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """In slices, with writes between them. True if `stop` became true."""
        end_ns = self.world.now_ns + duration_ns
        while self.world.now_ns < end_ns:
            self.world.run(until_ns=self.world.now_ns + self.rng.randrange(SLICE_NS // 2, SLICE_NS))
            for chain in self.oracle.chains:
                self.oracle.write(chain, flush=self.rng.random() < 0.8)
            if stop():
                return True
        return False

    def begin(self) -> None:
        """Makes the chains, and waits until all of them serve."""
        for node, targets in self.targets.items():
            self.admin.ask(AddNode(node), AddTargets(node, tuple(targets)))
        assert self.run_for(30 * SECOND, lambda: self.admin.idle), "the administrator gets no answers"
        assert self.run_for(10 * SECOND, lambda: all(one.process and one.process.incarnation for one in self.hosts))
        self.admin.ask(AddChains(tuple(self.new_chains)), AddTable(1, tuple(one.id for one in self.new_chains)))
        assert self.run_for(30 * SECOND, self.all_serve), f"the new chains are not served: {self.describe()}"

    def all_serve(self) -> bool:
        """Every target of every chain, by its own fence and knowledge."""
        if len(self.oracle.chains) < len(self.new_chains):
            return False
        for chain in self.oracle.chains.values():
            for member in chain.members:
                processes = [one.process for one in self.hosts if one.node_id == member.node and one.process]
                if not any(one.serves(member.target) for one in processes):
                    return False
        return True

    def describe(self) -> str:
        states = [
            f"{chain.id}v{chain.version}: " + " ".join(f"{one.target}={one.state}" for one in chain.members)
            for chain in self.oracle.chains.values()
        ]
        return f"seed {self.world.seed} at {self.world.now_ns / SECOND:.1f} s: " + "; ".join(states)

    # --- faults ---

    def roughen(self) -> None:
        """Draws what this history is rough in: all faults in each one would leave too little time between them."""
        rng = self.rng
        link = Link(
            min_delay_ns=MS // 4,
            max_delay_ns=40 * MS,
            loss=rng.choice([0.0, 0.02, 0.1]),
            duplication=rng.choice([0.0, 0.05, 0.3]),
            slow_probability=rng.choice([0.0, 0.04, 0.2]),
            slow_ns=rng.choice([2 * SECOND, LONGEST_DELAY_NS]),
        )
        self.net.set_default(link)
        self.store.faults = StoreFaults(
            slow=rng.choice([0.0, 0.05, 0.3]),
            failed=rng.choice([0.0, 0.05]),
            unknown=rng.choice([0.0, 0.05, 0.2]),
        )
        faults = (
            self._cut,
            self._stop_or_start_node,
            self._flap,
            self._stop_or_start_manager,
            self._cut_store,
            self._break_disk,
            self._break_path,
            self._drain,
            self._leave,
            self._rotate_keys,
            self._move_disks,
            self._move_chain,
        )
        self._faults = [(self._heal, 4), *((fault, rng.choice([0, 1, 4])) for fault in faults)]

    def disturb(self) -> None:
        """One fault, or the end of one."""
        self.rng.choices([fault for fault, _ in self._faults], [weight for _, weight in self._faults])[0]()

    def _cut(self) -> None:
        names = [one.name for one in self.managers] + [one.name for one in self.hosts]
        left = [name for name in names if self.rng.random() < 0.4]
        self.net.partition(left, [name for name in names if name not in left], symmetric=self.rng.random() < 0.5)

    def _heal(self) -> None:
        self.net.heal()
        self.store.cut.clear()

    def _stop_or_start_node(self) -> None:
        host = self.rng.choice(self.hosts)
        if not host.node.alive:
            host.node.restart()
        elif self.rng.random() < 0.3:
            host.power_cut()
        elif self.rng.random() < 0.5:
            host.node.restart()
        else:
            host.node.crash()

    def _flap(self) -> None:
        """A process that starts again and again."""
        node, after_ns = self.rng.choice(self.hosts).node, 0
        for _ in range(self.rng.randrange(2, 5)):
            self.world.call_after(after_ns, node.restart)
            after_ns += self.rng.randrange(3 * SECOND)

    def _stop_or_start_manager(self) -> None:
        manager = self.rng.choice(self.managers)
        node = manager.node
        if not node.alive or self.rng.random() < 0.5:
            node.restart()
        elif self.rng.random() < 0.5:
            manager.leave()
        else:
            node.crash()

    def _cut_store(self) -> None:
        name = self.rng.choice(self.managers).name
        self.store.cut[name] = not self.store.cut.get(name, False)

    def _break_disk(self) -> None:
        host = self.rng.choice(self.hosts)
        if host.process is not None and host.node.alive:
            target = self.rng.choice(host.targets)
            if self.rng.random() < 0.5:
                host.process.fail(target)
                self._failed[host.name] = True
            else:
                host.process.stop(target)

    def _break_path(self) -> None:
        host, other = self.rng.sample(self.hosts, 2)
        host.broken_to[other.node_id] = not host.broken_to.get(other.node_id, False)

    def _drain(self) -> None:
        self.admin.ask(Drain(node=self.rng.choice(list(self.targets)), drain=self.rng.random() < 0.6))

    def _leave(self) -> None:
        """What an administrator does to empty a node."""
        node = self.rng.choice(list(self.targets))
        self.admin.ask(Drain(node=node, drain=self.rng.random() < 0.8, at_once=False))
        for chain in self.oracle.chains.values():
            others = [other for other in self.targets if all(member.node != other for member in chain.members)]
            for member in chain.members:
                if member.node == node and others:
                    self.admin.ask(AddMoves((NewMove(chain.id, member.target, self.rng.choice(others)),)))

    def _rotate_keys(self) -> None:
        self.admin.ask(RotateKeys(self.rng.random() < 0.2))

    def _move_chain(self) -> None:
        """To a node that has none of its targets, if there is one."""
        chain = self.rng.choice(list(self.oracle.chains.values()))
        source = self.rng.choice(chain.members).target
        others = [node for node in self.targets if all(member.node != node for member in chain.members)]
        if others:
            self.admin.ask(AddMoves((NewMove(chain.id, source, self.rng.choice(others)),)))

    def _move_disks(self) -> None:
        """The node's disks are started on another machine, whether or not the process on the first one is dead."""
        host = self.rng.choice(self.hosts)
        name = f"{host.name}'"
        if name not in self.world.nodes:
            self.hosts.append(self._host(host.node_id, name))

    # --- the end of faults ---

    def heal(self) -> None:
        self._heal()
        self.net.set_default(CALM)
        self.store.faults = None
        for host in self.hosts:
            host.broken_to.clear()
            if host.name.endswith("'"):
                host.node.crash()
            elif self._failed.get(host.name, False):
                host.node.restart()
        for manager in self.managers:
            if not manager.node.alive or (manager.manager is not None and manager.manager.leaving):
                manager.node.restart()
        self.run_for(LONGEST_DELAY_NS)  # until the last late message has come in
        self.admin.ask(*(Drain(node=node, drain=False) for node in self.targets))
        if not self.run_for(HEAL_NS + MOVE_NS, self._help):
            raise AssertionError(
                f"not all serve {(HEAL_NS + MOVE_NS) // SECOND} s after the last fault: {self.describe()}"
            )
        if not self.run_for(10 * SECOND, self._all_know_who_lives):
            raise AssertionError(f"not all have heard which sessions live, or keys: {self.oracle.sessions.living}")

    def _all_know_who_lives(self) -> bool:
        """Of each node, the process that has registered last."""
        last = self.oracle.incarnations
        processes = [one.process for one in self.hosts if one.process and one.process.incarnation == last[one.node_id]]
        acting = [one.key_ids for one in self.managers if one.acts()]
        return all(
            dict(one.sessions.clients) == self.oracle.sessions.living and [one.key_ids] == acting for one in processes
        )

    def _reports_unsure(self, member: Member) -> bool:
        processes = [one.process for one in self.hosts if one.node_id == member.node and one.process and one.node.alive]
        return any(not process.membership._targets[member.target].clean for process in processes)

    def _help(self) -> bool:
        """Starts what has ended; decides for chains of which no clean target is left. True when all serve."""
        for host in self.hosts:
            if not host.node.alive and not host.name.endswith("'"):
                host.node.restart()
        if self.admin.idle:
            for chain in self.oracle.chains.values():
                last = [one for one in chain.members if one.state is TargetState.LASTSRV]
                if len(last) == 1 and self._reports_unsure(last[0]):
                    self.admin.ask(Override(chain.id, last[0].target))
        return self.all_serve() and not any(key.startswith(MOVES.prefix) for key in self.store.contents)


def some_cluster(seed: int) -> Cluster:
    """Every third one has three replicas."""
    return Cluster(seed, managers=3 if seed % 4 == 0 else 2, replicas=3 if seed % 3 == 0 else 2)


def inject_faults(cluster: Cluster) -> None:
    """Faults every second or so, then peace until all serve."""
    cluster.begin()
    cluster.roughen()
    while cluster.world.now_ns < CHAOS_NS:
        cluster.disturb()
        cluster.run_for(cluster.rng.randrange(2 * FAILURE_TIMEOUT_NS // 5))
    cluster.heal()


def chaos(seed: int) -> Cluster:
    cluster = some_cluster(seed)
    inject_faults(cluster)
    return cluster
