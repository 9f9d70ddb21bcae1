"""Machines of a simulated cluster: what really runs on them (ranks of runs, launchers), and a model of the agent.

The agent keeps docs/design/0046: a token is started once; `stop` is remembered also for a token that it does not know;
`gone` is final; the lease of a launcher ends `stop_after` after the last answered Sync was sent, whatever becomes of
the agent. Ranks on other nodes have their lease from the launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.support.platform.managers import SETTINGS
from tests.support.platform.post import Ask, Post, Tell

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.platform.messages import NotLeader
from fireflyer.cluster.schema.sync import EndedRun, Inventory, LaunchOrder, Orders, RunStatus, Saving, Sync
from fireflyer.cluster.schema.tasks import Cause, RunParts
from fireflyer.sim import SimClock, SimNode, World

__all__ = ["Grounds", "Host", "Launcher"]

STOP_AFTER_NS = SETTINGS.stop_after_ns
STEP_NS = SECOND
KILL_NS = 2 * SECOND
"""What it takes at most from a stop to the last process."""
SYNC_TIMEOUT_NS = 4 * SECOND
UNREACHABLE_NS = 6 * SECOND
"""After which a launcher gives a node up."""
INVENTORY = Inventory(
    address="10.0.0.1", port=7000, version="1", boot_id="b", hostname="h", cores=64, memory_bytes=1 << 38
)


@dataclass
class Record:
    """What an agent has on its disk about a run."""

    lead: bool
    started: bool = False
    stopped: bool = False
    """No process of it is started any more, whoever asks."""
    result: EndedRun | None = None


@dataclass
class Ranks:
    """Processes of a run on one host."""

    renewed_ns: int
    """By the host's clock."""
    alive: bool = True


@dataclass
class Grounds:
    """What really happens, beside what anybody says; `check` looks at each start."""

    world: World
    started: Callable[[Host, Launcher], None]
    """Ranks of a run begin on a host."""
    launched: Callable[[Host, Launcher], None]
    work_ns: Callable[[int], int]
    """How long a task runs in all."""
    cause: Callable[[int], Cause]
    """How its program ends."""
    hosts: dict[str, Host] = field(default_factory=dict)
    launchers: list[Launcher] = field(default_factory=list)
    cut: Callable[[str, str], bool] = lambda _a, _b: False


