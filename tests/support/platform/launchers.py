"""The launcher of a run in a simulated cluster: the product's own `Gang`, `GuardCalls`, `job_of` and `ending_of`, and
around them what `cluster.runner` and `cluster.launcher` do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
from tests.support.platform.calls import AgentLike, Answer, Calls, Reply
from tests.support.platform.hosts import Host, Process
from tests.support.platform.supervisors import Command, Supervisor, Training, Wire

from fireflyer.base.errors import FireflyerError, TransientError
from fireflyer.base.events import AttemptStarted, Logged, StepReport
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core import guard_calls
from fireflyer.cluster.core.agent import Order
from fireflyer.cluster.core.gang import Gang
from fireflyer.cluster.core.messages import (
    AskPoints,
    AttemptPrepared,
    Begin,
    CheckNode,
    Effect,
    Event,
    Finish,
    Inject,
    KillNode,
    Log,
    NameHorizon,
    PrepareAttempt,
    RankReported,
    ShutDownSupervisor,
    StartRanks,
    StartSupervisor,
    StopRanks,
    StopRequested,
    SupervisorGone,
    SupervisorLost,
    SupervisorUp,
    SuspendAsked,
    Tick,
)
from fireflyer.cluster.runner.ending import ending_of
from fireflyer.cluster.runner.job import job_of
from fireflyer.cluster.schema.agent import GuardStatus
from fireflyer.cluster.schema.job import JobResult, Timeouts
from fireflyer.cluster.schema.runner import OpenedTicket, RunnerOrders
from fireflyer.cluster.schema.sync import EndedRun, LaunchOrder, Saving
from fireflyer.cluster.schema.tasks import Cause
from fireflyer.runtime.driver import InlineDriver

__all__ = ["Launcher"]

TIMEOUTS: Final = Timeouts(
    heartbeat_ns=SECOND,
    node_lost_ns=4 * SECOND,
    supervisor_start_ns=12 * SECOND,
    last_call_ns=6 * SECOND,
    stop_grace_ns=2 * SECOND,
    suspend_settle_ns=2 * SECOND,
    kill_ns=4 * SECOND,
    lease_ns=6 * SECOND,
    backoff_max_ns=2 * SECOND,
)
TICK_NS: Final = 400 * MS
TOLD_NS: Final = 12 * SECOND
"""As `launcher.agents`: an agent may hear of a run later than its launcher was started."""
PAUSE_NS: Final = 200 * MS
SIGTERM: Final = 15
CODES: Final = {Cause.SUCCEEDED: 0, Cause.PROGRAM: 7, Cause.INFRASTRUCTURE: 137}


@dataclass
class _Member:
    """As `launcher.control` knows an incarnation of a node."""

    incarnation: int
    host: Host
    supervisor: Supervisor | None = None
    """That has connected."""
    revoked: bool = False
    local: Supervisor | None = None


class Launcher:
    def __init__(self, calls: Calls, order: LaunchOrder, token: str, process: Process) -> None:
        self._calls, self.order, self.token, self._process = calls, order, token, process
        self.host, self._grounds, self.world = process.host, calls.grounds, calls.grounds.world
        self.alive = True
        self.nodes = [node.name for node in order.nodes]
        several = len(order.nodes) > 1
        tickets = tuple(OpenedTicket(node.name, b"") for node in order.nodes) if several else ()
        orders = RunnerOrders(run_token=token, order=order, directory="/run", tickets=tickets)
        self._spec = msgspec.structs.replace(job_of(orders, {}), timeouts=TIMEOUTS)
        self._gang = Gang(self._spec)
        self._driver: InlineDriver[Event, Effect] = InlineDriver(
            self._gang, self._perform, now_ns=lambda: self.host.now_ns
        )
        self.lease_ns = TIMEOUTS.lease_ns
        self._members: dict[int, _Member] = {}
        self._guards: dict[tuple[int, int], InlineDriver[guard_calls.Event, guard_calls.Effect]] = {}
        self._log: list[Logged] = []
        self._begun_ns = self._started_ns = self.host.now_ns
        self._job_begun = self._ended = False
        self._deaf = self._grounds.happens(self._grounds.faults.hangs)
        self._ignores = self.world.random.random() < 0.1
        self._done_ns = self._saved_ns = order.whole_life
        self._stepped_ns: int | None = None
        self._training: Training | None = None

    # -- what checks look at -------------------------------------------------------------------------------------------

    @property
    def task(self) -> int:
        return self.order.task

    @property
    def run(self) -> int:
        return self.order.run

    @property
    def size(self) -> int:
        return self._gang.layout.nodes

    @property
    def saving(self) -> Saving:
        start_ns = (self._stepped_ns or self._begun_ns) - self._begun_ns
        return Saving(
            asks=not self._ignores, age_ns=self._done_ns - self._saved_ns, save_ns=SECOND, start_ns=max(0, start_ns)
        )

    # -- its guard -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._grounds.launchers.append(self)
        self._grounds.launched(self.host, self)
        if self._spec.hosts:
            left = set(self.nodes)
            for name in self.nodes:
                self._ask_first(name, left, self.host.now_ns + TOLD_NS)
        else:
            self._begin_job()

    def die(self) -> None:
        self.alive = False
        for member in self._members.values():
            if member.local is not None:
                member.local.die()

    def lease_over(self) -> bool:
        return False

    def hear(self, signal: str) -> None:
        deaf = self._deaf and self._grounds.faults.hangs > 0
        if deaf or self._ended or not self.alive:
            return
        if self._job_begun:
            self.feed(SuspendAsked() if signal == "suspend" else StopRequested(SIGTERM))
            return
        cause = Cause.SUSPENDED if signal == "suspend" else Cause.STOPPED
        self._end(EndedRun(cause=cause, exit_code=0, reason="it was asked to leave before its ranks were started"))

    # -- before the job ------------------------------------------------------------------------------------------------

    def _ask_first(self, name: str, left: set[str], until_ns: int) -> None:
        """All agents let it in before anything is started, or the run ends."""

        def answered(answer: Answer) -> None:
            if self._ended or name not in left:
                return
            if answer is None:
                left.discard(name)
                if not left:
                    self._begin_job()
            elif isinstance(answer, TransientError) and self.host.now_ns < until_ns:
                self.world.call_after(PAUSE_NS, partial(self._ask_first, name, left, until_ns))
            else:
                reason = f"{name} cannot be used: {answer}"
                self._end(EndedRun(cause=Cause.INFRASTRUCTURE, exit_code=1, reason=reason, bad_nodes=(name,)))

        if self.alive:
            self._call(self._host(name), lambda agent, reply: agent.ask(self.token, reply), answered)

    def _call(self, target: Host, ask: Callable[[AgentLike, Reply], None], answered: Reply) -> None:
        self._calls.call(self.host, target, ask, lambda answer: answered(answer) if self.alive else None)

    def _host(self, name: str) -> Host:
        return self._grounds.hosts[name]

    def _begin_job(self) -> None:
        self._job_begun = True
        self._started_ns = self.host.now_ns
        self.feed(Begin(0.0))
        self._tick()

    def _tick(self) -> None:
        if self.alive:
            self.feed(Tick())
            self.world.call_after(TICK_NS, self._tick)

    # -- the gang ------------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        if self.alive:
            self._driver.feed(event)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Log(event):
                self._log.append(Logged(self.host.now_ns - self._started_ns, event))
                self._process.disk.progress |= isinstance(event, AttemptStarted)
            case StartSupervisor(node, incarnation, host):
                self._start_supervisor(node, incarnation, host)
            case KillNode(node, incarnation):
                self._kill(node, incarnation)
            case PrepareAttempt(attempt):
                self._tell(0, self._gang.nodes[0].incarnation, lambda one: one.say(AttemptPrepared(attempt)))
            case Finish():
                self._finish(effect)
            case Inject() | CheckNode():
                raise AssertionError("nothing is injected or checked here")
            case _:
                self._tell(effect.node, effect.incarnation, self._command(effect))

    def _command(self, effect: StartRanks | StopRanks | AskPoints | NameHorizon | ShutDownSupervisor) -> Command:
        match effect:
            case StartRanks(attempt=attempt):
                training = self._training_of(attempt)
                return lambda one: one.start_ranks(attempt, training)
            case StopRanks(stop=stop):
                return lambda one: one.stop_ranks(stop)
            case AskPoints(attempt=attempt):
                return lambda one: one.hold(attempt)
            case NameHorizon(attempt=attempt, horizon=horizon):
                return lambda one: one.set_horizon(attempt, horizon)
            case ShutDownSupervisor():
                return self._shut_down

    def _training_of(self, attempt: int) -> Training:
        if self._training is None or self._training.attempt != attempt:
            self._done_ns = self._saved_ns
            self._training = Training(
                self._grounds,
                attempt,
                self._gang.layout.nodes,
                done_ns=self._saved_ns,
                work_ns=self._grounds.work_ns(self.task),
                code=CODES[self._grounds.cause(self.task)],
                ignores=self._ignores,
                on_step=self._on_step,
            )
        return self._training

    def _on_step(self, training: Training) -> None:
        self._done_ns, self._saved_ns = training.done_ns, training.saved_ns
        self._stepped_ns = self._stepped_ns or self.host.now_ns
        self._grounds.done_ns[self.task] = max(self._done_ns, self._grounds.done_ns.get(self.task, 0))
        step = training.done_ns // SECOND
        self.feed(RankReported(StepReport(0, training.attempt, step, 1, 1, None, SECOND)))

    def _tell(self, node: int, incarnation: int, command: Command) -> None:
        member = self._members.get(node)
        if member is None or member.incarnation != incarnation or member.supervisor is None:
            self.feed(SupervisorLost(node, incarnation, "it already counts as lost"))
            return
        one = member.supervisor
        lost = partial(self.feed, SupervisorLost(node, incarnation, "the connection broke"))
        one.wire.send(lambda: one.command(command), lost)

    # -- control: as `launcher.control` --------------------------------------------------------------------------------

    def hello(self, supervisor: Supervisor) -> bool:
        member = self._members.get(supervisor.node)
        if member is None or member.incarnation != supervisor.incarnation or member.supervisor or member.revoked:
            return False
        member.supervisor = supervisor
        self.feed(SupervisorUp(supervisor.node, supervisor.incarnation))
        return True

    def is_revoked(self, node: int, incarnation: int) -> bool:
        member = self._members.get(node)
        return member is None or member.incarnation != incarnation or member.revoked

    def _was_up(self, node: int, incarnation: int) -> bool:
        """One that has not connected is not let in any more after this answer."""
        member = self._members.get(node)
        if member is None or member.incarnation != incarnation:
            return False
        member.revoked = member.revoked or member.supervisor is None
        return member.supervisor is not None

    # -- nodes: as `launcher.nodes` and `launcher.agents` --------------------------------------------------------------

    def _start_supervisor(self, node: int, incarnation: int, host: int) -> None:
        target = self._host(self._spec.hosts[host]) if self._spec.hosts else self.host
        self._members[node] = member = _Member(incarnation, target)
        wire = Wire(self._grounds, self.host, target)
        make = partial(Supervisor, self, target, node, incarnation, wire)
        if not self._spec.hosts:
            member.local = make(None)
            self.host.later(200 * MS, member.local.begin)
            return
        order = Order(
            token=f"{self.token}.{node}.{incarnation}",
            job=self._spec.name,
            node=node,
            incarnation=incarnation,
            run_token=self.token,
        )
        driver: InlineDriver[guard_calls.Event, guard_calls.Effect] = InlineDriver(
            guard_calls.GuardCalls(),
            lambda effect: self._perform_call(order, target, make, effect),
            now_ns=lambda: self.host.now_ns,
        )
        self._guards[node, incarnation] = driver
        driver.feed(guard_calls.Begin())

    def _perform_call(
        self, order: Order, target: Host, make: Callable[[Process], Supervisor], effect: guard_calls.Effect
    ) -> None:
        key = order.node, order.incarnation
        driver = self._guards[key]
        match effect:
            case guard_calls.Ask(call):
                ask = partial(_ask, call, order, make)
                self._call(target, ask, lambda answer: driver.feed(_answer(call, answer)))
            case guard_calls.Pause(call):
                later = partial(driver.feed, guard_calls.PauseOver(call))
                self.world.call_after(PAUSE_NS, lambda: later() if self.alive else None)
            case guard_calls.Ended(status):
                kind = SupervisorGone if status.clean else SupervisorLost
                self.feed(kind(*key, status.reason))
            case guard_calls.GaveUp(reason):
                kind = SupervisorLost if self._was_up(*key) else SupervisorGone
                self.feed(kind(*key, f"its agent cannot be used: {reason}"))

    def _kill(self, node: int, incarnation: int) -> None:
        member = self._members.get(node)
        if member is not None and member.incarnation == incarnation:
            member.revoked = True
            if member.local is not None:
                self.host.later(500 * MS, partial(self._local_gone, member.local))
        if (node, incarnation) in self._guards:
            self._guards[node, incarnation].feed(guard_calls.KillWanted())

    def _shut_down(self, one: Supervisor) -> None:
        one.shut_down()
        if not self._spec.hosts:
            self.host.later(100 * MS, partial(self._local_gone, one))

    def _local_gone(self, one: Supervisor) -> None:
        one.die()
        self.feed(SupervisorGone(one.node, one.incarnation, "it ended"))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, finish: Finish) -> None:
        result = JobResult(
            exit_code=finish.exit_code,
            reason=finish.reason,
            attempts=self._gang.attempts,
            culprit=finish.culprit,
            run_dir="/run",
            events_path="/run/events.jsonl",
            logs_dir="/run/logs",
            signal=finish.signal,
            suspended=finish.suspended,
            whole_life_state=self._saved_ns,
        )
        self._end(ending_of(result, self._log, self.nodes))

    def _end(self, ended: EndedRun) -> None:
        """Writes how it ended, and ends a little later, when it has told agents what is still to be stopped."""
        self._ended = True
        self._process.disk.result = ended
        for driver in self._guards.values():
            driver.feed(guard_calls.KillWanted())
        self.host.later(SECOND, self._process.stop)


def _ask(
    call: guard_calls.Call, order: Order, make: Callable[[Process], Supervisor], agent: AgentLike, reply: Reply
) -> None:
    match call:
        case "start":
            agent.start(order, make, reply)
        case "wait":
            agent.wait(order.token, reply)
        case "stop":
            agent.stop(order.token, reply)
        case "forget":
            agent.forget(order.token, reply)


def _answer(call: guard_calls.Call, answer: Answer) -> guard_calls.Event:
    if isinstance(answer, TransientError):
        return guard_calls.NotAnswered(call, str(answer))
    if isinstance(answer, FireflyerError):
        return guard_calls.Refused(call, str(answer))
    return guard_calls.Answered(call, answer if isinstance(answer, GuardStatus) else None)
