"""The agent of a simulated machine: the product's own `RunsMachine`, `AgentMachine` and `ManagerChoice`, and around
them what `cluster.agent` does: records on disk, processes that are started, watched and signalled, calls to managers
and of launchers. It may die between any two effects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from tests.support.platform.calls import Calls, MakeChild, Reply
from tests.support.platform.hosts import Grounds, GuardDisk, Host, Process
from tests.support.platform.launchers import Launcher
from tests.support.platform.post import Ask, Post, Tell

from fireflyer.base.errors import Busy, FireflyerError, NotFound, PermissionDenied
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core import agent as guards
from fireflyer.cluster.core import runs
from fireflyer.cluster.core.health.rounds import HealthRounds, Round
from fireflyer.cluster.core.manager_choice import ManagerChoice
from fireflyer.cluster.core.platform.messages import NotLeader
from fireflyer.cluster.schema.agent import GuardStatus
from fireflyer.cluster.schema.sync import EndedRun, Inventory, LaunchOrder, Orders, RunStatus, Sync
from fireflyer.cluster.schema.tasks import Cause
from fireflyer.runtime.driver import InlineDriver
from fireflyer.sim import SimCrash, SimNode

__all__ = ["Agent", "Agents"]

TICK_NS = SECOND
SYNC_TIMEOUT_NS = 4 * SECOND
WAIT_NS = 4 * SECOND
INVENTORY = Inventory(
    address="10.0.0.1", port=7000, version="1", boot_id="b", hostname="h", cores=64, memory_bytes=1 << 38
)


@dataclass
class _Waiting:
    token: str
    reply: Reply


class Agents:
    """Of all hosts that live, by name."""

    def __init__(
        self,
        grounds: Grounds,
        post: Post,
        managers: list[str],
        said: Callable[[Host, tuple[RunStatus, ...]], None],
    ) -> None:
        """`said`: is told what each agent says of its runs."""
        self.post, self.managers, self.said = post, managers, said
        self.checked: Callable[[Host, Round], tuple[tuple[bytes, ...], str]] = lambda _host, _due: ((), "")
        """What the checks of a node print, and why they came to no result."""
        self.calls = Calls(grounds, self.of)
        self._agents: dict[str, Agent] = {}

    def boot(self, host: Host, node: SimNode) -> None:
        self._agents[host.name] = agent = Agent(self, host, node)
        agent.begin()

    def left(self, host: Host, code: int) -> None:
        """Its orders are to go: only an agent of a job of a batch system gets them."""
        raise AssertionError(f"{host.name} is to go with {code}")

    def of(self, host: Host) -> Agent | None:
        """None: it does not run."""
        return self._agents[host.name] if host.powered and host.agent.alive else None


class Agent:
    """One life of it."""

    def __init__(self, agents: Agents, host: Host, node: SimNode) -> None:
        self._agents, self._host, self._node, self._life = agents, host, node, node.incarnation
        self._grounds: Grounds = host.grounds
        self.runs = runs.RunsMachine()
        self.guards = guards.AgentMachine(serves_own=True)
        self._run_driver: InlineDriver[runs.Event, runs.Effect] = InlineDriver(
            self.runs, self._perform_run, now_ns=lambda: host.now_ns
        )
        self._guard_driver: InlineDriver[guards.Event, guards.Effect] = InlineDriver(
            self.guards, self._perform_guard, now_ns=lambda: host.now_ns
        )
        self._choice = ManagerChoice()
        self._round: list[str] = []
        self._sequence = 0
        self._sent: tuple[int, int, str] | None = None
        """Number, when, and to whom."""
        self._watched: dict[str, Process] = {}
        """Of which this agent has a pidfd; launchers by the token of the run."""
        self._makers: dict[str, MakeChild] = {}
        self._refused: guards.Refused | None = None
        self._waiting: list[_Waiting] = []
        self.rounds = HealthRounds(host.incarnation + 1)
        self._checks = False
        """A program of checks runs."""

    def begin(self) -> None:
        host = self._host
        host.incarnation += 1
        self._node.on_message(self._receive)
        found = [guards.Found(disk.order, disk.end) for disk in host.guard_disks.values() if disk.order is not None]
        self._guard_driver.feed(guards.Begin(tuple(found)))
        records = tuple(runs.FoundRun(record, max(0, host.now_ns - at_ns)) for record, at_ns in host.runs.values())
        term, stop_after_ns = host.leader
        self.feed(runs.Begin(records, term, host.lease_ends_ns(), stop_after_ns))
        for token in sorted({guard.order.run_token for guard in self.guards.living()} - {""}):
            self._guards_changed(token)
        self._node.after(self._grounds.upto(SECOND), self._tick)

    def feed(self, event: runs.Event) -> None:
        self._run_driver.feed(event)

    def _later(self, limit_ns: int, act: Callable[[], None]) -> None:
        """Nothing, where this agent has ended."""
        if self._node.alive and self._node.incarnation == self._life:
            self._node.after(self._grounds.upto(limit_ns), act)

    def _may_die(self) -> None:
        """It is started again soon, as systemd does."""
        if self._grounds.happens(self._grounds.faults.agent_dies):
            self._host.later(5 * SECOND, self._host.start_agent)
            raise SimCrash

    def _tick(self) -> None:
        self._guard_driver.feed(guards.Tick())
        for status in self.runs.statuses():
            disk = self._host.launcher_disks.get(status.token)
            if status.lead and status.state == "starting" and disk is not None and disk.progress:
                self.feed(runs.RanksStarted(status.token))
        self.feed(runs.Tick())
        self._check()
        if self._sent is not None and self._host.now_ns - self._sent[1] > SYNC_TIMEOUT_NS:
            self._unheard()
        self._node.after(TICK_NS, self._tick)
        if self._sent is None and not self._round:
            self.sync()

    # -- managers ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """In the place of one that is held."""
        if not self._round:
            self._round = self._choice.addresses((), self._agents.managers)
        self._sequence += 1
        self._sent = (self._sequence, self._host.now_ns, self._round[0])
        statuses = tuple(self._told(status) for status in self.runs.statuses())
        self._agents.said(self._host, statuses)
        body = Sync(
            incarnation=self._host.incarnation,
            sequence=self._sequence,
            heard=self.runs.version,
            term=self.runs.term,
            inventory=INVENTORY,
            runs=statuses,
            health=self.rounds.reports(),
        )
        self._agents.post.send(self._host.name, self._round[0], Ask(self._sequence, body))

    def _told(self, status: RunStatus) -> RunStatus:
        process = self._watched.get(status.token)
        if status.state == "running" and process is not None and isinstance(process.child, Launcher):
            return msgspec.structs.replace(status, saving=process.child.saving)
        return status

    def _unheard(self) -> None:
        """The next manager, or the first one after a pause."""
        self._sent = None
        self._round = self._round[1:]
        if self._round:
            self.sync()
        else:
            self._later(self._choice.pause_ns(heard=False), self._again)

    def _again(self) -> None:
        if self._sent is None:
            self.sync()

    def _receive(self, _source: str, payload: bytes) -> None:
        tell = self._agents.post.opened(payload)
        assert isinstance(tell, Tell)
        sent = self._sent
        if sent is None or tell.number != sent[0]:
            return
        self._sent = None
        if isinstance(tell.body, NotLeader):
            self._unheard()
        elif isinstance(tell.body, Orders):
            self._choice.answers(sent[2])
            self._round = []
            self.feed(runs.OrdersHeard(tell.body, sent[1]))
            self.rounds.hear(tell.body.health, self._host.now_ns)
            self._check()
            if tell.body.leave is not None:
                self._agents.left(self._host, tell.body.leave)
            self._later(100 * MS, self._again)

    # -- checks of the node: as `agent.health` -------------------------------------------------------------------------

    def _check(self) -> None:
        self.rounds.runs_are(frozenset(status.token for status in self.runs.statuses() if status.state != "gone"))
        due = None if self._checks else self.rounds.next(self._host.now_ns)
        if due is not None:
            self._checks = True
            self._later(SECOND, partial(self._checked, due))

    def _checked(self, due: Round) -> None:
        self._checks = False
        self.rounds.done(due, *self._agents.checked(self._host, due))
        self.sync()

    # -- runs: as `agent.runs` -----------------------------------------------------------------------------------------

    def _perform_run(self, effect: runs.Effect) -> None:
        self._may_die()
        host = self._host
        match effect:
            case runs.StartLauncher(record, order):
                self._start_launcher(record, order)
            case runs.WatchLauncher(token):
                self._later(20 * MS, partial(self._watch_launcher, token))
            case runs.SuspendLauncher() | runs.TerminateLauncher() | runs.KillLauncher():
                self._press(effect)
            case runs.StopGuards(token):
                for event in self.guards.to_stop(token):
                    self._guard_driver.feed(event)
            case runs.Remember(record):
                if not self._grounds.happens(self._grounds.faults.disk_full):
                    host.runs[record.token] = record, host.now_ns
                    self.feed(runs.Remembered(record))
            case runs.Remove(token):
                self._later(SECOND, partial(self._remove, token))
            case runs.RenewLease(ends_ns):
                host.lease = ends_ns, host.boot
            case runs.RememberLeader(term, _, stop_after_ns):
                assert term >= host.leader[0], f"{host.name} follows an older leader"
                host.leader = term, stop_after_ns
            case runs.Changed():
                self._later(50 * MS, self.sync)

    def _press(self, effect: runs.SuspendLauncher | runs.TerminateLauncher | runs.KillLauncher) -> None:
        match effect:
            case runs.SuspendLauncher(token):
                self._signal(token, "suspend")
            case runs.TerminateLauncher(token):
                self._signal(token, "terminate")
            case runs.KillLauncher(token):
                self._kill(token)
                self._sweep_launcher(token)

    def _start_launcher(self, record: runs.RunRecord, order: LaunchOrder) -> None:
        host, token = self._host, record.token
        if self._grounds.happens(self._grounds.faults.disk_full):
            ended = EndedRun(cause=Cause.INFRASTRUCTURE, exit_code=1, reason="no space left on device")
            self.feed(runs.LauncherGone(token, True, ended))
            return
        host.runs[token] = record, host.now_ns
        self.feed(runs.Remembered(record))

        def start() -> None:
            disk = host.launcher_disks.setdefault(token, GuardDisk())
            make = partial(Launcher, self._agents.calls, order, token)
            Process(host, f"{token}-launcher", disk, make)
            self._watch_launcher(token)

        self._later(200 * MS, start)

    def _watch_launcher(self, token: str) -> None:
        disk = self._host.launcher_disks.get(token, GuardDisk())
        up = partial(self.feed, runs.LauncherUp(token))
        self._watch(token, f"{token}-launcher", disk, up, partial(self._launcher_gone, token, disk))

    def _launcher_gone(self, token: str, disk: GuardDisk) -> None:
        if not disk.clean:
            self._sweep_launcher(token)
        ended = disk.result
        if ended is None and disk.expired:
            ended = EndedRun(cause=Cause.INTERRUPTED, exit_code=137, reason="the lease of its node ended")
        self.feed(runs.LauncherGone(token, True, ended, disk.process is not None))

    def _sweep_launcher(self, token: str) -> None:
        self._host.sweep(f"{token}-launcher")
        self._host.sweep(token)

    def _remove(self, token: str) -> None:
        self._host.launcher_disks.pop(token, None)
        self._host.runs.pop(token, None)
        self.feed(runs.Removed(token))

    def _guards_changed(self, run_token: str) -> None:
        self.feed(runs.GuardsLiving(run_token, self.guards.living_of(run_token)))

    # -- guards: as `agent.guards` -------------------------------------------------------------------------------------

    def _perform_guard(self, effect: guards.Effect) -> None:
        self._may_die()
        match effect:
            case guards.Spawn(order):
                self._later(200 * MS, partial(self._spawn, order, self._makers.pop(order.token)))
            case guards.Watch(token):
                self._later(20 * MS, partial(self._watch_guard, token))
            case guards.Terminate(token):
                if token in self._watched:
                    self._watched[token].stop()
            case guards.Kill(token):
                self._kill(token)
                self._host.sweep(token)
            case guards.Forget(token):
                self._host.guard_disks.pop(token, None)
            case guards.Refused():
                self._refused = effect

    def _spawn(self, order: guards.Order, make: MakeChild) -> None:
        assert not self._host.marked(order.token), f"{order.token} is started beside itself"
        self._host.guard_disks[order.token] = disk = GuardDisk(order)
        Process(self._host, order.token, disk, make)
        self._watch_guard(order.token)

    def _watch_guard(self, token: str) -> None:
        disk = self._host.guard_disks[token]
        up = partial(self._guard_told, guards.GuardUp(token))
        self._watch(token, token, disk, up, partial(self._guard_gone, token, disk))

    def _guard_gone(self, token: str, disk: GuardDisk) -> None:
        if not disk.clean:
            self._host.sweep(token)
        disk.end = guards.End(clean=True, reason="its lease ended" if disk.expired else "it ended")
        self._guard_told(guards.GuardGone(token, disk.end))

    def _guard_told(self, event: guards.GuardUp | guards.GuardGone) -> None:
        self._guard_driver.feed(event)
        guard = self.guards.guards.get(event.token)
        if guard is not None and guard.state is guards.GuardState.ENDED:
            for one in [one for one in self._waiting if one.token == event.token]:
                self._answer(one)
        if guard is not None and guard.order.run_token:
            self._guards_changed(guard.order.run_token)

    # -- processes: as `agent.processes` -------------------------------------------------------------------------------

    def _watch(self, token: str, mark: str, disk: GuardDisk, up: Callable[[], None], gone: Callable[[], None]) -> None:
        """Looks until the guard has named itself or nothing lives, then waits for its end."""
        process = disk.process
        if process is None and any(one.mark == mark for one in self._host.processes):
            self._node.after(50 * MS, partial(self._watch, token, mark, disk, up, gone))
        elif process is not None and process.alive:
            self._watched[token] = process
            process.watchers.append(partial(self._later, 20 * MS, partial(self._saw_end, token, gone)))
            up()
        else:
            gone()

    def _saw_end(self, token: str, gone: Callable[[], None]) -> None:
        self._watched.pop(token, None)
        gone()

    def _signal(self, token: str, signal: str) -> None:
        if token in self._watched:
            self._watched[token].hear(signal)

    def _kill(self, token: str) -> None:
        if token in self._watched:
            self._watched[token].finish(clean=False)

    # -- launchers, by tickets: as `agent.service` ---------------------------------------------------------------------

    def ask(self, run_token: str, reply: Reply) -> None:
        reply(self._refusal(run_token))

    def _refusal(self, run_token: str) -> FireflyerError | None:
        refusal = self.runs.refusal(self._host.now_ns, run_token)
        return None if refusal is None else (Busy if refusal.busy else PermissionDenied)(refusal.reason)

    def start(self, order: guards.Order, make: MakeChild, reply: Reply) -> None:
        if order.token in self.guards.guards:
            reply(self._status(order.token))
            return
        refusal = self._refusal(order.run_token)
        if refusal is not None:
            reply(refusal)
            return
        refused = self._start_guard(order, make)
        if refused is not None:
            reply((Busy if refused.busy else PermissionDenied)(refused.reason))
            return
        self._guards_changed(order.run_token)
        reply(self._status(order.token))

    def _start_guard(self, order: guards.Order, make: MakeChild) -> guards.Refused | None:
        self._refused = None
        self._makers[order.token] = make
        self._guard_driver.feed(guards.StartRequested(order))
        self._makers.pop(order.token, None)
        return self._refused

    def wait(self, token: str, reply: Reply) -> None:
        guard = self.guards.guards.get(token)
        if guard is None or guard.state is guards.GuardState.ENDED:
            reply(self._status(token))
            return
        one = _Waiting(token, reply)
        self._waiting.append(one)
        self._node.after(WAIT_NS, partial(self._answer, one))

    def _answer(self, one: _Waiting) -> None:
        if one in self._waiting:
            self._waiting.remove(one)
            one.reply(self._status(one.token))

    def stop(self, token: str, reply: Reply) -> None:
        self._guard_driver.feed(guards.StopRequested(token))
        reply(self._status(token))

    def forget(self, token: str, reply: Reply) -> None:
        self._guard_driver.feed(guards.Forgotten(token))
        reply(None)

    def _status(self, token: str) -> GuardStatus | FireflyerError:
        guard = self.guards.guards.get(token)
        if guard is None:
            return NotFound(f"no guard {token} is known on this machine")
        order, end = guard.order, guard.end
        return GuardStatus(
            token=order.token,
            job=order.job,
            node=order.node,
            incarnation=order.incarnation,
            state=guard.state.value,
            age_ns=0,
            clean=end is not None and end.clean,
            reason="" if end is None else end.reason,
        )
