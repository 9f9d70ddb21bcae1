"""The gang: all ranks of a job run together or not at all. A pure machine; the launcher performs its effects.

Phases of the job
-----------------

    STARTING ──all supervisors up──> PREPARING ──port and store ready──> RUNNING ──all ranks ended with 0──> ENDING
        │                           │                                  │                                  │
        └───────────────────────────┴──── a failure, or a stop ────────┘                                  v
                                          │                                                           FINISHED
                                          v                                                               ^
                                      STOPPING ──every node quiet, no restart ────────> ENDING ───────────┘
                                          │
                                          └──every node quiet, restart──> PAUSING ──backoff over──> STARTING

An *attempt* spans STARTING to STOPPING; its number is TORCHELASTIC_RESTART_COUNT. A failure in any of these phases
fails the attempt: there is one restart budget and no other loop.

The states of a node, and why no two attempts ever run beside each other on one: `node_table`.

Each node is on a *host*; `hosts` decides which. The members of an attempt are at most `JobSpec.nodes` hosts and at
least `least_nodes`, which are fewer only where the job is elastic. Their nodes have the numbers 0, 1, … without gaps: a
node whose host is not needed, or whose number is too high, is shut down (IDLE to LEAVING), and its host gets another
number where it is needed. Ranks are started when exactly these nodes are IDLE and all others DOWN. A host that does not
come up while the attempt starts is passed over, and the attempt fails only where too few are left then; once there are
enough, the others have `last_call_ns` from when they were asked.

A suspension (`suspension`) goes on inside RUNNING: ranks leave by themselves, or the gang is stopped when they are
overdue. Where no ranks run, the job ends at once; a restart that is due does not follow any more.

What decides when a node is lost: its supervisor has been silent for `node_lost_ns`. When the launcher itself slept (a
gap between ticks), the silence is its own and every node is given the gap back, to its deadline as well.

How a failure proceeds: the first one stops the gang at once. Ranks that are left may end by themselves for `settle_ns`:
their collectives fail of the same cause, and say so in a log and a dump that a signal would cut off. A stop that was
asked for, and a job that cannot go on at all, wait for nothing. Who is to blame, and whether
another attempt follows, is decided a little later (`judgement`).
"""

from __future__ import annotations

from fireflyer.base.events import (
    AttemptSized,
    AttemptStarted,
    FaultInjected,
    JobEvent,
    JobFinished,
    JobStarted,
    NodeLost,
    RankExited,
    Report,
    StepReport,
    Suspended,
    SuspendRequested,
)
from fireflyer.base.rank_layout import RankLayout
from fireflyer.base.suspension import SUSPENDED_EXIT_CODE
from fireflyer.base.units import MS, SECOND, format_duration
from fireflyer.cluster.core.blame import Failure, failure_of_end
from fireflyer.cluster.core.hosts import Hosts
from fireflyer.cluster.core.judgement import Judgement
from fireflyer.cluster.core.messages import (
    AttemptPrepared,
    Begin,
    Effect,
    Event,
    Finish,
    Inject,
    LeaseRenewed,
    Log,
    NodeAnswered,
    PointsCollected,
    PrepareAttempt,
    PrepareFailed,
    RankEnded,
    RankReported,
    RanksGone,
    RanksPrinted,
    StopRequested,
    StorageFailed,
    SupervisorEvent,
    SupervisorGone,
    SupervisorHeartbeat,
    SupervisorLost,
    SupervisorUp,
    SuspendAsked,
    Tick,
    WatchdogSet,
)
from fireflyer.cluster.core.node_table import NodeTable
from fireflyer.cluster.core.states import ENDED, IN_ATTEMPT, WATCHED, Node, NodeState, Phase
from fireflyer.cluster.core.suspension import Suspension
from fireflyer.cluster.schema.job import Fault, JobSpec
from fireflyer.cluster.schema.wire import RankEnd, Stop

__all__ = ["TICK_NS", "Gang", "NodeState", "Phase"]

TICK_NS = 100 * MS
SAME_SIGNAL_NS = 300 * MS
"""A second stop signal within this time is the first one, delivered twice."""
SIGTERM = 15


