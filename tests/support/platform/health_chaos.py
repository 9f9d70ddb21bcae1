"""A platform whose nodes break, flap, and are accused by users, under all other faults: then all is repaired.

What is true of a node is `Condition`; what its checks print follows from it. `HealthOracle` holds the managers to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from tests.support.health import fault, passes
from tests.support.platform.chaos import CHAOS_NS, Cluster
from tests.support.platform.hosts import Grounds, Host
from tests.support.platform.managers import SETTINGS, ManagerHost
from tests.support.platform.oracle import PlatformOracle
from tests.support.platform.site import ADMIN, LONGEST_DELAY_NS
from tests.support.platform.store import StoreFaults

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.health.records import OUT, Hold, NodeHealth, RepairState
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.health.rounds import Round
from fireflyer.cluster.core.platform.commands import RecordRepair, ReturnNode
from fireflyer.cluster.core.platform.node_checking import Checks, NodeChecking
from fireflyer.cluster.core.platform.store.rows import HEALTH, RunRow, Wish
from fireflyer.cluster.schema.sync import HealthOrder
from fireflyer.kvstore.core.fenced import Transact
from fireflyer.sim import World

__all__ = ["HealthCluster", "dropped", "health_chaos"]

POLICY = HealthPolicy(
    breaker_share=0.4,
    probe_spacing_ns=SECOND,
    probe_limit_ns=40 * SECOND,
    flaps=4,
    flap_window_ns=1000 * SECOND,
    test_every_ns=2 * SECOND,
    back_off_ns=SECOND,
    back_off_most_ns=8 * SECOND,
    probation_ns=5 * SECOND,
)
ORDER = HealthOrder(program=("health",), period_ns=8 * SECOND)
XID = fault("gpu_xid", cause="xid_79", part="gpu:0", at_once=True, once=True, words="fell off the bus")
UNCORRECTED = fault("kernel_errors", cause="edac_ue", once=True, words="1 UE memory read error")
"""It happened, and no probe and no test finds it again."""
MOUNT = fault("mounts", part="mount:/data", words="is missing")
SHARED = fault("mounts", part="mount:/shared", at_once=True, words="is missing")
"""On all nodes, while the server is away."""
FORGED = fault("disk_space", part="mount:/tmp", at_once=True, user_made=True, words="is full")
CHECKS = ("gpu_xid", "kernel_errors", "mounts", "disk_space")
SETTLED_NS = 60 * SECOND
"""Without other faults: from a fault until it is acted on or held, with probes that came to no result before."""


@dataclass
class Condition:
    broken: dict[str, HealthEvent] = field(default_factory=dict)
    """By check: until it is repaired."""
    broken_until_ns: dict[str, int] = field(default_factory=dict)
    """By check: it was so until then."""
    flaps_until_ns: int = 0
    """A mount that is away for a moment."""
    forged: bool = False
    """The user of the node's ranks makes evidence, for as long as they live."""
    hung: bool = False
    told: tuple[tuple[int, str], ...] = ()
    """Incarnations of the agent to which the kernel's log has said of what happened: it says it once."""

    def over(self, check: str, now_ns: int) -> None:
        if self.broken.pop(check, None) is not None:
            self.broken_until_ns[check] = now_ns

    def was_broken(self, check: str, now_ns: int) -> bool:
        """What was seen before the repair may be acted on for a while."""
        return check in self.broken or now_ns < self.broken_until_ns.get(check, -SETTLED_NS) + SETTLED_NS