class Launcher:
    """Of one run; it reaches ranks on other hosts without the managers."""

    def __init__(self, grounds: Grounds, host: Host, order: LaunchOrder, token: str) -> None:
        self.grounds, self.host, self.order, self.token = grounds, host, order, token
        self.world = grounds.world
        self.alive = True
        self.running = False
        self.suspending_ns: int | None = None
        self.lease_until_ns = host.lease_until_ns
        self.begun_ns = self.world.now_ns
        self.run_ns: int | None = None
        self.done_ns = order.whole_life
        self.saved_ns = order.whole_life
        self.seen_ns: dict[str, int] = {}
        self.ignores_suspension = self.world.random.random() < 0.1
        grounds.launchers.append(self)
        grounds.launched(host, self)
        host.begin_ranks(self)
        self._later()

    @property
    def nodes(self) -> list[str]:
        return [node.name for node in self.order.nodes]

    @property
    def saving(self) -> Saving:
        start_ns = (self.run_ns or self.begun_ns) - self.begun_ns
        age_ns = self.done_ns - self.saved_ns
        return Saving(asks=not self.ignores_suspension, age_ns=age_ns, save_ns=SECOND, start_ns=start_ns)

    def _later(self) -> None:
        self.world.call_after(self.world.random.randrange(STEP_NS // 2, STEP_NS), self._step)

    def _step(self) -> None:
        if not self.alive:
            return
        if self.host.agent.alive and self.host.lease_until_ns is not None:
            self.lease_until_ns = self.host.lease_until_ns
        if self.lease_until_ns is None or self.host.now_ns >= self.lease_until_ns:
            self.die()
            return
        self._reach_all()
        if self.alive:
            self._work()
        self._later()

    def _reach_all(self) -> None:
        for name in self.nodes[1:]:
            other = self.grounds.hosts[name]
            reached = other.powered and not self.grounds.cut(self.host.name, name)
            reached = reached and not self.grounds.cut(name, self.host.name)
            ranks = other.ranks.get(self.token)
            if reached and ranks is None:
                reached = not self.running and other.takes_ticket(self)
            elif reached and ranks is not None:
                if not ranks.alive:
                    self.end(Cause.INFRASTRUCTURE, bad=(name,), reason=f"ranks on {name} were killed")
                    return
                ranks.renewed_ns = other.now_ns
            if reached:
                self.seen_ns[name] = self.world.now_ns
            elif self.world.now_ns - self.seen_ns.setdefault(name, self.world.now_ns) > UNREACHABLE_NS:
                self.end(Cause.INFRASTRUCTURE, bad=(name,), reason=f"{name} cannot be reached")
                return

    def _work(self) -> None:
        if not self.running:
            if all(self.token in self.grounds.hosts[name].ranks for name in self.nodes):
                self.running, self.run_ns = True, self.world.now_ns
            elif self.suspending_ns is not None:
                self.end(Cause.SUSPENDED)
            return
        self.done_ns += STEP_NS
        if self.done_ns - self.saved_ns > 5 * STEP_NS:
            self.saved_ns = self.done_ns
        if self.done_ns >= self.grounds.work_ns(self.order.task):
            self.end(self.grounds.cause(self.order.task))
        elif self.suspending_ns is not None:
            if not self.ignores_suspension and self.world.now_ns - self.suspending_ns > SECOND:
                self.saved_ns = self.done_ns
                self.end(Cause.SUSPENDED)
            elif self.world.now_ns - self.suspending_ns > self.order.spec.grace_ns:
                self.end(Cause.INTERRUPTED)

    def end(self, cause: Cause, *, bad: tuple[str, ...] = (), reason: str = "") -> None:
        """Tells how it ended, and ends ranks that it can reach."""
        if not self.alive:
            return
        now_ns = self.world.now_ns
        productive = now_ns - self.run_ns if self.run_ns is not None else 0
        parts = RunParts(start_ns=(self.run_ns or now_ns) - self.begun_ns, productive_ns=productive)
        ended = EndedRun(
            cause=cause, exit_code=0, reason=reason or cause.value, parts=parts, whole_life=self.saved_ns, bad_nodes=bad
        )
        self.host.record(self.token).result = ended
        self.die()

    def die(self) -> None:
        self.alive = False
        for name in self.nodes:
            host = self.grounds.hosts[name]
            if name == self.host.name:
                host.kill_ranks(self.token)
            elif not self.grounds.cut(self.host.name, name):
                self.world.call_after(self.world.random.randrange(SECOND), partial(host.kill_ranks, self.token))


class Host:
    def __init__(
        self, world: World, post: Post, grounds: Grounds, name: str, managers: list[str], drift_ppm: int
    ) -> None:
        self.world, self.post, self.grounds, self.name, self.managers = world, post, grounds, name, managers
        self.powered = True
        self.ranks: dict[str, Ranks] = {}
        self.disk: dict[str, Record] = {}
        self.lease_until_ns: int | None = None
        """Of the agent, passed on to launchers; None: no Sync of this incarnation was answered."""
        self.allowed: dict[str, None] = {}
        self.orders: Orders | None = None
        self._sent: tuple[int, int] | None = None
        self._sequence = self._incarnation = 0
        self._current = managers[0]
        grounds.hosts[name] = self
        self._clock = SimClock(world, offset_ns=world.random.randrange(10**15), drift_ppm=drift_ppm)
        self.agent = world.node(name, self._boot, clock=self._clock)
        self._watch_leases()

    @property
    def now_ns(self) -> int:
        return self._clock.now_ns()

    # --- what really runs ---

    def launcher(self, token: str) -> Launcher | None:
        """That lives."""
        return next(
            (one for one in self.grounds.launchers if one.token == token and one.host is self and one.alive), None
        )

    def begin_ranks(self, launcher: Launcher) -> None:
        self.ranks[launcher.token] = Ranks(self.now_ns)
        self.grounds.started(self, launcher)

    def kill_ranks(self, token: str) -> None:
        ranks = self.ranks.get(token)
        if ranks is not None:
            ranks.alive = False

    def lives(self, token: str) -> bool:
        ranks = self.ranks.get(token)
        return (ranks is not None and ranks.alive) or self.launcher(token) is not None

    def _watch_leases(self) -> None:
        """Guards without a launcher end by their leases."""
        for token, ranks in self.ranks.items():
            if self.launcher(token) is None and ranks.alive and self.now_ns - ranks.renewed_ns >= STOP_AFTER_NS:
                ranks.alive = False
        self.world.call_after(SECOND, self._watch_leases)

    def power_cut(self) -> None:
        self.powered = False
        self.agent.crash()
        for token in self.ranks:
            launcher = self.launcher(token)
            if launcher is not None:
                launcher.alive = False
            self.kill_ranks(token)

    def power_on(self) -> None:
        self.powered = True
        self.agent.restart()

    # --- the agent ---

    def record(self, token: str) -> Record:
        return self.disk[token]

    def _boot(self, node: SimNode) -> None:
        self.allowed, self.orders, self._sent = {}, None, None
        self._sequence, self.lease_until_ns, self._incarnation = 0, None, node.incarnation
        for record in self.disk.values():
            if not record.started:
                record.stopped = True  # the crash came before the start: it is not started any more
        begun_ns = self.now_ns

        def tick() -> None:
            until_ns = self.lease_until_ns if self.lease_until_ns is not None else begun_ns + STOP_AFTER_NS
            if self.now_ns >= until_ns:
                for token in list(self.disk):
                    self._stop(token)
            if self._sent is not None and self.now_ns - self._sent[1] > SYNC_TIMEOUT_NS:
                self._next_manager()
                self._sent = None
            if self._sent is None:
                self.sync()
            node.after(500 * MS, tick)

        node.on_message(self._receive)
        node.after(self.world.random.randrange(SECOND), tick)

    def _next_manager(self) -> None:
        place = self.managers.index(self._current) + 1
        self._current = self.managers[place % len(self.managers)]

    def statuses(self) -> tuple[RunStatus, ...]:
        return tuple(self._status(token, record) for token, record in self.disk.items())

    def _status(self, token: str, record: Record) -> RunStatus:
        launcher = self.launcher(token)
        ended = record.stopped or (record.lead and record.started and launcher is None)
        if ended and not self.lives(token):
            record.stopped = True
            return RunStatus(token=token, state="gone", lead=record.lead, ended=record.result)
        running = launcher.running if launcher is not None else self.lives(token)
        saving = launcher.saving if launcher is not None and running else None
        return RunStatus(token=token, state="running" if running else "starting", lead=record.lead, saving=saving)

    def sync(self) -> None:
        """In the place of one that is held."""
        self._sequence += 1
        self._sent = (self._sequence, self.now_ns)
        orders = self.orders
        body = Sync(
            incarnation=self._incarnation,
            sequence=self._sequence,
            heard=orders.version if orders is not None else 0,
            term=orders.term if orders is not None else 0,
            inventory=INVENTORY,
            runs=self.statuses(),
        )
        self.post.send(self.name, self._current, Ask(self._sequence, body))

    def _receive(self, source: str, payload: bytes) -> None:
        tell = self.post.opened(payload)
        assert isinstance(tell, Tell)
        sent = self._sent
        if sent is None or tell.number != sent[0]:
            return
        self._sent = None
        if isinstance(tell.body, NotLeader):
            if tell.body.address in self.managers and tell.body.address != self._current:
                self._current = tell.body.address
            else:
                self._next_manager()
        elif isinstance(tell.body, Orders):
            self.lease_until_ns = sent[1] + STOP_AFTER_NS
            self._follow(tell.body)
            self.agent.after(self.world.random.randrange(100 * MS), self.sync)

    def _follow(self, orders: Orders) -> None:
        known = self.orders
        if known is not None and (orders.term, orders.version) < (known.term, known.version):
            return
        self.orders = orders
        wanted = {order.run_token: order for order in orders.runs}
        self.allowed = {token: None for token, order in wanted.items() if order.wanted in ("run", "suspend")}
        for token in list(self.disk):
            if token not in wanted:
                self._stop(token)
        for token, order in wanted.items():
            self._follow_one(token, order.wanted, order.launch)

    def _follow_one(self, token: str, wanted: str, launch: LaunchOrder | None) -> None:
        record = self.disk.get(token)
        if wanted == "forget":
            if record is not None and not self.lives(token):
                del self.disk[token]
        elif wanted == "stop":
            if record is None:
                self.disk[token] = Record(lead=False, stopped=True)
            else:
                self._stop(token)
        elif record is None and launch is not None and wanted == "run":
            self.disk[token] = Record(lead=True)
            delay_ns = self.world.random.randrange(SECOND)
            self.agent.after(delay_ns, lambda: self._launch(token, launch))
        elif wanted == "suspend" and (launcher := self.launcher(token)) is not None and launcher.suspending_ns is None:
            launcher.suspending_ns = self.world.now_ns

    def _launch(self, token: str, order: LaunchOrder) -> None:
        record = self.disk.get(token)
        if record is not None and not record.started and not record.stopped:
            record.started = True
            Launcher(self.grounds, self, order, token)

    def _stop(self, token: str) -> None:
        """Marked at once, done some time later, whatever becomes of the agent."""
        record = self.disk[token]
        if record.stopped:
            return
        record.stopped = True

        def kill() -> None:
            launcher = self.launcher(token)
            if launcher is not None:
                launcher.end(Cause.STOPPED)
            self.kill_ranks(token)

        self.world.call_after(self.world.random.randrange(KILL_NS), kill)

    def takes_ticket(self, launcher: Launcher) -> bool:
        """Starts ranks for a launcher of a run that its orders name."""
        token = launcher.token
        record = self.disk.get(token)
        if not self.agent.alive or token not in self.allowed or (record is not None and record.stopped):
            return False
        self.disk[token] = Record(lead=False, started=True)
        self.begin_ranks(launcher)
        return True
