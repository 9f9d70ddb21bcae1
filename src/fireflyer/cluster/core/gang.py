"""The gang: all ranks of a job run together or not at all. A pure machine; the launcher performs its effects.

Phases of the job
-----------------

    STARTING ──all agents up──> PREPARING ──port and store ready──> RUNNING ──all ranks ended with 0──> ENDING
        │                           │                                  │                                  │
        └───────────────────────────┴──── a failure, or a stop ────────┘                                  v
                                          │                                                           FINISHED
                                          v                                                               ^
                                      STOPPING ──every node quiet, no restart ────────> ENDING ───────────┘
                                          │
                                          └──every node quiet, restart──> PAUSING ──backoff over──> STARTING

An *attempt* spans STARTING to STOPPING; its number is TORCHELASTIC_RESTART_COUNT. A failure in any of these phases
fails the attempt: there is one restart budget and no other loop.

States of a node
----------------

    DOWN ──StartAgent──> COMING ──AgentUp──> IDLE ──StartRanks──> BUSY ──StopRanks──> STOPPING
     ^                     │                  ^ │                  │ │                   │
     │                     │                  └─┼────RanksGone─────┘ │                   │
     │                     │                  └─┼────RanksGone───────┼───────────────────┘
     │                     v                    v                    v
     └──AgentGone────── KILLING <──KillNode── (lost, silent, too slow to stop)

IDLE to LEAVING by `ShutDownAgent` at the end of the job; LEAVING to DOWN by `AgentGone`.

Why no two attempts ever run beside each other on a node: ranks are started in IDLE only, and IDLE is entered only by
`RanksGone` (the agent saw the last process of the attempt end) or by `AgentUp` of an agent that was started in DOWN,
which is entered only by `AgentGone` (nothing that the previous agent started is left). Numbers older than the current
incarnation or attempt are ignored, so a message from the past cannot stand in for either.

What decides when a node is lost: its agent has been silent for `node_lost_ns`. When the launcher itself slept (a gap
between ticks), the silence is its own and every node is given the gap back, to its deadline as well.

How a failure proceeds: the first one stops the gang at once. Ranks that are left may end by themselves for `settle_ns`:
their collectives fail of the same cause, and say so in a log and a dump that a signal would cut off. A stop that was
asked for, and a job that cannot go on at all, wait for nothing. Who is to blame is decided `blame_ns` later, or when
all nodes are quiet if that is sooner (see `blame`). A first rank that failed before any report is judged only when the
gang is gone, because then the port tells whether a stranger had taken it: such a restart is free, a few times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    FaultInjected,
    JobEvent,
    JobFinished,
    JobStarted,
    NodeLost,
    PeerFailureReport,
    Report,
    StepReport,
)
from fireflyer.base.events import RankExited as RankExitedEvent
from fireflyer.base.units import MS, SECOND, format_duration
from fireflyer.cluster.core.blame import Failure, blame, describe_end, name_the_peer, signal_name
from fireflyer.cluster.core.messages import (
    AgentGone,
    AgentHeartbeat,
    AgentLost,
    AgentUp,
    AttemptPrepared,
    Begin,
    Effect,
    Event,
    Finish,
    Inject,
    KillNode,
    Log,
    PrepareAttempt,
    PrepareFailed,
    RankEnd,
    RankExited,
    RankReported,
    RanksGone,
    ShutDownAgent,
    StartAgent,
    StartRanks,
    StopRanks,
    StopRequested,
    StorageFailed,
    Tick,
)
from fireflyer.cluster.schema.job import Culprit, Fault, JobSpec

__all__ = ["MAX_PORT_RETRIES", "TICK_NS", "Gang", "NodeState", "Phase"]

TICK_NS = 100 * MS
MAX_PORT_RETRIES = 3
"""Restarts that are not counted because a stranger had taken the port that was found free."""
SAME_SIGNAL_NS = 300 * MS
"""A second stop signal within this time is the first one, delivered twice."""
STOP_SLACK_NS = 2 * SECOND
"""An agent that has not stopped its ranks so long after their grace is killed."""
LEAVE_NS = 3 * SECOND
SIGTERM = 15


class Phase(Enum):
    STARTING = auto()
    PREPARING = auto()
    RUNNING = auto()
    STOPPING = auto()
    PAUSING = auto()
    ENDING = auto()
    FINISHED = auto()


class NodeState(Enum):
    DOWN = auto()
    COMING = auto()
    IDLE = auto()
    BUSY = auto()
    STOPPING = auto()
    KILLING = auto()
    LEAVING = auto()


_QUIET = (NodeState.DOWN, NodeState.COMING, NodeState.IDLE)
"""No rank of any attempt runs on such a node."""
_WATCHED = (NodeState.IDLE, NodeState.BUSY, NodeState.STOPPING)
"""Its agent must show signs of life."""
_IN_ATTEMPT = (Phase.STARTING, Phase.PREPARING, Phase.RUNNING)


@dataclass(slots=True)
class _Node:
    number: int
    state: NodeState = NodeState.DOWN
    incarnation: int = 0
    seen_ns: int = 0
    deadline_ns: int = 0
    """Meaning by state: COMING must be up, STOPPING quiet, KILLING and LEAVING gone by then."""
    ends: dict[int, RankEnd] = field(default_factory=dict)
    """Ranks of the current attempt that have ended."""


class Gang:
    """`handle` one event at a time, perform the effects in order. See the module docstring."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.phase = Phase.STARTING
        self.attempt = 0
        self.nodes = [_Node(number) for number in range(spec.nodes)]
        self._effects: list[Effect] = []
        self._now_ns = 0
        self._tick_ns = 0
        self._failures: list[Failure] = []
        self._peer_failures: list[PeerFailureReport] = []
        self._failed_ns = 0
        self._judged = False
        self._restarting = False
        self._restarts = 0
        self._port_retries = 0
        self._port_taken = False
        self._pause_ns = spec.timeouts.backoff_ns
        self._resume_ns = 0
        self._reported = False
        self._progressed = False
        self._faults = list(spec.inject)
        self._step: int | None = None
        self._running_ns = 0
        self._stop_signal: int | None = None
        self._stop_ns = 0
        self._fatal: str | None = None
        self._culprit: Culprit | None = None
        self._outcome: tuple[int, str] = (0, "")

    @property
    def attempts(self) -> int:
        """How many attempts were started so far."""
        return self.attempt + 1

    @property
    def faults_left(self) -> tuple[Fault, ...]:
        """Faults that were asked for and not injected yet; only the first attempt is disturbed."""
        return tuple(self._faults)

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
            case AgentUp() | AgentHeartbeat() | AgentLost() | AgentGone():
                self._on_agent(event)
            case AttemptPrepared() | PrepareFailed():
                self._on_prepared(event)
            case RankExited() | RanksGone():
                self._on_ranks(event)
            case RankReported(report):
                self._on_report(report)
            case StopRequested(signal):
                self._on_stop(signal)
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
            )
        )
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.phase = Phase.STARTING
        self._failures = []
        self._peer_failures = []
        self._judged = self._restarting = self._port_taken = self._reported = self._progressed = False
        self._log(AttemptStarted(attempt=self.attempt))

    def _start_agents(self) -> None:
        for node in self.nodes:
            if node.state is NodeState.DOWN:
                node.incarnation += 1
                node.state = NodeState.COMING
                node.deadline_ns = self._now_ns + self.spec.timeouts.agent_start_ns
                self._effects.append(StartAgent(node.number, node.incarnation))

    def _on_prepared(self, event: AttemptPrepared | PrepareFailed) -> None:
        if self.phase is not Phase.PREPARING or event.attempt != self.attempt:
            return
        if isinstance(event, PrepareFailed):
            self._give_up(event.reason)
            return
        self.phase = Phase.RUNNING
        self._running_ns = self._now_ns
        for node in self.nodes:
            node.state = NodeState.BUSY
            node.ends = {}
            self._effects.append(StartRanks(node.number, node.incarnation, self.attempt))

    # -- what agents say -------------------------------------------------------------------------------------------

    def _on_agent(self, event: AgentUp | AgentHeartbeat | AgentLost | AgentGone) -> None:
        node = self._node(event.node, event.incarnation)
        if node is None:
            return
        node.seen_ns = self._now_ns
        match event:
            case AgentUp() if node.state is NodeState.COMING:
                node.state = NodeState.IDLE
            case AgentLost(reason=reason) if node.state not in (NodeState.DOWN, NodeState.KILLING, NodeState.LEAVING):
                self._lose(node, reason)
            case AgentGone(reason=reason):
                expected = node.state in (NodeState.DOWN, NodeState.KILLING, NodeState.LEAVING)
                node.state = NodeState.DOWN
                if not expected:
                    self._lost(node, reason)

    def _lose(self, node: _Node, reason: str) -> None:
        """The node is no use any more, but something may still run there."""
        self._kill(node)
        self._lost(node, reason)

    def _kill(self, node: _Node) -> None:
        node.state = NodeState.KILLING
        node.deadline_ns = self._now_ns + self.spec.timeouts.kill_ns
        self._effects.append(KillNode(node.number, node.incarnation))

    def _lost(self, node: _Node, reason: str) -> None:
        self._log(NodeLost(node=node.number, attempt=self.attempt, reason=reason))
        self._fail(Failure(node.number, None, 1, f"node {node.number} was lost: {reason}"))

    # -- what ranks do ---------------------------------------------------------------------------------------------

    def _on_ranks(self, event: RankExited | RanksGone) -> None:
        node = self._node(event.node, event.incarnation)
        if node is None or event.attempt != self.attempt or node.state not in (NodeState.BUSY, NodeState.STOPPING):
            return
        node.seen_ns = self._now_ns
        if isinstance(event, RankExited):
            self._end_rank(node, event.end)
            return
        for end in event.ends:
            self._end_rank(node, end)
        self._port_taken = self._port_taken or (event.port_taken and self.spec.master_port == 0)
        node.state = NodeState.IDLE
        missing = self.spec.ranks_per_node - len(node.ends)
        if missing:
            self._lose(node, f"its agent reported no exit code for {missing} of its ranks")

    def _end_rank(self, node: _Node, end: RankEnd) -> None:
        first = node.number * self.spec.ranks_per_node
        if end.rank in node.ends or not first <= end.rank < first + self.spec.ranks_per_node:
            return
        node.ends[end.rank] = end
        self._log(RankExitedEvent(rank=end.rank, attempt=self.attempt, exit_code=end.exit_code))
        if end.exit_code != 0 and not end.told:
            self._fail(Failure(node.number, end.rank, end.exit_code, describe_end(node.number, end)))

    def _on_report(self, report: Report) -> None:
        current = report.attempt == self.attempt and self.phase in (Phase.RUNNING, Phase.STOPPING, Phase.ENDING)
        if not current or not 0 <= report.rank < self.spec.world_size:
            return
        self._log(report)
        if isinstance(report, PeerFailureReport) and 0 <= report.peer < self.spec.world_size:
            self._peer_failures.append(report)
        if isinstance(report, StepReport):
            self._progressed = True
            self._step = max(report.step, self._step or 0)
            self._inject()
        self._reported = True

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

    def _fail(self, failure: Failure) -> None:
        if self.phase in _IN_ATTEMPT:
            self._failed_ns = self._now_ns
            self._stop_gang(SIGTERM, self.spec.timeouts.settle_ns)
        if self.phase is Phase.STOPPING and not self._judged:
            self._failures.append(failure)

    def _stop_gang(self, signal: int, settle_ns: int = 0) -> None:
        self.phase = Phase.STOPPING
        grace_ns = self.spec.timeouts.stop_grace_ns
        for node in self.nodes:
            if node.state is NodeState.BUSY:
                node.state = NodeState.STOPPING
                node.deadline_ns = self._now_ns + settle_ns + grace_ns + STOP_SLACK_NS
                stop = StopRanks(node.number, node.incarnation, self.attempt, signal, settle_ns, grace_ns)
                self._effects.append(stop)

    def _on_stop(self, signal: int) -> None:
        if self._stop_signal is not None:
            if self._now_ns - self._stop_ns >= SAME_SIGNAL_NS:
                self._kill_all()
            return
        if self.phase is Phase.ENDING:
            return
        self._stop_signal, self._stop_ns = signal, self._now_ns
        if self.phase in _IN_ATTEMPT:
            self._failed_ns = self._now_ns
            self._stop_gang(signal)

    def _kill_all(self) -> None:
        for node in self.nodes:
            if node.state not in (NodeState.DOWN, NodeState.KILLING):
                self._kill(node)

    def _give_up(self, reason: str) -> None:
        """No restart can help."""
        if self._fatal is None:
            self._fatal = reason
            if self.phase in _IN_ATTEMPT:
                self._failed_ns = self._now_ns
                self._stop_gang(SIGTERM)

    def _tick(self) -> None:
        timeouts = self.spec.timeouts
        gap_ns = self._now_ns - self._tick_ns - TICK_NS
        self._tick_ns = self._now_ns
        self._inject()
        for node in self.nodes:
            if gap_ns > timeouts.node_lost_ns // 3:
                node.seen_ns += gap_ns
                node.deadline_ns += gap_ns
            late = self._now_ns >= node.deadline_ns
            if node.state in _WATCHED and self._now_ns - node.seen_ns >= timeouts.node_lost_ns:
                self._lose(node, f"no heartbeat from its agent for {format_duration(timeouts.node_lost_ns)}")
            elif node.state is NodeState.COMING and late:
                self._lose(node, f"its agent did not start within {format_duration(timeouts.agent_start_ns)}")
            elif node.state is NodeState.STOPPING and late:
                self._lose(node, "its agent did not stop its ranks in time")
            elif node.state is NodeState.LEAVING and late:
                self._kill(node)
            elif node.state is NodeState.KILLING and late:
                node.state = NodeState.DOWN
                self._give_up(
                    f"node {node.number} still has processes {format_duration(timeouts.kill_ns)} after SIGKILL; "
                    "end them before starting the job again"
                )

    # -- going on --------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Everything that follows from states alone."""
        if self.phase is Phase.PAUSING:
            self._pause()
        if self.phase is Phase.STARTING:
            self._start_agents()
            if self._all(NodeState.IDLE):
                self.phase = Phase.PREPARING
                self._effects.append(PrepareAttempt(self.attempt))
        if self.phase is Phase.RUNNING and self._all(NodeState.IDLE):
            self._end(0, "all ranks exited with code 0")
        if self.phase is Phase.STOPPING:
            self._judge()
            if self._judged and self._quiet():
                self._after_stop()
        if self.phase is Phase.ENDING:
            self._wait_for_end()

    def _judge(self) -> None:
        if self._judged:
            return
        quiet = self._quiet()
        early = not self._reported and bool(self._failures) and blame(self._failures).rank == 0
        in_window = self._now_ns < self._failed_ns + self.spec.timeouts.blame_ns
        if not quiet and (in_window or (early and self.spec.master_port == 0)):
            return
        self._judged = True
        reason = self._verdict()
        self._restarting = self._stop_signal is None and self._fatal is None and self._may_restart()
        culprit = self._culprit if self._culprit is not None and self._culprit.attempt == self.attempt else None
        self._log(
            AttemptFailed(
                attempt=self.attempt,
                reason=reason,
                restarting=self._restarting,
                node=culprit.node if culprit is not None else None,
                rank=culprit.rank if culprit is not None else None,
                stopped=self._stop_signal is not None,
            )
        )

    def _verdict(self) -> str:
        self._culprit = None
        if self._stop_signal is not None:
            return f"stopped by {signal_name(self._stop_signal)}"
        if self._failures:
            failure = blame(self._failures)
            per_node = self.spec.ranks_per_node
            failure = name_the_peer(failure, self._failures, self._peer_failures, ranks_per_node=per_node)
            self._culprit = Culprit(self.attempt, failure.node, failure.rank, failure.exit_code, failure.reason)
        if self._fatal is not None:
            return self._fatal
        if self._culprit is None:
            return "the job was stopped"
        if self._port_taken:
            return f"MASTER_PORT was taken by another process; {self._culprit.reason}"
        return self._culprit.reason

    def _may_restart(self) -> bool:
        """Takes one restart from the budget."""
        if self._port_taken and self._port_retries < MAX_PORT_RETRIES:
            self._port_retries += 1
            return True
        if self._restarts < self.spec.max_restarts:
            self._restarts += 1
            return True
        return False

    def _after_stop(self) -> None:
        if self._stop_signal is None and self._fatal is None and self._restarting:
            if self._progressed:
                self._pause_ns = self.spec.timeouts.backoff_ns
            self._resume_ns = self._failed_ns + self._pause_ns
            self.phase = Phase.PAUSING
            self._start_agents()  # once: an agent that cannot be started must not be started again and again
            return
        if self._stop_signal is not None:
            self._end(128 + self._stop_signal, f"stopped by {signal_name(self._stop_signal)}")
        elif self._fatal is not None:
            self._end(1, self._fatal)
        elif self._culprit is not None:
            self._end(self._culprit.exit_code, self._culprit.reason + self._why_no_restart())

    def _why_no_restart(self) -> str:
        limit = self.spec.max_restarts
        return f"; all {limit} restarts are used up (--max-restarts)" if limit else ""

    def _pause(self) -> None:
        if self._stop_signal is not None or self._fatal is not None:
            self._after_stop()
            return
        if self._now_ns >= self._resume_ns:
            self._pause_ns = min(2 * self._pause_ns, self.spec.timeouts.backoff_max_ns)
            self.attempt += 1
            self._begin_attempt()

    def _end(self, exit_code: int, reason: str) -> None:
        self._outcome = (exit_code, reason)
        self.phase = Phase.ENDING
        for node in self.nodes:
            if node.state is NodeState.IDLE:
                node.state = NodeState.LEAVING
                node.deadline_ns = self._now_ns + LEAVE_NS
                self._effects.append(ShutDownAgent(node.number, node.incarnation))
            elif node.state is NodeState.COMING:
                self._kill(node)

    def _wait_for_end(self) -> None:
        if self._all(NodeState.DOWN):
            self.phase = Phase.FINISHED
            exit_code, reason = self._outcome
            if self._fatal is not None and self._fatal not in reason:
                exit_code, reason = exit_code or 1, f"{reason}; {self._fatal}"
            culprit = self._culprit if exit_code else None
            self._log(JobFinished(exit_code=exit_code, reason=reason))
            self._effects.append(Finish(exit_code, reason, culprit))

    # -- small helpers -----------------------------------------------------------------------------------------------

    def _node(self, number: int, incarnation: int) -> _Node | None:
        if not 0 <= number < len(self.nodes) or self.nodes[number].incarnation != incarnation:
            return None
        return self.nodes[number]

    def _all(self, state: NodeState) -> bool:
        return all(node.state is state for node in self.nodes)

    def _quiet(self) -> bool:
        return self._all_in(_QUIET)

    def _all_in(self, states: Sequence[NodeState]) -> bool:
        return all(node.state in states for node in self.nodes)

    def _log(self, event: JobEvent) -> None:
        self._effects.append(Log(event))