class Gang:
    """`handle` one event at a time, perform the effects in order. See the module docstring."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.phase = Phase.STARTING
        self.attempt = 0
        self.layout = RankLayout(spec.ranks_on(node) for node in range(spec.nodes))
        """Nodes and ranks of the present attempt; until it is prepared, of the last one."""
        self._hosts = Hosts(spec)
        self._table = NodeTable(spec, self._hosts)
        self._effects: list[Effect] = []
        self._now_ns = 0
        self._tick_ns = 0
        self._judgement = Judgement(spec, self._hosts)
        self._pause_ns = spec.timeouts.backoff_ns
        self._resume_ns = 0
        self._faults = list(spec.inject)
        self._step: int | None = None
        self._running_ns = 0
        self._active_ns = 0
        self._stop_ns = 0
        self._watchdog_ns = spec.watchdog_ns
        self._suspension = Suspension(grace_ns=spec.suspend_grace_ns, settle_ns=spec.timeouts.suspend_settle_ns)
        self._outcome: tuple[int, str] = (0, "")
        self._suspended = False

    @property
    def attempts(self) -> int:
        """How many attempts were started so far."""
        return self.attempt + 1

    @property
    def faults_left(self) -> tuple[Fault, ...]:
        """Faults that were asked for and not injected yet; only the first attempt is disturbed."""
        return tuple(self._faults)

    @property
    def nodes(self) -> list[Node]:
        return self._table.nodes

    @property
    def members(self) -> list[Node]:
        """Nodes of the present attempt; until it is prepared, of the last one."""
        return self.nodes[: self.layout.nodes]

    @property
    def world_size(self) -> int:
        """Ranks of the present attempt."""
        return self.layout.world_size

    def states(self) -> tuple[NodeState, ...]:
        return tuple(node.state for node in self.nodes)

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Effects of one event, to be performed in order. `now_ns` never goes back. Never raises."""
        if self.phase is Phase.FINISHED:
            return []
        self._now_ns = max(now_ns, self._now_ns)
        self._effects = []
        match event:
            case Begin():
                self._begin(event)
            case Tick():
                self._tick()
            case SupervisorUp() | SupervisorHeartbeat() | LeaseRenewed() | SupervisorLost() | SupervisorGone():
                self._on_supervisor(event)
            case AttemptPrepared() | PrepareFailed():
                self._on_prepared(event)
            case RankEnded() | RanksGone():
                self._on_ranks(event)
            case RankReported() | RanksPrinted() | WatchdogSet():
                self._on_activity(event)
            case NodeAnswered():
                self._judgement.take_answer(event)
            case StopRequested(signal):
                self._on_stop(signal)
            case SuspendAsked() | PointsCollected():
                self._on_suspension(event)
            case StorageFailed(reason):
                self._give_up(reason)
        self._advance()
        return self._effects

    # -- starting --------------------------------------------------------------------------------------------------

    def _begin(self, event: Begin) -> None:
        spec = self.spec
        self._tick_ns = self._now_ns
        self._log(
            JobStarted(
                job=spec.name,
                command=(spec.script, *spec.args),
                nodes=spec.nodes,
                ranks_per_node=spec.ranks_per_node,
                max_restarts=spec.max_restarts,
                wall_time_s=event.wall_time_s,
                min_nodes=spec.min_nodes,
                node_ranks=spec.node_ranks if spec.host_ranks else (),
            )
        )
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.phase = Phase.STARTING
        self._log(AttemptStarted(attempt=self.attempt))

    def _gather(self) -> None:
        """Brings nodes up on the members of the attempt: the nodes 0, 1, … in turn, and no others."""
        self._effects += self._table.gather(self._now_ns)

    def _assemble(self) -> None:
        """Prepares the attempt when all its members are up and nobody else is."""
        self._gather()
        size = len(self._hosts.members())
        if self.phase is not Phase.STARTING or size < self.spec.least_nodes:
            return
        if not self._table.assembled(size):
            for node in self._table.past_last_call(self._now_ns):
                limit = format_duration(self.spec.timeouts.last_call_ns)
                self._lose(node, f"it was not there within {limit} (--last-call)")
            return
        self.layout = RankLayout(self.spec.ranks_on(node.host) for node in self.nodes[:size])
        self.phase = Phase.PREPARING
        if self.spec.hosts:
            hosts = tuple(self.spec.hosts[node.host] for node in self.members)
            counts = self.layout.counts if self.spec.host_ranks else ()
            self._log(AttemptSized(self.attempt, size, hosts, left_out=self._hosts.left_out(), node_ranks=counts))
        self._effects.append(PrepareAttempt(self.attempt))

    def _on_prepared(self, event: AttemptPrepared | PrepareFailed) -> None:
        if self.phase is not Phase.PREPARING or event.attempt != self.attempt:
            return
        if isinstance(event, PrepareFailed):
            self._give_up(event.reason)
            return
        self.phase = Phase.RUNNING
        self._running_ns = self._active_ns = self._now_ns
        self._effects += self._table.start_ranks(self.layout.nodes, self.attempt)

    # -- what supervisors say ------------------------------------------------------------------------------------------

    def _on_supervisor(self, event: SupervisorEvent) -> None:
        node = self._table.find(event.node, event.incarnation)
        if node is None:
            return
        node.seen_ns = self._now_ns
        match event:
            case SupervisorUp() if node.state is NodeState.COMING:
                node.state = NodeState.IDLE
                node.renewed_ns = self._now_ns
                self._hosts.is_up(node.host)
            case LeaseRenewed() if node.state in (*WATCHED, NodeState.LEAVING):
                node.renewed_ns = self._now_ns
            case SupervisorLost(reason=reason) if node.state not in ENDED:
                self._lose(node, reason)
            case SupervisorGone(reason=reason):
                expected = node.state in ENDED
                node.state = NodeState.DOWN
                if not expected:
                    self._lost(node, reason)

    def _lose(self, node: Node, reason: str) -> None:
        """The node is no use any more, but something may still run there."""
        self._effects.append(self._table.kill(node, self._now_ns))
        self._lost(node, reason)

    def _lost(self, node: Node, reason: str) -> None:
        host = self.spec.hosts[node.host] if self.spec.hosts else ""
        self._log(NodeLost(node=node.number, attempt=self.attempt, reason=reason, host=host))
        failure = f"node {node.number}{f' ({host})' if host else ''} was lost: {reason}"
        if self.phase is Phase.STARTING and self.spec.hosts and node.renewed_ns is None:
            self._hosts.absent(node.host, self._now_ns)
            count = len(self._hosts.members())
            if count >= self.spec.least_nodes:
                return  # the others are enough
            if self.spec.elastic:
                failure += f"; {count} of at least {self.spec.least_nodes} nodes can start"
        self._fail(Failure(node.number, None, 1, failure, "infrastructure"))

    # -- what ranks do ---------------------------------------------------------------------------------------------

    def _on_ranks(self, event: RankEnded | RanksGone) -> None:
        node = self._table.find(event.node, event.incarnation)
        attempt = event.end.attempt if isinstance(event, RankEnded) else event.attempt
        if node is None or attempt != self.attempt or node.state not in (NodeState.BUSY, NodeState.STOPPING):
            return
        node.seen_ns = self._now_ns
        if isinstance(event, RankEnded):
            self._end_rank(node, event.end)
            return
        for end in event.ends:
            self._end_rank(node, end)
        if event.port_taken:
            self._judgement.port_was_taken()
        node.state = NodeState.IDLE
        missing = self.layout.counts[node.number] - len(node.ends)
        if missing:
            self._lose(node, f"its supervisor reported no exit code for {missing} of its ranks")

    def _end_rank(self, node: Node, end: RankEnd) -> None:
        if end.rank in node.ends or end.rank not in self.layout.ranks(node.number):
            return
        node.ends[end.rank] = end
        failure = failure_of_end(end, node.number, nodes=self.layout.nodes)
        failed = end.exit_code != 0 and not end.told and not end.suspended
        reason = failure.reason if failed else ""
        self._log(RankExited(rank=end.rank, attempt=self.attempt, exit_code=end.exit_code, reason=reason))
        if end.suspended and not self._suspension.asked:
            self._suspend(end.rank)
        self._suspension.rank_ended(self._now_ns, left=end.suspended)
        self._judgement.any_left = self._suspension.any_left
        if failed and not self._suspension.any_left:
            self._fail(failure, hung=self._judgement.gave_up_waiting(end))

    def _on_activity(self, event: RankReported | RanksPrinted | WatchdogSet) -> None:
        self._active_ns = self._now_ns
        if isinstance(event, WatchdogSet):
            self._watchdog_ns = event.limit_ns
        if isinstance(event, RankReported):
            self._on_report(event.report)

    def _on_report(self, report: Report) -> None:
        current = report.attempt == self.attempt and self.phase in (Phase.RUNNING, Phase.STOPPING, Phase.ENDING)
        if not current or not 0 <= report.rank < self.world_size:
            return
        self._log(report)
        self._judgement.report(report, ranks=self.world_size)
        if isinstance(report, StepReport):
            self._step = max(report.step, self._step or 0)
            self._inject()

    def _inject(self) -> None:
        """Breaks what is due by the last step that was reported, or by the time since the ranks were started."""
        if self.attempt > 0 or self.phase is not Phase.RUNNING:
            return
        running_ns = self._now_ns - self._running_ns
        for fault in list(self._faults):
            by_step = fault.step is not None and self._step is not None and self._step >= fault.step
            if by_step or (fault.after_s is not None and running_ns >= fault.after_s * SECOND):
                self._faults.remove(fault)
                self._log(FaultInjected(what=f"{fault.kind}={fault.target}", attempt=self.attempt, step=self._step))
                self._effects.append(Inject(fault))

    # -- failing and stopping --------------------------------------------------------------------------------------

    def _fail(self, failure: Failure, *, hung: bool = False) -> None:
        """`hung`: of the ranks that are left some hang, and their stacks say where."""
        if self.phase in IN_ATTEMPT:
            self._judgement.failed_ns = self._now_ns
            self._stop_gang(SIGTERM, self.spec.timeouts.settle_ns, stacks=hung)
        if self.phase is Phase.STOPPING:
            self._judgement.add(failure)

    def _on_suspension(self, event: SuspendAsked | PointsCollected) -> None:
        if isinstance(event, SuspendAsked):
            self._suspend()
        elif self._table.find(event.node, event.incarnation) is not None:
            self._suspension.take(event)

    def _suspend(self, rank: int | None = None) -> None:
        """`rank` has left, or else somebody wants the nodes."""
        if self._suspension.asked or self._judgement.ends_job or self.phase is Phase.ENDING:
            return
        self._log(SuspendRequested(attempt=self.attempt, rank=rank))
        self._judgement.suspending = True
        running = self.members if self.phase is Phase.RUNNING else []
        self._effects += self._suspension.begin(self._now_ns, self.attempt, running, self.layout)
        if self.phase in (Phase.STARTING, Phase.PREPARING):
            self._judgement.failed_ns = self._now_ns
            self._stop_gang(SIGTERM)

    def _watch_suspension(self) -> None:
        """With each tick, which has taken off the time that the launcher slept: begins a suspension that was ordered,
        and stops ranks that are overdue."""
        after_ns = self.spec.suspend_after_ns
        if after_ns and self._now_ns - self._running_ns >= after_ns:
            self._suspend()
        if self._suspension.asked and self._suspension.overdue(self._now_ns, self.members):
            self._judgement.failed_ns = self._now_ns
            self._stop_gang(SIGTERM)

    def _stop_gang(self, signal: int, settle_ns: int = 0, *, stacks: bool = False) -> None:
        self.phase = Phase.STOPPING
        stop = Stop(self.attempt, signal, settle_ns, self.spec.timeouts.stop_grace_ns, stacks)
        self._effects += self._table.stop_ranks(self._now_ns, stop)

    def _on_stop(self, signal: int) -> None:
        if self._judgement.stop_signal is not None:
            if self._now_ns - self._stop_ns >= SAME_SIGNAL_NS:
                self._effects += self._table.kill_all(self._now_ns)
            return
        if self.phase is Phase.ENDING:
            return
        self._judgement.stop_signal, self._stop_ns = signal, self._now_ns
        if self.phase in IN_ATTEMPT:
            self._judgement.failed_ns = self._now_ns
            self._stop_gang(signal)

    def _give_up(self, reason: str) -> None:
        """No restart can help."""
        if self._judgement.fatal is None:
            self._judgement.fatal = reason
            if self.phase in IN_ATTEMPT:
                self._judgement.failed_ns = self._now_ns
                self._stop_gang(SIGTERM)

    def _tick(self) -> None:
        gap_ns = self._now_ns - self._tick_ns - TICK_NS
        slept = gap_ns > self.spec.timeouts.node_lost_ns // 3
        self._tick_ns = self._now_ns
        self._inject()
        self._active_ns += gap_ns if slept else 0
        self._watch()
        if slept:
            self._suspension.gap(gap_ns)
        if self.phase is Phase.RUNNING:
            self._watch_suspension()
        if slept:
            self._table.give_back(gap_ns)
        for node in self.nodes:
            self._watch_node(node)

    def _watch_node(self, node: Node) -> None:
        lost = self._table.loss(node, self._now_ns)
        late = self._now_ns >= node.deadline_ns
        if lost is not None:
            self._lose(node, lost)
        elif node.state is NodeState.LEAVING and late:
            self._effects.append(self._table.kill(node, self._now_ns))
        elif node.state is NodeState.KILLING and late:
            node.state = NodeState.DOWN
            if self.spec.hosts:  # its lease is over
                self._hosts.silent(node.host, self._now_ns)
            else:
                self._give_up(
                    f"node {node.number} still has processes {format_duration(self.spec.timeouts.kill_ns)} after "
                    "SIGKILL; end them before starting the job again"
                )

    def _watch(self) -> None:
        """The watchdog: no rank has printed or reported anything for long."""
        limit_ns = self._watchdog_ns
        if limit_ns and self.phase is Phase.RUNNING and self._now_ns - self._active_ns >= limit_ns:
            reason = f"no rank printed or reported anything for {format_duration(limit_ns)} (--watchdog)"
            self._fail(Failure(-1, None, 1, reason, "unknown", "hang"), hung=True)

    # -- going on --------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Everything that follows from states alone."""
        if self.phase is Phase.PAUSING:
            self._pause()
        if self.phase is Phase.STARTING:
            self._assemble()
        if self.phase is Phase.RUNNING and all(node.state is NodeState.IDLE for node in self.members):
            if self._suspension.any_left:
                self._end_suspended("suspended")
            else:
                self._end(0, "all ranks exited with code 0")
        if self.phase is Phase.RUNNING and self._suspension.asked:
            self._effects += self._suspension.advance(self.members)
        if self.phase is Phase.STOPPING:
            self._judge()
        if self.phase is Phase.ENDING:
            self._wait_for_end()

    def _judge(self) -> None:
        self._effects += self._judgement.judge(self._now_ns, self.nodes, self.layout)
        if self._judgement.over(self.nodes):
            self._after_stop()

    def _after_stop(self) -> None:
        if self._judgement.restarting:
            if self._judgement.progressed:
                self._pause_ns = self.spec.timeouts.backoff_ns
            self._resume_ns = self._judgement.failed_ns + self._pause_ns
            self.phase = Phase.PAUSING
            self._hosts.begin_attempt(self.nodes)
            self._gather()  # once: a supervisor that cannot be started must not be started again and again
            return
        if self._judgement.suspended:
            self._end_suspended(self._judgement.outcome()[1])
        else:
            self._end(*self._judgement.outcome())

    def _end_suspended(self, reason: str) -> None:
        asked = self.members if self._suspension.asked_ranks else []
        ends = [end for node in asked for end in node.ends.values()]
        ended = sum(end.told for end in ends)
        horizon = self._suspension.horizon if self._suspension.any_left else None
        self._log(Suspended(attempt=self.attempt, horizon=horizon, ended_ranks=ended))
        if ended:
            reason += f"; {ended} of {len(ends)} ranks did not leave by themselves and were stopped"
        self._suspended = True
        self._end(SUSPENDED_EXIT_CODE, reason)

    def _pause(self) -> None:
        if not self._judgement.restarting:
            self._after_stop()
            return
        if self._now_ns >= self._resume_ns:
            self._pause_ns = min(2 * self._pause_ns, self.spec.timeouts.backoff_max_ns)
            self.attempt += 1
            self._judgement.begin_attempt()
            self._begin_attempt()

    def _end(self, exit_code: int, reason: str) -> None:
        if exit_code == SUSPENDED_EXIT_CODE and not self._suspended:
            exit_code = 1  # of a rank that failed with this code; it has not left
        self._outcome = (exit_code, reason)
        self.phase = Phase.ENDING
        self._effects += self._table.dismiss(self._now_ns)

    def _wait_for_end(self) -> None:
        if self._table.all_down():
            self.phase = Phase.FINISHED
            exit_code, reason = self._outcome
            if self._judgement.fatal is not None and self._judgement.fatal not in reason:
                exit_code = 1 if self._suspended else exit_code or 1
                reason = f"{reason}; {self._judgement.fatal}"
            suspended = self._suspended and exit_code == SUSPENDED_EXIT_CODE
            culprit = self._judgement.culprit if exit_code and not suspended else None
            signal = self._judgement.stop_signal if exit_code else None
            self._log(JobFinished(exit_code=exit_code, reason=reason))
            self._effects.append(Finish(exit_code, reason, culprit, signal, suspended))

    # -- small helpers -----------------------------------------------------------------------------------------------

    def _log(self, event: JobEvent) -> None:
        self._effects.append(Log(event))