class HealthOracle(PlatformOracle):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.health: dict[str, NodeHealth] = {}
        self.conditions: dict[str, Condition] = {}
        self.drained = self.held = self.refunded = 0

    def committed(self, order: Transact) -> None:
        for key, value in order.write:
            if key.startswith(HEALTH.prefix):
                self._record(key, value)
        super().committed(order)
        self._check_drained()
        self._check_breaker()

    def _record(self, key: bytes, value: bytes | None) -> None:
        name = key[len(HEALTH.prefix) :].decode()
        if value is None:
            self.health.pop(name, None)
            return
        row, old = HEALTH.decode(key, value), self.health.get(name)
        came = old.state if old is not None else RepairState.HEALTHY
        if row.state in OUT and came not in OUT:
            self.drained += 1
            condition = self.conditions[name]
            broken = row.fault is not None and condition.was_broken(row.fault.check, self.world.now_ns)
            assert broken or row.taken, f"{name} is not broken, and no operator has asked for its test"
            condition.over(UNCORRECTED.check, self.world.now_ns)  # it is history, as the node is out now
            self._check_acted(name, old, row)
        if row.state in (RepairState.PROBATION, RepairState.RETURNED) and row.state is not came:
            tested = came in (RepairState.TESTING, RepairState.PROBATION, RepairState.SUSPECT)
            assert tested, f"{name} returns from {came.value} without a test"
        self.held += row.hold is Hold.BREAKER
        self.health[name] = row

    def _check_acted(self, name: str, old: NodeHealth | None, row: NodeHealth) -> None:
        if old is None or old.hold not in (Hold.BREAKER, Hold.LEAF) or row.taken or row.heard != old.heard:
            return
        assert row.fault is not None
        assert row.fault.once, f"{name} was held, and is out for what nothing has found again"

    def _check_breaker(self) -> None:
        out = [name for name, row in self.health.items() if row.state in OUT and not row.taken]
        assert len(out) <= max(1, int(POLICY.breaker_share * max(1, len(self.zones)))), f"{out} are out"

    def _check_drained(self) -> None:
        for name, row in self.health.items():
            place = self.places.get(name)
            assert place is None or row.state is not RepairState.TESTING, f"{name} is tested beside a run"
            if place is None or row.state is not RepairState.DRAINED or row.fault is None:
                continue
            run = self.runs[place.task, place.run]
            stays = row.fault.severity == "high" and run.wanted == "run"
            assert not stays, f"{name} is drained by a fault of high severity, and its run is not to leave"

    def _check_start(self, run: RunRow, *, claimed: bool) -> None:
        bad = [name for name in run.nodes if name in self.health and not _serves(self.health[name])]
        assert not bad, f"task {run.task} begins on {bad}"
        super()._check_start(run, claimed=claimed)

    def _task(self, key: bytes, value: bytes | None) -> None:
        before = dict(self.tasks)
        super()._task(key, value)
        for task, row in self.tasks.items():
            old = before.get(task)
            if old is None or row is old or not row.runs:
                continue
            run = self.runs.get((task, row.runs - 1))
            if run is not None and run.wish is Wish.NODE_FAULT:
                self.refunded += 1
                assert row.requeues == old.requeues, f"task {task} is charged for a faulty node"


def _serves(row: NodeHealth) -> bool:
    return row.state in (RepairState.HEALTHY, RepairState.PROBATION, RepairState.RETURNED)


class HealthManager(ManagerHost):
    settings = msgspec.structs.replace(SETTINGS, checking=NodeChecking(Checks(policy=POLICY, order=ORDER)))


class HealthCluster(Cluster):
    oracle: HealthOracle

    def __init__(self, seed: int, *, managers: int = 2, nodes: int = 6) -> None:
        super().__init__(seed, managers=managers, nodes=nodes)
        self.conditions = self.oracle.conditions
        self.shared_until_ns = 0
        for host in self.hosts:
            self.conditions[host.name] = Condition()
        self.agents.checked = self._checked
        self.all_repaired = False
        self._operate()

    def _oracle(self) -> HealthOracle:
        return HealthOracle(self.world)

    def _manager(self, name: str, drift_ppm: int) -> ManagerHost:
        return HealthManager(self.world, self.post, self.store, self.oracle, self.oracle.tables, name, drift_ppm)

    # --- what checks print ---

    def _checked(self, host: Host, due: Round) -> tuple[tuple[bytes, ...], str]:
        condition, grounds = self.conditions[host.name], self.grounds
        if condition.hung:
            return (), "killed after 60 s"
        only = due.program[2] if due.program[1:2] == ("--check",) else ""
        lines: list[bytes] = []
        for check in CHECKS:
            if only in ("", check):
                event = self._finding(host, condition, check, grounds) or passes(check)
                lines.append(msgspec.json.encode(event))
        return tuple(lines), ""

    def _finding(self, host: Host, condition: Condition, check: str, grounds: Grounds) -> HealthEvent | None:
        if check == "mounts" and self.world.now_ns < self.shared_until_ns:
            return SHARED
        if check == "mounts" and self.world.now_ns < condition.flaps_until_ns:
            return MOUNT
        if check == "disk_space" and condition.forged and any(ranks.host is host for ranks in grounds.living_ranks()):
            return FORGED
        event = condition.broken.get(check)
        if event is XID and host.name in self.oracle.health and not _serves(self.oracle.health[host.name]):
            return event
        if event is None or not event.once:
            return event
        if (host.incarnation, check) in condition.told:
            return None
        condition.told = (*condition.told, (host.incarnation, check))
        return event

    # --- what happens to nodes ---

    def roughen(self) -> None:
        super().roughen()
        weight = self.rng.choice([2, 5, 10])
        self._faults += [(act, weight) for act in (self.break_node, self.flap, self.forge, self.hang, self.share)]

    def break_node(self) -> None:
        name = self.rng.choice(self.hosts).name
        condition, row = self.conditions[name], self.oracle.health.get(name)
        event = self.rng.choice([XID, MOUNT, msgspec.structs.replace(MOUNT, severity="low"), UNCORRECTED])
        if event is UNCORRECTED and row is not None and row.state in OUT:
            return  # nobody is to act on what happens to a node that is out
        condition.broken[event.check] = event
        condition.told = ()

    def share(self) -> None:
        """The server of a mount of all nodes is away for a while."""
        self.shared_until_ns = max(self.shared_until_ns, self.world.now_ns + self.rng.randrange(20 * SECOND))
        for condition in self.conditions.values():
            condition.broken_until_ns["mounts"] = self.shared_until_ns

    def flap(self) -> None:
        self.conditions[self.rng.choice(self.hosts).name].flaps_until_ns = self.world.now_ns + self.rng.randrange(
            SECOND
        )

    def forge(self) -> None:
        condition = self.conditions[self.rng.choice(self.hosts).name]
        condition.forged = not condition.forged

    def hang(self) -> None:
        condition = self.conditions[self.rng.choice(self.hosts).name]
        condition.hung = not condition.hung

    def _mend(self, condition: Condition) -> None:
        for check in tuple(condition.broken):
            condition.over(check, self.world.now_ns)

    def _operate(self) -> None:
        """Operators repair what is out, sometimes in vain, and ask for returns."""
        self.world.call_after(4 * SECOND, self._operate)
        admin = self.clients[0]
        if not admin.idle:
            return
        for name, row in sorted(self.oracle.health.items()):
            if row.state in OUT and row.state not in (RepairState.DRAINED, RepairState.TESTING):
                if self.all_repaired or self.rng.random() < 0.7:
                    self._mend(self.conditions[name])
                remedy = self.rng.choice([Remedy.RESET, Remedy.REBOOT, Remedy.RMA])
                self.command(admin, RecordRepair(name, remedy, "done"), ADMIN)
            elif row.hold is Hold.BREAKER and self.all_repaired:
                self.command(admin, ReturnNode(name, "all is repaired"), ADMIN)
            elif self._may_be_wrong(row) and self.rng.random() < 0.1:
                self.command(admin, ReturnNode(name, "a wrong alarm"), ADMIN)

    def _may_be_wrong(self, row: NodeHealth) -> bool:
        """An operator may say so, also while the run goes on."""
        return not row.test_asked and (row.state is RepairState.DRAINED or row.hold is not Hold.NONE)

    # --- the end ---

    def settle(self) -> None:
        """Other faults are over: what is broken is acted on, or held."""
        self._heal()
        self._start_managers()
        for condition in self.conditions.values():
            condition.hung = condition.forged = False
        for host in self.hosts:
            if not host.powered:
                host.power_on()
        self.run_for(LONGEST_DELAY_NS + SETTLED_NS)
        self._heal()
        self._start_managers()
        self.run_for(SETTLED_NS)

    def check_acted(self) -> None:
        for name, condition in self.conditions.items():
            if condition.broken and self.grounds.hosts[name].agent.alive:
                row = self.oracle.health.get(name)
                assert row is not None, f"{name} is broken, and nobody knows"
                assert not _serves(row), f"{name} is broken, and gets tasks"
            elif not condition.broken and (row := self.oracle.health.get(name)) is not None:
                held = row.hold is Hold.BREAKER and row.fault is not None and not row.fault.once
                assert not held, f"{name} is held, and its checks pass"

    def heal(self) -> None:
        self.all_repaired = True
        self.shared_until_ns = 0
        for condition in self.conditions.values():
            self._mend(condition)
            condition.hung = condition.forged = False
        super().heal()
        for name, row in self.oracle.health.items():
            assert _serves(row), f"{name} is repaired, and {row.state.value}: {row.reason} ({row.hold.value})"


def dropped(seed: int) -> HealthCluster:
    """Nodes break while the store takes hardly a transaction: what their checks have said once is not lost."""
    cluster = HealthCluster(seed, nodes=4)
    cluster.begin()
    cluster.store.faults = StoreFaults(failed=0.6, unknown=0.0)
    for _ in range(2):
        cluster.submit(cluster.clients[1])
    for host, event in zip(cluster.hosts, (XID, UNCORRECTED, XID), strict=False):
        cluster.conditions[host.name].broken[event.check] = event
    cluster.run_for(20 * SECOND)
    cluster.store.faults = None
    cluster.settle()
    cluster.check_acted()
    cluster.heal()
    return cluster


def health_chaos(seed: int) -> HealthCluster:
    cluster = HealthCluster(seed, nodes=5 if seed % 3 else 7)
    cluster.begin()
    cluster.roughen()
    end_ns = cluster.world.now_ns + CHAOS_NS
    while cluster.world.now_ns < end_ns:
        cluster.disturb()
        cluster.run_for(cluster.rng.randrange(3 * SECOND))
    if seed % 2:
        cluster.settle()
        cluster.check_acted()
    cluster.heal()
    return cluster
